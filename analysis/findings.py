"""The traps that a library's settings fall into, each as a finding with its lines.

A finding's level comes from the verdict that the engine gives: ``error`` where the expected gradient is none that
regularises towards the reference or where a setting is silently not applied, ``warning`` where it is another
divergence's, a partial one or depends on the length, ``note`` for what is worth knowing; ``open`` where the verdict
would rest on a guess, so that there is none.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from klgrad.analysis.libraries import editions, plain_key
from klgrad.analysis.readings import Reading, reading
from klgrad.analysis.resolution import Penalty, Resolution, applicable, matched, unwrapped, written
from klgrad.analysis.settings import Gap, Repeat, plain
from klgrad.synth.estimators import estimator, number

LEVELS = ("open", "error", "warning", "note")
_SHORT, _LONG = 2, 8  # replies of which the effective coefficient is told


@dataclass(frozen=True)
class Finding:
    """One thing to know about the settings: level, a short name, a sentence, and ``(key, line)`` of what causes it."""

    level: str
    id: str
    message: str
    keys: tuple[tuple[str, int | None], ...] = ()

    @property
    def line(self) -> int | None:
        """The first line that is known."""
        return next((line for _, line in self.keys if line is not None), None)


def findings(
    resolution: Resolution, total: Reading | None, repeated: Sequence[Repeat] = (), gaps: Sequence[Gap] = ()
) -> list[Finding]:
    """Everything to know about the settings, what is open and errors first.

    Args:
        total: the verdict on all penalties together; ``None`` without one.
        repeated: keys that a file writes twice.
        gaps: what the text leaves open.
    """
    if resolution.library.stage:
        return [Finding("open", "not-covered", resolution.library.stage)]
    found = [*_from_entry(resolution), *_settings_findings(resolution), *_unknown(resolution)]
    found += [*(_repeat_finding(repeat) for repeat in repeated), *_gap_findings(resolution, gaps)]
    found += _verdict_findings(resolution, total)
    if not resolution.penalties and not any(each.level == "error" for each in found):
        found.append(Finding("note", "no-penalty", "no KL penalty is on"))
    return sorted(found, key=lambda each: LEVELS.index(each.level))


# ------------------------------------------------------------------------------------------------- what settings do


def _places(resolution: Resolution, keys: Sequence[str]) -> tuple[tuple[str, int | None], ...]:
    """Keys with their lines, those that were given first."""
    given = [(resolution.given[key].written, resolution.given[key].line) for key in keys if key in resolution.given]
    return tuple(dict.fromkeys([*given, *((key, None) for key in keys if key not in resolution.given)]))


def _from_entry(resolution: Resolution) -> Iterator[Finding]:
    for identity, level, text, keys in applicable(resolution):
        yield Finding(level, identity, text, _places(resolution, keys))


def _repeat_finding(repeat: Repeat) -> Finding:
    message = (
        f"{repeat.key} is written twice, in lines {repeat.first} and {repeat.line}: the later one counts here, whole; "
        "some loaders refuse such a file"
    )
    return Finding("warning", "repeated-key", message, ((repeat.key, repeat.line),))


def _short(key: str) -> str:
    return key.rpartition(".")[2]


def _settings_findings(resolution: Resolution) -> Iterator[Finding]:
    """Coefficients that are not applied, values and versions that are not known, names that were completed."""
    told = {key for identity, _, _, keys in applicable(resolution) if identity == "not-applied" for key in keys}
    for key, switches in resolution.idle.items():
        if key in told or any(switch in resolution.given for switch in switches):
            continue
        off = " and ".join(f"{_short(s)} is {written(resolution.values[s])} by default" for s in switches)
        yield Finding(
            "error",
            "not-applied",
            f"{_short(key)} = {written(resolution.values[key])} is set and silently not applied: {off}",
            _places(resolution, [key]),
        )
    for penalty in resolution.penalties:
        name = penalty.coefficient_key
        if name is None:
            continue
        if penalty.coefficient == 0:
            default = name not in resolution.given
            yield Finding(
                "error" if default else "warning",
                "not-applied",
                f"the penalty in the {penalty.placement} is on and its coefficient {_short(name)} is 0"
                + (" by default" if default else "")
                + ": nothing is applied, and the reference forward is paid for",
                _places(resolution, [*penalty.keys[:1], name]),
            )
        elif penalty.coefficient < 0:
            yield Finding(
                "error",
                "wrong-sign",
                f"{_short(name)} = {number(penalty.coefficient)} is negative: drifting from the reference is rewarded",
                _places(resolution, [name]),
            )
    decisive = {key for penalty in resolution.penalties for key in (*penalty.keys, *penalty.assumption_keys)}
    unread = [k for k in sorted(decisive - set(resolution.given)) if not resolution.library.keys[k].read]
    if unread:
        held = ", ".join(f"{_short(key)} = {written(resolution.values[key])}" for key in unread)
        message = f"not given, and its default not read at this version: {held} is assumed"
        yield Finding("note", "assumed-default", message, _places(resolution, unread))
    for identity, message, keys in resolution.problems:
        guessed = identity == "unknown-value" and set(keys) & set(resolution.decisive)
        message += f", and the verdict would rest on it; --set {keys[0]}=VALUE says it" if guessed else ""
        yield Finding("open" if guessed else "warning", identity, message, _places(resolution, keys))
    for given in resolution.given.values():
        if plain_key(given.written) != plain_key(given.key) and not resolution.library.keys[given.key].section:
            yield Finding("note", "read-as", f"{given.written} is read as {given.key}", ((given.written, given.line),))
    entry = resolution.library
    if entry.asked:
        known = ", ".join(edition.version for edition in editions(entry))
        message = f"{entry.title} {entry.asked} was not read (known: {known}): the facts of {entry.version} are assumed"
        yield Finding("warning", "unknown-version", message)


_OF_THE_KL = re.compile(r"(?:^|[._])(?:kl|kld|kldiv)(?:$|[._\d])|(?:^|_)kl_?(?:div|coe)")
_NEAR_THE_KL = re.compile(r"(?:^|_)beta$|(?:^|_)ref(?:$|_)|reference|(?:^|_)penalty")
_OF_SOMETHING_ELSE = re.compile(r"repetition|length|presence|frequency|overlong|format|rep_|no_repeat")
_ELSEWHERE = {"env", "envs", "reward", "rewards", "reward_model", "data", "sampling_params", "generation", "eval"}
_OFF = (None, False, 0, 0.0)


def _unknown(resolution: Resolution) -> Iterator[Finding]:
    """Settings that speak of the KL and that the entry does not read, and near misses of those it reads."""
    entry = resolution.library
    for setting in resolution.unread:
        name = plain_key(unwrapped(setting.key, entry))
        known, place = name in entry.all_keys, ((setting.key, setting.line),)
        if plain(setting.value) in _OFF or any(fnmatch.fnmatchcase(name, pattern) for pattern in entry.unrelated):
            continue
        near = _nearest(name, resolution)
        if _speaks(name, known=known):
            what = "a setting of {} that is not read here" if known else "no setting of {} that is known here"
            hint = "" if near is None or known else f"; did you mean {near}?"
            message = f"{setting.key} is {what.format(f'{entry.title} {entry.version}')}, and it speaks of the KL{hint}"
            yield Finding("open", "unknown-key", message, place)
        elif near is not None and not known:
            message = f"{setting.key} is no setting of {entry.title} {entry.version}; did you mean {near}?"
            yield Finding("warning", "unknown-key", message, place)


def _speaks(name: str, *, known: bool) -> bool:
    """Whether a setting is about the KL; one that the library is known to have only where it says so outright."""
    end = ".".join(name.split(".")[-2:])
    if _OF_THE_KL.search(end):
        return True
    last = _short(name)
    return (
        not known
        and not _ELSEWHERE & set(name.split(".")[:-1])
        and bool(_NEAR_THE_KL.search(last))
        and not _OF_SOMETHING_ELSE.search(last)
    )


def _nearest(name: str, resolution: Resolution) -> str | None:
    """The setting of which a name is a misspelling, as a whole; for one about the KL, also its last part elsewhere."""
    parts = name.count(".") + 1
    keys = {".".join(plain_key(key).split(".")[-parts:]): key for key in resolution.library.keys}
    near = difflib.get_close_matches(name, [key for key in keys if _short(key) != _short(name)], n=1, cutoff=0.9)
    if near:
        return keys[near[0]]
    ends = {_short(plain_key(key)): key for key in resolution.library.keys}
    close = difflib.get_close_matches(_short(name), ends, n=1, cutoff=0.85) if _OF_THE_KL.search(name) else []
    return ends[close[0]] if close else None


def _gap_findings(resolution: Resolution, gaps: Sequence[Gap]) -> Iterator[Finding]:
    """What the text leaves open, as far as it bears on the verdict."""
    own = resolution.library.own
    for gap in gaps:
        if gap.file and any(fnmatch.fnmatchcase(_stem(gap.file), name) for name in own):
            continue
        wanting = [key for key in resolution.decisive if key not in resolution.given]
        level, message = gap.level, gap.message
        if gap.decisive and wanting:
            level = "open"
            message += f": {', '.join(map(_short, wanting[:4]))} may stand there, and the verdict would rest on them"
        key = matched(unwrapped(gap.key, resolution.library), resolution.library) if gap.key else None
        if not gap.key or key in resolution.decisive:
            yield Finding(level, gap.id, message, ((gap.key or gap.file, gap.line),))


def _stem(file: str) -> str:
    return re.sub(r"\.\w+$", "", file.rpartition("/")[2])


# ------------------------------------------------------------------------------------------------ what the verdict is


def _kind(found: Reading) -> str:
    """Coarser than the verdict: what to say about it."""
    if found.unbiased:
        return "unbiased"
    if found.name in ("zero", "dead"):
        return "zero"
    if found.name in ("token", "scaled-token"):
        return "token"
    w = found.verdict.coefficients
    if w is not None and w[0] == w[1] == 0 < w[2]:
        return "forward"
    if w is not None and w[2] < 0 and 0 in w[:2] and math.isclose(w[0] + w[1], -w[2], rel_tol=1e-6):
        return "cancelled"
    return "other"


def _verdict_findings(resolution: Resolution, total: Reading | None) -> Iterator[Finding]:
    penalties = [penalty for penalty in resolution.penalties if penalty.coefficient]
    if total is None:
        return
    if len(penalties) > 1:
        sizes = " and ".join(f"{number(p.coefficient)} in the {p.placement}" for p in penalties)
        keys = [key for p in penalties for key in (p.coefficient_key,) if key]
        message = f"the penalty is in two places, {sizes}: together {total.scaled}"
        yield Finding("note", "two-places", message, _places(resolution, keys))
    for penalty in penalties:
        kind = _kind(reading([(1.0, penalty.recipe)]))
        if not total.unbiased and kind != "unbiased":
            yield _bias_finding(resolution, penalty, kind)
        for assumption in penalty.provided:
            message = f"the verdict on the {penalty.placement} holds only if {assumption}"
            yield Finding("warning", "assumes", message, _places(resolution, _named_in(assumption, penalty)))
        for rule in (_length_finding, _spread_finding, _clamp_finding):
            if found := rule(resolution, penalty, kind):
                yield found


def _named_in(text: str, penalty: Penalty) -> list[str]:
    return [key for key in penalty.assumption_keys if _short(key) in text]


def _name(penalty: Penalty) -> str:
    return f"{penalty.recipe.configuration.estimator.name.partition('-clamped')[0]}-in-{penalty.placement}"


_SAYS = {
    "zero": (
        "error",
        "zero-gradient",
        "{name}: the gradient of log pi - log pi_ref is the score, of mean zero whatever the reference: noise and no "
        "pull. Use k2 for the token-level gradient, or k1 in the reward for the sequence-level one",
    ),
    "token": (
        "warning",
        "token-level",
        "{name}: the token-level gradient; what a token does to the KL of later ones is missing, and k1 in the "
        "reward has it",
    ),
    "own-token": (
        "warning",
        "token-level",
        "{name}: the token-level gradient, for each token is credited with its own penalty alone; what a token does to "
        "the KL of later ones is missing, and reward-to-go or the sum over the reply has it",
    ),
    "forward": (
        "warning",
        "forward-kl",
        "{name}: the gradient of the token-level forward KL(pi_ref || pi), another divergence than the one that is "
        "estimated",
    ),
    "cancelled": (
        "error",
        "k3-in-reward",
        "{name}: unbiased as a value, and its expected gradient is {field} - token-forward, which cancels near the "
        "reference and can point away from it",
    ),
    "geometric": (
        "error",
        "geometric-ratio",
        "{name} times a sequence-level ratio: that is exp(mean log rho) for every token, so the gradient is a mixture "
        "that depends on the length, no KL's; take the token-level ratio",
    ),
    "ratio-times-k2": (
        "error",
        "ratio-times-k2",
        "{name}: the gradient of E[k2], which is no KL's; k2 is right without the ratio, k1 and k3 with it",
    ),
    "reward": (
        "error",
        "biased-in-reward",
        "{name}: in the reward the estimate is a value, and {base} is none of the KL: its expected gradient is no "
        "divergence's of interest; use k1",
    ),
    "loss": (
        "error",
        "no-divergence",
        "{name}: the expected gradient is that of no KL; use k2 for the token-level one",
    ),
}


def _bias_finding(resolution: Resolution, penalty: Penalty, kind: str) -> Finding:
    recipe = penalty.recipe
    base = recipe.configuration.estimator.name
    if kind == "other":
        kind = "ratio-times-k2" if recipe.live and base == "k2" else recipe.weight
        kind = kind if kind in _SAYS else penalty.placement
    own = kind == "token" and penalty.placement == "reward"  # the estimator is right, the credit is not
    level, identity, text = _SAYS["own-token" if own else kind]
    name = f"{base}-in-loss with a live ratio" if recipe.live else _name(penalty)
    field = "token" if recipe.configuration.credit == "token" else "sequence"
    message = text.format(name=name, base=base, field=field)
    chosen_by = penalty.estimator_keys[-1:]
    if kind in ("zero", "cancelled") and chosen_by and chosen_by[0] not in resolution.given:
        message += f". {_short(chosen_by[0])} is still its default {written(resolution.values[chosen_by[0]])}"
        if any(key in resolution.given and resolution.values[key] is True for key in penalty.keys):
            message += ": only the placement was switched"
    if kind in ("token", "forward") and resolution.library.cannot and not resolution.library.unbiased:
        message += f". {resolution.library.title} cannot have {resolution.library.cannot}"
    keys = penalty.estimator_keys or penalty.keys[:1]
    if kind in ("geometric", "ratio-times-k2", "zero", "cancelled"):
        asked = dict.fromkeys([*keys, *(key for key in penalty.keys if key in resolution.given)])
        keys = tuple(key for key in asked if key != penalty.coefficient_key) or keys[:1]
    if own:
        keys = tuple(key for key in penalty.keys if "adv" in key) or keys
    return Finding(level, identity, message, _places(resolution, keys))


def _length_finding(resolution: Resolution, penalty: Penalty, kind: str) -> Finding | None:
    """A mean over each reply's own tokens: the coefficient depends on the length."""
    if penalty.recipe.configuration.aggregation != "length-mean":
        return None
    key = str(resolution.library.policy.get("key", ""))
    if resolution.policy not in ("", "length-mean"):
        message = (
            f"the KL is a mean over each reply's tokens and the policy loss is a {resolution.policy} ({_short(key)}): "
        )
        ratios = [(_SHORT + _LONG) / (2 * length) for length in (_SHORT, _LONG)]
        if resolution.policy == "token-mean":
            message += (
                f"replies of {_SHORT} and {_LONG} tokens have effective coefficients of {number(ratios[0])} and "
                f"{number(ratios[1])} times {number(penalty.coefficient)}"
            )
        else:
            message += (
                f"the effective coefficient on a reply of {_SHORT} tokens is {_LONG // _SHORT} times that on {_LONG}"
            )
        return Finding("warning", "length-mismatch", message, _places(resolution, [key]))
    message = (
        f"each reply's penalty is divided by its own length, so the effective coefficient falls as 1/|y|: a token of a "
        f"reply of {_SHORT} counts {_LONG // _SHORT} times one of a reply of {_LONG}"
    )
    if kind == "zero":
        message += "; and E[sum of scores / |y|] is not zero, so k1 in the loss lengthens replies"
    reducing = [
        key for key in penalty.keys if "agg" in key or "loss_type" in key or "per_token" in key or "redu" in key
    ]
    return Finding("warning", "length-mean", message, _places(resolution, reducing or [key] if key else reducing))


def _spread_finding(resolution: Resolution, penalty: Penalty, kind: str) -> Finding | None:
    if penalty.recipe.advantage != "group-std":
        return None
    message = (
        "reward and penalty are divided by the standard deviation of their group: prompts are reweighted, and where a "
        f"group's rewards are equal the coefficient {number(penalty.coefficient)} has no effect, whatever its size"
    )
    keys = [key for key in penalty.keys if re.search(r"std|scale|adv", key)]
    return Finding("warning", "group-std", message, _places(resolution, keys))


def _clamp_finding(resolution: Resolution, penalty: Penalty, kind: str) -> Finding | None:
    """A clamp gives no gradient where it bites; in a reward it only cuts the tail."""
    name, bound = penalty.recipe.configuration.estimator.name, penalty.recipe.clamp
    base = name.partition("-clamped")[0]
    if "-clamped" in name:
        bound = float(name.rstrip(")").rpartition(",")[2])
    if not math.isfinite(bound) or kind in ("zero", "cancelled"):
        return None
    keys = _places(resolution, [key for key in penalty.keys if "clamp" in key] or penalty.estimator_keys)
    at = _reaches(base, bound)
    if penalty.placement == "reward":
        return Finding("note", "clamped-value", f"a token's penalty is clipped to {number(bound)} nats ({at})", keys)
    message = f"{base} is clipped at {number(bound)}: a token with {at} has no gradient, where the pull is needed most"
    return Finding("warning", "clamp-kills-gradient", message, keys)


def _reaches(base: str, bound: float) -> str:
    """In words, where an estimator's value passes the bound on the side of a policy far below the reference."""
    if base == "k1":
        return f"|log pi/pi_ref| > {number(bound)}"
    if base == "k2":
        return f"|log pi/pi_ref| > {math.sqrt(2 * bound):.3g}"
    value: Callable[[Any], Any] = estimator(base).value
    low, high = -bound - 10.0, 0.0  # k3 decreases up to 0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if float(value(np.array(middle))) > bound else (low, middle)
    return f"pi_ref/pi > {math.exp(-low):.3g}"
