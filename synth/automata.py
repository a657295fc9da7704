"""Context automata: which context follows a token.

An autoregressive model's next-token distribution depends on the past through a *context*. With finitely
many contexts and a deterministic successor for each token, every expectation over sequences becomes a
linear recurrence over contexts. Shapes: S contexts, V tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Bool, Int

State = Any  # hashable: what a context stands for
END = "end"
MAX_CONTEXTS = 1 << 20


@dataclass(frozen=True, eq=False)
class Automaton:
    """A finite set of contexts with a deterministic successor for every token.

    Args:
        next_context: ``[S, V]`` integers, the context after token v in context s.
        start: the context of the empty prefix.
        end: the absorbing end context, entered by an end-of-sequence token; -1 for none.
        horizon: the longest sequence the contexts can describe; ``None`` for no bound.
        states: ``[S]`` what each context stands for (tuples of tokens, counts, ...), for features
            and messages.

    Raises:
        ValueError: for a wrong shape, an index out of range, or a start that is the end.
    """

    next_context: Int[np.ndarray, "S V"]
    start: int = 0
    end: int = -1
    horizon: int | None = None
    states: tuple[State, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        table = np.asarray(self.next_context)
        if table.ndim != 2 or 0 in table.shape:
            raise ValueError(f"next_context must have shape [S, V]; got {table.shape}")
        if table.dtype.kind not in "iu":
            raise ValueError(f"next_context must hold integers; got dtype {table.dtype}")
        contexts = table.shape[0]
        for name, index in (("start", self.start), ("end", self.end)):
            if isinstance(index, bool) or not isinstance(index, (int, np.integer)):
                raise ValueError(f"{name} = {index!r} must be an integer")
        table = table.astype(np.intp)
        if 0 <= self.end < contexts:
            table[self.end] = self.end  # whatever was given: nothing is emitted there
        if table.min() < 0 or table.max() >= contexts:
            s, v = np.argwhere((table < 0) | (table >= contexts))[0]
            raise ValueError(
                f"next_context[{s}, {v}] = {table[s, v]} is not a context: there are contexts 0 to {contexts - 1}"
            )
        if not 0 <= self.start < contexts:
            raise ValueError(f"start = {self.start} is not a context: there are contexts 0 to {contexts - 1}")
        if not -1 <= self.end < contexts:
            raise ValueError(f"end = {self.end} is not a context: give -1 for none, or 0 to {contexts - 1}")
        if self.end == self.start:
            raise ValueError(f"start and end are both context {self.end}: a sequence needs at least one token")
        table.setflags(write=False)
        object.__setattr__(self, "next_context", table)

    @property
    def contexts(self) -> int:
        """Number of contexts S, the end context included."""
        return self.next_context.shape[0]

    @property
    def vocabulary(self) -> int:
        """Number of tokens V."""
        return self.next_context.shape[1]

    @property
    def alive(self) -> Bool[np.ndarray, " S"]:
        """``[S]`` True for every context that emits a token (all but the end)."""
        return np.arange(self.contexts) != self.end

    def describe(self, context: int) -> str:
        """A context's name for messages."""
        return f"{context} {self.states[context]!r}" if self.states else f"{context}"

    def check_length(self, length: int) -> None:
        """Raise ValueError unless sequences of this length can be described."""
        if length < 1:
            raise ValueError(f"length {length} is too short: a sequence has at least one token")
        if self.horizon is not None and length > self.horizon:
            raise ValueError(
                f"length {length} is beyond this automaton's horizon {self.horizon}: build it with length={length}"
            )


def _explore(
    start: State,
    step: Callable[[State, int], State],
    vocabulary: int,
    *,
    eos: bool,
    horizon: int | None = None,
    depth: Callable[[State], int] = lambda state: 0,
) -> Automaton:
    """Number the states reachable from ``start``, breadth first; the last token ends with ``eos``."""
    if vocabulary < 1 + eos:
        raise ValueError(f"vocabulary {vocabulary} is too small: at least {1 + eos} tokens are needed")
    if horizon is not None and horizon < 1:
        raise ValueError(f"length {horizon} is too short: a sequence has at least one token")
    index: dict[State, int] = {start: 0}
    order: list[State] = [start]
    rows: list[list[int]] = []
    for state in order:
        row = []
        for token in range(vocabulary - eos):
            successor = step(state, token)
            if horizon is not None and depth(successor) >= horizon:
                row.append(0)  # never entered: the horizon forbids another token
                continue
            if successor not in index:
                if len(order) >= MAX_CONTEXTS:
                    raise ValueError(f"more than {MAX_CONTEXTS} contexts: take a shorter length or fewer tokens")
                index[successor] = len(order)
                order.append(successor)
            row.append(index[successor])
        rows.append(row)
    end = -1
    if eos:
        end = len(order)
        rows = [[*row, end] for row in rows] + [[end] * vocabulary]
        order = [*order, END]
    return Automaton(np.array(rows), 0, end, horizon, tuple(order))


def markov(vocabulary: int, order: int = 1, *, start: tuple[int, ...] | None = None, eos: bool = False) -> Automaton:
    """Contexts are the last ``order`` tokens.

    Args:
        vocabulary: number of tokens V, the end token included.
        order: how many past tokens matter; 0 gives independent tokens.
        start: the tokens imagined before the first one; ``None`` gives shorter pasts contexts of their own.
        eos: whether token V - 1 ends the sequence.

    Raises:
        ValueError: for a negative order or a start that is not ``order`` tokens.
    """
    if order < 0:
        raise ValueError(f"order {order} is negative: give 0 or more")
    if start is not None and (len(start) != order or any(not 0 <= v < vocabulary - eos for v in start)):
        raise ValueError(f"start {start} must be {order} tokens below {vocabulary - eos}")

    def step(state: State, token: int) -> State:
        return (*state, token)[-order:] if order else ()

    return _explore(start if start is not None else (), step, vocabulary, eos=eos)


def positional(vocabulary: int, length: int, *, eos: bool = False) -> Automaton:
    """Contexts are positions: the next-token distribution depends on t alone."""
    return _explore(
        0,
        lambda t, token: t + 1,
        vocabulary,
        eos=eos,
        horizon=length,
        depth=lambda t: t,
    )


def history(vocabulary: int, length: int, *, eos: bool = False) -> Automaton:
    """Contexts are whole prefixes: any autoregressive model up to ``length`` tokens."""
    return _explore(
        (),
        lambda past, token: (*past, token),
        vocabulary,
        eos=eos,
        horizon=length,
        depth=len,
    )


def counts(vocabulary: int, length: int, *, last: bool = False, eos: bool = False) -> Automaton:
    """Contexts are running token counts, so the mean of the past is available at any length.

    Each state is ``(n_0, ..., n_{K-1})`` over the K tokens that do not end the sequence, or with ``last``
    ``(counts, last token)`` with last token -1 at the start.
    """
    kept = vocabulary - eos

    def add(past: tuple[int, ...], token: int) -> tuple[int, ...]:
        return tuple(n + (v == token) for v, n in enumerate(past))

    if last:
        return _explore(
            ((0,) * kept, -1),
            lambda state, token: (add(state[0], token), token),
            vocabulary,
            eos=eos,
            horizon=length,
            depth=lambda state: sum(state[0]),
        )
    return _explore(
        (0,) * kept,
        add,
        vocabulary,
        eos=eos,
        horizon=length,
        depth=sum,
    )
