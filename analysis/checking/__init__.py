"""The regression test for a KL estimator or loss: what it optimises, how noisy it is, what it survives.

``check`` answers for a built-in by name or for any function of log-probs, exactly: by enumeration of all sequences
of small models, through the function as autograd sees it. Nothing is sampled, so nothing is a matter of luck.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from klgrad.analysis.checking.report import SECTIONS, WANTED, Finding, Report

__all__ = ["SECTIONS", "WANTED", "Finding", "Report", "check"]

Progress = Callable[[int, int], None]


def check(
    function: str | Callable[..., Any],
    *,
    placement: str | None = None,
    target: str = "sequence",
    returns: str = "penalty",
    mapping: Mapping[str, str] | None = None,
    arguments: Mapping[str, Any] | None = None,
    error: float = 0.1,
    timeout: float = 30.0,
    strict: bool = False,
    progress: Progress | None = None,
    sections: Sequence[str] = SECTIONS,
) -> Report:
    """Check an estimator, a penalty or a loss.

    Args:
        function: a built-in (``k3``, ``k3-in-loss``), ``FILE.py:NAME``, ``package.module:NAME``, or the function
            itself. It is called with what its parameters ask for, by name: log-probs ``[B, T]`` of policy, reference
            and behaviour policy, mask, tokens, full log-probs ``[B, T, V]``. It returns a token term ``[B, T]``, a
            sequence term ``[B]`` or a loss ``[]``, in nats.
        placement: ``reward``, ``loss`` or ``both``: that one must give the target. None: all that there are must.
        target: ``sequence``, ``token``, ``token-forward`` or another of ``checking.fields.TARGETS``; or what a
            configuration (``k2-in-loss``) or another function (``FILE.py:NAME``) gives.
        returns: ``penalty``; ``reward``: its negative; ``return``: ``[B, T]`` rewards to go, each for its own token.
        mapping: their parameter -> ours, where the spelling is not known.
        arguments: parameter -> value, for what is none of ours.
        error: relative error of the gradient that sequences are counted for.
        timeout: seconds that one call may take, and the import of the file.
        strict: what only odd input shows (NaN at padding, -inf in both vocabularies, half precision) is an error too.
        progress: called with (sections done, sections in all).
        sections: those to look at; all by default.

    Returns:
        A report; ``report.passed`` says whether any finding is an error.

    Raises:
        ValueError: for bad use: no such built-in, file or function, a parameter that cannot be filled, an option
            that does not apply. What the function itself does wrong is a finding.
    """
    from klgrad.analysis.checking.run import Options, run

    options = Options(
        placement, target, returns, mapping or {}, arguments or {}, error, timeout, strict, tuple(sections)
    )  # fmt: skip
    return run(function, options, progress)
