"""A verdict in plain words: what it is, how bad, why it matters, what to do."""

from __future__ import annotations

from typing import Any

from klgrad.analysis.checking.report import WANTED


def sentence(found: dict[str, Any], target: str, placement: str) -> str:
    """The verdict in plain words, with its number, why it matters and what to do."""
    verdict, scale = found["verdict"], found["factor"]
    far = _distance(found)
    if found.get("by_group_size"):
        return _group_sentence(found, target)
    if verdict in WANTED and verdict == target:
        return f"the expected gradient is exactly the {WANTED[verdict]} gradient"
    free = _free(found)
    words = {
        "sequence": "it is the sequence-level reverse-KL gradient, the future term included",
        "token": "it is the token-level reverse-KL gradient: the future term, what a token does to later KL, is "
        f"missing ({far}); for the sequence-level gradient put k1 in the reward, whole-sequence or reward-to-go",
        "token-forward": f"it descends the token-level forward KL(pi_ref || pi), not the reverse KL ({far}): "
        "an unbiased value does not make an unbiased gradient",
        "zero": "its expected gradient is zero: pure noise that holds nothing back"
        f"{free}; put the estimate in the reward instead",
        "dead": "the penalty is zero for every sample: nothing reaches the gradient"
        if placement == "reward"
        else "the gradient is zero for every sample: detached, under no_grad, or clamped flat; logged, never optimised",
        "future": f"it is the future term alone: a token's own KL is missing ({far}); differentiate the exact "
        "per-position KL as well (placement both)",
        "divergence": f"it optimises something else: {_factor(scale)}{found['name']} ({far}){free}{_by_length(scale)}",
    }
    if verdict in words:
        return words[verdict]
    if verdict == "wrong-sign":
        size = _factor(scale, signed=False)
        return f"the sign is wrong: minus {size}the {found['name']}-level gradient, so drift is rewarded; negate it"
    if verdict.startswith("scaled-"):
        return _scaled_sentence(found, verdict.removeprefix("scaled-"), target)
    return _other_sentence(found)


def _free(found: dict[str, Any]) -> str:
    return "" if found["reference_matters"] else ", and it does not depend on the reference"


def _distance(found: dict[str, Any]) -> str:
    """Relative bias and cosine at their worst; with an end token too where that is what differs."""
    parts = [found, *([found["with_end_token"]] if found["only_fixed_length"] else [])]
    worst = max((v for part in parts for v in part["relative_bias"].values()), default=0.0)
    cosines = [v for part in parts for v in part["cosine"].values() if v is not None]
    return f"relative bias {worst:.3g}" + (f", cosine down to {min(cosines):.3f}" if cosines else "")


def _other_sentence(found: dict[str, Any]) -> str:
    text = f"it is no gradient of a known objective: {found['name']} ({_distance(found)}){_free(found)}"
    if "/T" in found["name"]:
        text += "; a mean over tokens meets a sum, so what is optimised depends on the length"
    elif found["only_fixed_length"]:
        text += "; look at what padding does, and at weights that differ between long and short replies"
    if found["at_identity"] > 1e-3:
        text += (
            f"; with equal log-probs it still pushes ({found['at_identity']:.3g} of the KL's gradient elsewhere), "
            "which no divergence does: shifted against each other, at two temperatures, or another reference"
        )
    return text


def _factor(scale: float | dict[int, float], *, signed: bool = True) -> str:
    if isinstance(scale, dict):
        return ""
    size = scale if signed else abs(scale)
    return "" if abs(size - 1) < 1e-6 else f"{size:.6g} times "


def _by_length(scale: float | dict[int, float]) -> str:
    if not isinstance(scale, dict):
        return ""
    listed = ", ".join(f"T = {n}: {s:.4g}" for n, s in scale.items())
    return f", scaled by {_law(scale)} ({listed}); sum over tokens, or divide by a constant"


def _scaled_sentence(found: dict[str, Any], field: str, target: str) -> str:
    scale = found["factor"]
    what = f"the {WANTED[field]} gradient"
    if not isinstance(scale, dict):
        short = "; its future term is missing besides" if field == "token" and target == "sequence" else ""
        return (
            f"it is {scale:.6g} times {what}: the penalty's strength is {scale:.6g} beta, not beta; "
            f"divide by {scale:.6g}{short}"
        )
    law = _law(scale)
    ends = "; with an end token it is no multiple of it at all, since replies of different length weigh differently"
    return (
        f"it is {what} scaled by {law}: the effective beta depends on the length (for "
        + ", ".join(f"T = {n}: {s:.4g}" for n, s in scale.items())
        + f"){ends if found['only_fixed_length'] else ''}; sum over tokens, or divide by a constant"
    )


def _law(scales: dict[int, float]) -> str:
    for power, law in ((-1, "1/T"), (1, "T")):
        base = [s / n**power for n, s in scales.items()]
        if max(base) - min(base) <= 1e-4 * abs(base[0]):
            size = f"{base[0]:.4g}"
            return law if size == "1" else f"{size}/T" if power < 0 else f"{size} T"
    return "a factor that depends on the length"


def _group_sentence(found: dict[str, Any], target: str) -> str:
    scales = found["by_group_size"]
    start = "rows of a batch depend on each other; over all groups of G sequences "
    if found["verdict"] == target:
        return f"{start}the expected gradient is exactly the {WANTED[target]} gradient"
    if found["verdict"].startswith("scaled-") and isinstance(found["factor"], dict):
        return start + _scaled_sentence(found, found["verdict"].removeprefix("scaled-"), target)
    if found["verdict"] == "other":
        return start + _other_sentence(found)
    if found["verdict"] == "zero":
        return f"{start}its expected gradient is zero: pure noise that holds nothing back"
    law = ""
    if all(isinstance(s, float) and abs(s - (n - 1) / n) < 1e-4 for n, s in scales.items()):
        law = " = (G - 1)/G: the sequence's own value is part of its baseline; leave it out"
    elif all(isinstance(s, float) and abs(s - n) < 1e-4 for n, s in scales.items()):
        law = " = G: it sums over the batch where a mean is meant"
    sizes = ", ".join(f"G = {n}: {s:.4g}" if isinstance(s, float) else f"G = {n}: by length" for n, s in scales.items())
    field = WANTED.get(found["name"])
    what = f"the {field} gradient" if field else found["name"]
    return f"{start}it is {what} times a factor that depends on the group's size: {sizes}{law}"
