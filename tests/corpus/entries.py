"""What a corpus is made of: a function as somebody has it in a trainer, how it is called, and what is true of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

# Warnings that are true of right code, by what they are about.
TAIL = r"heavy tail"
FLOAT16 = r"float16|half"
OVERFLOW = r"overflow|past what this precision holds|not finite|NaN (gradient )?at log|0 log 0"
CLAMP = r"clamp|no gradient for log"
CANCEL = r"cancel|digits lost"
POISON = r"padded places|0 x inf"
IMPOSSIBLE = r"neither can emit|-inf in both"
UNREACHED = r"reference cannot emit"
VALUE = r"the expected value is|its value is"  # a term whose gradient is right and whose value is another number
GROUP = r"rows of a batch depend on each other"
STALE = r"stale|sampler|temperature|top-p|top-k|end token"


@dataclass(frozen=True)
class Entry:
    """One function.

    Args:
        function: the callable.
        target: the field that is wanted of it.
        placement: ``reward``, ``loss`` or ``both``; None where none is asked for.
        warns: right code: what its warnings may be about (regular expressions); any other one is false.
        causes: wrong code: phrases (regular expressions) of which the report holds one at least.
        never: wrong code: reasons that would mislead, which it must not give.
        shows: wrong code: what the oracle shows it by, one of ``faults.FAULTS``.
        level: wrong code: ``error``; ``any`` where a warning that names the cause is enough.
        options: more arguments of ``check``.
        group: how many rows it needs; 1 where a row stands for itself.
    """

    function: Callable[..., Any]
    target: str
    placement: str | None
    warns: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    shows: str = "field"
    level: str = "error"
    options: dict[str, Any] = field(default_factory=dict)
    group: int = 1

    @property
    def name(self) -> str:
        """Its module and name."""
        return f"{self.function.__module__.rpartition('.')[2]}.{self.function.__name__}"


class Corpus(list[Entry]):
    """Entries in the order in which they are written down."""

    def right(
        self, target: str, placement: str | None, *, warns: tuple[str, ...] = (), group: int = 1, **options: Any
    ) -> Callable[[Any], Any]:
        """Add a function that is right for the target."""

        def add(function: Any) -> Any:
            self.append(Entry(function, target, placement, warns, options=options, group=group))
            return function

        return add

    def wrong(
        self, target: str, placement: str | None, *causes: str, shows: str = "field", level: str = "error",
        group: int = 1, never: tuple[str, ...] = (), **options: Any,
    ) -> Callable[[Any], Any]:  # fmt: skip
        """Add a function that is not; the report names one of the causes."""

        def add(function: Any) -> Any:
            self.append(Entry(function, target, placement, (), causes, never, shows, level, options, group))
            return function

        return add
