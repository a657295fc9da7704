"""What a check found, as data and as text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SECTIONS = ("function", "value", "gradient", "variance", "numerics", "invariance", "sampling")
VALUE = ("expected", "kl", "bias", "nonnegative", "zero_at_identity", "support_mismatch")
VARIANCE = ("rare_token_probability", "median_batch", "sequences_for_error")
LEVELS = ("error", "warning", "info")


@dataclass(frozen=True)
class Finding:
    """One line.

    Args:
        section: one of ``SECTIONS``.
        level: ``error`` fails the check; ``warning`` and ``info`` do not.
        message: what, how bad, why it matters and what to do, in plain words.
        numbers: the figures behind it.
        detail: a traceback, shown on request.
    """

    section: str
    level: str
    message: str
    numbers: dict[str, Any] = field(default_factory=dict)
    detail: str = ""


@dataclass(frozen=True)
class Report:
    """Everything a check found.

    Args:
        function: what was checked.
        target: ``sequence``, ``token`` or ``token-forward``.
        placement: the placement asked for, or None: any that gives the target passes.
        value, variance: see ``to_dict``.
        gradient: placement -> its verdict and numbers.
        findings: all of them, in the order of the sections.
    """

    function: str
    target: str
    placement: str | None = None
    value: dict[str, Any] = field(default_factory=dict)
    gradient: dict[str, dict[str, Any]] = field(default_factory=dict)
    variance: dict[str, Any] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()

    @property
    def passed(self) -> bool:
        """No finding is an error."""
        return not any(finding.level == "error" for finding in self.findings)

    @property
    def gives(self) -> list[str]:
        """The placements whose gradient is the target."""
        return [name for name, found in self.gradient.items() if found["verdict"] == self.target]

    def of(self, section: str, level: str | None = None) -> list[Finding]:
        """The findings of a section, of a level where one is named."""
        return [f for f in self.findings if f.section == section and level in (None, f.level)]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: what is not finite, or was not asked, becomes null."""
        return plain({
            "passed": self.passed, "target": self.target, "function": self.function, "placement": self.placement,
            "gives_target": self.gives, "value": dict.fromkeys(VALUE) | self.value, "gradient": self.gradient,
            "variance": dict.fromkeys(VARIANCE) | self.variance,
            "findings": [
                {"section": f.section, "level": f.level, "message": f.message, "numbers": f.numbers}
                for f in self.findings
            ],
        })  # fmt: skip

    @property
    def verdict(self) -> str:
        """The last line: PASS or FAIL, and why."""
        if not self.passed:
            errors = sum(finding.level == "error" for finding in self.findings)
            return f"FAIL  {self.function}: {errors} error{'s' * (errors > 1)}"
        where = f" in the {' and in the '.join(PLACE[p] for p in self.gives)}" if self.gives else ""
        return f"PASS  {self.function}: the {WANTED[self.target]} gradient{where}"

    def text(self, *, verbose: bool = False) -> str:
        """All findings, by section, and the verdict."""
        lines = [f"{self.function}  (wanted: the {WANTED[self.target]} gradient)"]
        for section in SECTIONS:
            for finding in self.of(section):
                lines.append(f"  {finding.level:7s}  {section}: {finding.message}")
                if verbose and finding.detail:
                    lines += [f"      | {line}" for line in finding.detail.rstrip().splitlines()]
        return "\n".join([*lines, self.verdict])

    def __str__(self) -> str:
        return self.text()


PLACE = {"reward": "reward", "loss": "loss", "both": "reward and the loss together"}
WANTED = {
    "sequence": "sequence-level reverse-KL",
    "token": "token-level reverse-KL",
    "token-forward": "token-level forward-KL",
}


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
