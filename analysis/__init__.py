"""Questions asked of the world that ``klgrad.synth`` knows exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from klgrad.analysis.checking import check as check


def __getattr__(name: str) -> Any:
    if name == "check":  # imported when asked for: a command that checks nothing need not load it
        from klgrad.analysis.checking import check

        return check
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
