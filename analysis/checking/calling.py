"""A safe call of somebody's function: whatever it does becomes one sentence."""

from __future__ import annotations

import contextlib
import io
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from klgrad.analysis.checking.signature import Plan


class Fault(Exception):
    """What a function did wrong, in one sentence.

    Args:
        sentence: what it did, and the mend.
        detail: its traceback.
        kind: ``raises``, ``shape`` or ``other``; only what raises is tried in another way.
        mend: what to do about it.
    """

    def __init__(self, sentence: str, detail: str = "", kind: str = "other", mend: str = "") -> None:
        super().__init__(f"{sentence}: {mend}" if mend else sentence)
        self.detail, self.kind, self.mend = detail, kind, mend


class TimedOut(BaseException):
    """Raised into a function that runs too long; no ``except Exception`` of its own swallows it."""


def guarded(
    function: Callable[..., Any], how: Plan, arguments: dict[str, Any], timeout: float, notes: list[str]
) -> Any:
    """Call it with a time limit, its output kept from the terminal.

    Raises:
        Fault: when it raises, exits or runs past the timeout.
    """
    positional = [arguments[name] for name in how.positional]
    named = {name: value for name, value in arguments.items() if name not in how.positional}
    said = io.StringIO()
    try:
        with (
            limit(timeout), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said),
            warnings.catch_warnings(), np.errstate(all="ignore"),
        ):  # fmt: skip
            warnings.simplefilter("ignore")
            out = function(*positional, **named)
    except TimedOut:
        raise Fault(f"it did not return within {timeout:g} seconds{_compiling()}") from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        sentence = " ".join(str(error).split())[:200]
        raise Fault(f"it raises {type(error).__name__}: {sentence}", traceback.format_exc(), "raises") from None
    if hasattr(out, "cr_await"):
        out.close()
        raise Fault("it is asynchronous (async def): wrap it in a function that returns the result")
    if said.getvalue() and not any(known.startswith("it prints") for known in notes):
        first = said.getvalue().strip().splitlines()[:1]
        note(notes, f"it prints, first: {first[0][:80]!r}" if first else "it prints")
    return out


def _compiling() -> str:
    """What to add where time may have gone into compiling something that it calls."""
    return ": if it compiles on its first call, give it --timeout" if "torch._inductor" in sys.modules else ""


@contextlib.contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Interrupt what runs longer; where signals cannot (other threads, Windows), nothing does; nor for infinity."""
    if seconds == float("inf"):
        yield
        return
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise TimedOut

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread: on tensors of a few numbers a second one costs more than it does, on a busy machine most."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """What ``torch.compile`` was given, or None where nothing was compiled."""
    found: Callable[..., Any] | None = getattr(function, "_torchdynamo_orig_callable", None)
    if found is None and type(function).__name__ == "OptimizedModule":
        found = getattr(function, "_orig_mod", None)
    return found


def copied(value: Any) -> Any:
    """A copy of an array, detached; anything else as it is."""
    if hasattr(value, "detach"):
        return value.detach().clone()
    return value.copy() if isinstance(value, np.ndarray) else value


def unchanged(before: Any, after: Any) -> bool:
    """Whether an array still holds what its copy does; NaN equals NaN."""
    if not (hasattr(after, "detach") or isinstance(after, np.ndarray)):
        return True
    a, b = (x.detach() if hasattr(x, "detach") else x for x in (before, after))
    return bool(((a == b) | ((a != a) & (b != b))).all())


def note(notes: list[str], sentence: str) -> None:
    """Add the sentence, once."""
    if sentence not in notes:
        notes.append(sentence)
