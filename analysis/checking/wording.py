"""A verdict in plain words: what it is, how bad, why it matters, and the one thing to do."""

from __future__ import annotations

from typing import Any

from klgrad.analysis.checking.fields import BERNOULLI, TRUNCATED
from klgrad.analysis.checking.report import WANTED
from klgrad.analysis.checking.targets import Target

_EXACT = 1e-6  # what is nearer than this is exact to rounding


def sentence(found: dict[str, Any], target: Target, placement: str) -> tuple[str, str]:
    """The verdict in plain words with its number and why it matters; and what to do."""
    if found["passes"]:
        return _right(found, target), ""
    if found.get("by_group_size"):
        return _group(found, target)
    verdict, name = found["verdict"], found["name"]
    if name in target.fields and isinstance(found["factor"], float):
        return _scaled(found, target.words, "")
    if verdict.startswith("scaled-"):
        missing = "; its future term is missing besides" if name == "token" and target.name == "sequence" else ""
        return _scaled(found, WANTED[name], missing)
    if isinstance(found["factor"], dict):
        return _by_law(found, f"the {WANTED.get(name, name)} gradient")
    if verdict == "other":
        return _other(found)
    return _usual(found, target, placement)


def _right(found: dict[str, Any], target: Target) -> str:
    name = WANTED.get(found["name"], found["name"])
    what = name if name.startswith("the gradient of") else f"the {name} gradient"
    start = (
        "rows of a batch depend on each other; over all groups of G sequences " if found.get("by_group_size") else ""
    )
    much = "exactly" if found["off"] <= _EXACT else f"within {100 * found['off']:.2g} % of"
    sign = ""
    if target.name == "entropy":
        raises = isinstance(found["factor"], float) and found["factor"] > 0
        sign = "; descending it raises the entropy" if raises else "; descending it lowers the entropy: subtract it"
    return f"{start}the expected gradient is {much} {what}{sign}"


def _usual(found: dict[str, Any], target: Target, placement: str) -> tuple[str, str]:
    verdict, far, free = found["verdict"], _distance(found), _free(found)
    words: dict[str, tuple[str, str]] = {
        "sequence": ("it is the sequence-level reverse-KL gradient, the future term included", ""),
        "token": (
            f"it is the token-level reverse-KL gradient: the future term, what a token does to later KL, is missing "
            f"({far})",
            "for the sequence-level gradient put k1 in the reward, whole-sequence or reward-to-go, or ask for --target "
            "token if that is what you want",
        ),
        "token-forward": (
            f"it descends the token-level forward KL(pi_ref || pi), not the reverse KL ({far}): an unbiased value does "
            "not make an unbiased gradient",
            "in the loss take k2 (0.5 * (logp - ref_logp)**2) for the token-level reverse KL, k1 in the reward for the "
            "sequence's",
        ),
        "zero": _zero(placement, free),
        "dead": ("the penalty is zero for every sample: nothing reaches the gradient", "look at what it is given")
        if placement == "reward"
        else (
            "the gradient is zero for every sample: detached, under no_grad, or clamped flat; logged, never optimised",
            "differentiate it: no .detach(), .item() or no_grad between the log-probs and the result",
        ),
        "future": (
            f"it is the future term alone: a token's own KL is missing ({far})",
            "differentiate the exact per-position KL as well (placement both)",
        ),
    }
    if verdict in words:
        return words[verdict]
    if verdict == "wrong-sign":
        size = abs(found["factor"])
        times = "" if abs(size - 1) < _EXACT else f"{size:.6g} times "
        return f"the sign is wrong: minus {times}the {found['name']}-level gradient, so drift is rewarded", "negate it"
    return _divergence(found, target, far, free)


def _zero(placement: str, free: str) -> tuple[str, str]:
    text = f"its expected gradient is zero: pure noise that holds nothing back{free}"
    if placement == "loss":
        return text, "put the estimate in the reward instead"
    return (
        f"{text}: what the sampled token itself did is not in it, so as a reward for that token it is a baseline",
        "give each token the log-ratio of what was sampled (k1), or the KL of later places too (reward-to-go)",
    )


def _divergence(found: dict[str, Any], target: Target, far: str, free: str) -> tuple[str, str]:
    name, size = found["name"], found["factor"]
    times = "" if abs(size - 1) < _EXACT else f"{size:.6g} times "
    mend = ""
    if name in TRUNCATED:
        mend = "only the exact head with a sampled tail is the KL; or take the whole vocabulary"
    elif name == BERNOULLI:
        mend = "take the log-ratio of the sampled token, or the sum over the vocabulary"
    elif name in WANTED:
        name = f"the {WANTED[name]} gradient"
        mend = "its direction is that of another KL, whatever the factor"
    return f"it optimises something else: {times}{name} ({far}){free}", mend


def _free(found: dict[str, Any]) -> str:
    return "" if found["reference_matters"] else ", and it does not depend on the reference"


def _distance(found: dict[str, Any]) -> str:
    """Relative bias and cosine to what is wanted, at their worst."""
    part = found["to_target"]
    worst = max((v for v in part["relative_bias"].values() if v is not None), default=0.0)
    cosines = [v for v in part["cosine"].values() if v is not None]
    return f"relative bias {worst:.3g}" + (f", cosine down to {min(cosines):.3f}" if cosines else "")


def _scaled(found: dict[str, Any], words: str, missing: str) -> tuple[str, str]:
    scale = found["factor"]
    if isinstance(scale, dict):
        return _by_law(found, f"the {words} gradient")
    if scale < 0:
        times = "" if abs(scale + 1) < _EXACT else f"{abs(scale):.6g} times "
        return f"the sign is wrong: minus {times}the {words} gradient, so drift is rewarded", "negate it"
    within = "" if found["off"] <= _EXACT else f", to within {100 * found['off']:.2g} %"
    return (
        f"it is {scale:.6g} times the {words} gradient{within} (cosine 1): the penalty's strength is {scale:.6g} beta, "
        f"not beta{missing}",
        f"divide by {scale:.6g}",
    )


def _by_law(found: dict[str, Any], what: str) -> tuple[str, str]:
    """A factor that depends on the length, on the vocabulary's size, or both."""
    scale, by = found["factor"], found["by"]
    if by == "vocabulary":
        law, mend = _law(scale, "V"), "sum over the vocabulary (.sum(-1)) where it takes the mean"
        listed = ", ".join(f"V = {n}: {s:.4g}" for n, s in scale.items())
        return f"it is {what} scaled by {law}: the strength depends on the vocabulary's size (for {listed})", mend
    if by == "both":
        listed = ", ".join(f"V = {v}, T = {n}: {s:.4g}" for (v, n), s in list(scale.items())[:4])
        return (
            f"it is {what} over the vocabulary's size and the places of the batch, padding included: a mean over all "
            f"entries ({listed})",
            "sum over the vocabulary, and over real tokens",
        )
    ends = "; with an end token replies of different length weigh differently" if found["only_fixed_length"] else ""
    listed = ", ".join(f"T = {n}: {s:.4g}" for n, s in scale.items())
    return (
        f"it is {what} scaled by {_law(scale, 'T')}: the effective beta depends on the length (for {listed}){ends}",
        "sum over tokens, or divide by a constant",
    )


def _law(scales: dict[int, float], letter: str) -> str:
    for power, law in ((-1, f"1/{letter}"), (1, letter)):
        base = [s / n**power for n, s in scales.items()]
        if max(base) - min(base) <= 1e-4 * abs(base[0]):
            size = f"{base[0]:.4g}"
            return law if size == "1" else f"{size}/{letter}" if power < 0 else f"{size} {letter}"
    return f"a factor that depends on {letter}"


def _other(found: dict[str, Any]) -> tuple[str, str]:
    near = f"; nearest is {found['nearest']}" if found["nearest"] else ""
    text = f"it is no gradient of a known objective: {found['name']} ({_distance(found)}){_free(found)}{near}"
    mend = ""
    if found["by"] == "two words":
        mend = "with two tokens one probability says all; sum over the whole vocabulary, or use the sampled log-ratio"
    elif "/T" in found["name"]:
        text += "; a mean over tokens meets a sum, so what is optimised depends on the length"
        mend = "aggregate both parts alike"
    elif found["only_fixed_length"]:
        mend = "look at what padding does, and at weights that differ between long and short replies"
    if found["at_identity"] > 1e-3 and found["by"] != "two words":
        text += (
            f"; with equal log-probs it still pushes ({found['at_identity']:.3g} of the KL's gradient elsewhere), "
            "which no divergence does: shifted against each other, at two temperatures, or another reference"
        )
    return text, mend


# ------------------------------------------------------------------------------------------ groups


def _group(found: dict[str, Any], target: Target) -> tuple[str, str]:
    scales = found["by_group_size"]
    start = "rows of a batch depend on each other; over all groups of G sequences "
    large, mend = _large(found, target)
    if isinstance(found["factor"], dict) and found["verdict"] != "other":
        text, law = _by_law(found, f"the {WANTED.get(found['name'], found['name'])} gradient")
        return start + text + large, mend or law
    if found["verdict"] == "other":
        text, law = _other(found)
        return start + text + large, mend or law
    if found["verdict"] == "zero":
        return f"{start}its expected gradient is zero: pure noise that holds nothing back", ""
    law = ""
    if all(isinstance(s, float) and abs(s - (n - 1) / n) < 1e-4 for n, s in scales.items()):
        law, mend = " = (G - 1)/G", "the sequence's own value is part of its baseline; leave it out"
    elif all(isinstance(s, float) and abs(s - n) < 1e-4 for n, s in scales.items()):
        law, mend = " = G", "it sums over the batch where a mean is meant"
    sizes = ", ".join(f"G = {n}: {s:.4g}" if isinstance(s, float) else f"G = {n}: by length" for n, s in scales.items())
    field = WANTED.get(found["name"])
    what = f"the {field} gradient" if field else found["name"]
    return f"{start}it is {what} times a factor that depends on the group's size: {sizes}{law}{large}", mend


def _large(found: dict[str, Any], target: Target) -> tuple[str, str]:
    """What large batches give, and how far small ones are from it."""
    part = found.get("large_batch")
    if not part:
        return "", ""
    per = f" / {part['per']}" if part["per"] else ""
    size = "" if abs(part["factor"] - 1) < 1e-4 else f"{part['factor']:.4g} "
    rest = ", ".join(f"{100 * off:.2g} % in batches of {n}" for n, off in part["remainder"].items())
    mean = ", with E|y| the mean length" if part["per"] else ""
    text = f"; in large batches it is {size}{part['name']}{per}{mean}; the remainder is {rest}"
    if part["per"] and part["name"] in target.fields:
        return text, "a token mean divides the strength by the batch's mean length: divide by a constant instead"
    return text, ""
