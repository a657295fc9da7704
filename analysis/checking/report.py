"""What a check found, as data and as text: the verdict first, the one mend, then what it rests on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SECTIONS = ("function", "value", "gradient", "variance", "numerics", "invariance", "sampling")
VALUE = ("expected", "kl", "bias", "nonnegative", "zero_at_identity", "support_mismatch")
VARIANCE = ("rare_token_probability", "median_batch", "sequences_for_error")
LEVELS = ("error", "warning", "info")
PLACE = {"reward": "reward", "loss": "loss", "both": "reward and the loss together"}
WANTED = {
    "sequence": "sequence-level reverse-KL",
    "token": "token-level reverse-KL",
    "token-forward": "token-level forward-KL",
    "future": "future-term",
}


@dataclass(frozen=True)
class Finding:
    """One line.

    Args:
        section: one of ``SECTIONS``.
        level: ``error`` fails the check; ``warning`` and ``info`` do not.
        message: what, how bad, why it matters and what to do, in plain words.
        numbers: the figures behind it.
        detail: a traceback, shown on request.
        mend: what to do about it, where one thing would.
        robust: only odd input shows it: an error where that is asked for, else a warning.
    """

    section: str
    level: str
    message: str
    numbers: dict[str, Any] = field(default_factory=dict)
    detail: str = ""
    mend: str = ""
    robust: bool = False


@dataclass(frozen=True)
class Report:
    """Everything a check found.

    Args:
        function: what was checked.
        target: the field wanted, as it was asked for.
        placement: the placement asked for, or None: then all there are must give the target.
        value, variance: see ``to_dict``.
        gradient: placement -> its verdict and numbers.
        findings: all of them, in the order of the sections.
        words: the target in words.
        instead: code to write in its place, where it is a common failure.
        given: what each parameter was given.
    """

    function: str
    target: str
    placement: str | None = None
    value: dict[str, Any] = field(default_factory=dict)
    gradient: dict[str, dict[str, Any]] = field(default_factory=dict)
    variance: dict[str, Any] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    words: str = ""
    instead: tuple[str, ...] = ()
    given: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """No finding is an error."""
        return not any(finding.level == "error" for finding in self.findings)

    @property
    def gives(self) -> list[str]:
        """The placements whose gradient is the target."""
        return [name for name, found in self.gradient.items() if found["passes"]]

    @property
    def mend(self) -> str:
        """The one thing to do: that of the first error that has one."""
        return next((f.mend for f in self.findings if f.level == "error" and f.mend), "")

    def of(self, section: str, level: str | None = None) -> list[Finding]:
        """The findings of a section, of a level where one is named."""
        return [f for f in self.findings if f.section == section and level in (None, f.level)]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: what is not finite, or was not asked, becomes null."""
        return plain({
            "passed": self.passed, "target": self.target, "function": self.function, "placement": self.placement,
            "verdict": self.verdict, "mend": self.mend, "instead": "\n".join(self.instead), "given": self.given,
            "gives_target": self.gives, "value": dict.fromkeys(VALUE) | self.value, "gradient": self.gradient,
            "variance": dict.fromkeys(VARIANCE) | self.variance,
            "findings": [
                {"section": f.section, "level": f.level, "message": f.message, "numbers": f.numbers}
                for f in self.findings
            ],
        })  # fmt: skip

    @property
    def verdict(self) -> str:
        """The first line: PASS or FAIL, placement by placement, with what each gives instead."""
        start = f"{'PASS' if self.passed else 'FAIL'}  {self.function}: "
        errors = [f for f in self.findings if f.level == "error"]
        if not self.gradient:
            return start + (f"{len(errors)} error{'s' * (len(errors) > 1)}" if errors else "nothing is amiss")
        each = " · ".join(
            f"{where} {'PASS' if found['passes'] else f'FAIL: {brief(found)}'}"
            for where, found in self.gradient.items()
        )
        if self.passed:
            off = max(found["off"] for found in self.gradient.values())
            much = "exactly" if off <= 1e-6 else f"within {100 * off:.2g} % of"
            return f"{start}{much} the {self.words} gradient in the {' and in the '.join(PLACE[p] for p in self.gives)}"
        other = next((f for f in errors if f.section != "gradient"), None)
        if other is None or len(self.gives) < len(self.gradient):
            return start + each
        return f"{start}{each}, but {other.message.partition('; ')[0]}"

    def text(self, *, verbose: bool = False) -> str:
        """The verdict, the one mend, and the findings it rests on; with ``verbose`` all of them and the tracebacks."""
        lines = [self.verdict]
        if not self.passed and self.words:
            lines.append(f"  wanted   the {self.words} gradient")
        if self.mend:
            lines.append(f"  do       {self.mend}")
        if self.instead:
            lines += ["  instead", *(f"      {line}" for line in self.instead)]
        hidden = 0
        for level in LEVELS:
            for finding in (f for section in SECTIONS for f in self.of(section, level)):
                if level == "info" and not verbose:
                    hidden += 1
                    continue
                lines.append(f"  {finding.level:7s}  {finding.section}: {finding.message}")
                if verbose and finding.detail:
                    lines += [f"      | {line}" for line in finding.detail.rstrip().splitlines()]
        if verbose:
            lines += [f"  given    {each}" for each in self.given]
        elif hidden:
            lines.append(f"  {hidden} more with -v: what each parameter was given, noise, numerics, other samplers")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()


def brief(found: dict[str, Any]) -> str:
    """A placement's gradient in a few words: ``sequence - token-forward``, ``0.5 token``, ``token / T``."""
    name, factor = found["name"], found["factor"]
    if found["verdict"] in ("zero", "dead", "other"):
        return found["verdict"] if found["verdict"] != "other" else name
    if isinstance(factor, dict):
        return f"{name} times what depends on the {LAWS[found['by']]}"
    if found["one"] or found.get("by_group_size"):
        return f"{name}, by the group's size" if found.get("by_group_size") and not found["one"] else str(name)
    return f"{factor:.4g} {name}"


LAWS = {"length": "length", "vocabulary": "vocabulary's size", "both": "length and the vocabulary's size", "": "length"}


def plain(value: Any) -> Any:
    """The same as plain Python data; what is not finite becomes None."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float) and value - value != 0:
        return None
    return value
