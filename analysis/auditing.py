"""The live audit: a library's own KL function, where it is installed, against its entry.

For each adapter (``adapters``) the library's function is imported, never installed and never more than that function
called. Each of its cases names settings; the entry resolves them to a recipe, and the function must agree with it:
its gradient (or, in the reward, its value) token by token on random log-probs, far ones that reach the clamps
included, and its verdict as ``klgrad check`` finds it. A function that is gone, raises or takes other arguments is a
finding.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from klgrad.analysis.libraries import Library, editions, library
from klgrad.analysis.readings import reading
from klgrad.analysis.recipes import Recipe, token_weights
from klgrad.analysis.resolution import resolve, written
from klgrad.analysis.settings import Setting

STATUSES = ("agrees", "drift", "broken", "not importable", "not installed")
_ROWS, _LENGTH, _SEED = 48, 4, 20251226
_TOLERANCE = 2e-4  # several libraries compute in single precision


@dataclass(frozen=True)
class Case:
    """Settings, and the call they come down to.

    Args:
        settings: the library's; they switch one penalty on.
        call: the library's function -> ``f(log_probs, reference, behaviour, mask)``, all ``[B, T]`` torch tensors,
            which returns each token's penalty ``[B, T]`` or a loss, the sum over one sequence or a mean of such sums.
    """

    settings: Mapping[str, Any]
    call: Callable[[Any], Callable[..., Any]]


@dataclass(frozen=True)
class Adapter:
    """One library's function.

    Args:
        library: its entry.
        distribution: what its package is called in a registry.
        module: the top-level module, by which it is known to be there.
        function: what is executed, in words.
        load: imports and returns it.
        cases: what is asked of it.
    """

    library: str
    distribution: str
    module: str
    function: str
    load: Callable[[], Any]
    cases: tuple[Case, ...]


@dataclass(frozen=True)
class Row:
    """One line of an audit.

    ``status`` is one of ``STATUSES``; ``expected`` and ``found`` are verdicts; ``message`` says what is amiss, or
    which version was read where it is another than the one installed.
    """

    library: str
    version: str
    function: str
    settings: str
    placement: str
    expected: str
    found: str
    status: str
    message: str = ""

    @property
    def alarm(self) -> bool:
        """Whether the entry no longer says what the library does."""
        return self.status in ("drift", "broken")


def audit(adapters: Sequence[Adapter]) -> Iterator[Row]:
    """The rows of each adapter, as they are found."""
    for adapter in adapters:
        yield from _audited(adapter)


def _audited(adapter: Adapter) -> Iterator[Row]:
    from importlib.util import find_spec

    entry = library(adapter.library)
    try:
        there = find_spec(adapter.module) is not None
    except (ImportError, ValueError):
        there = False
    empty = Row(adapter.library, "", adapter.function, "", "", "", "", "not installed")
    if not there:
        yield empty
        return
    version = _version(adapter.distribution)
    empty = replace(empty, version=version, message=_other_version(entry, version))
    try:
        with _quiet():
            function = adapter.load()
    except (ImportError, OSError) as error:
        yield replace(empty, status="not importable", message=_sentence(error))
        return
    except Exception as error:  # an import may fail in any way; it is told, not raised
        status = "broken" if isinstance(error, AttributeError) else "not importable"
        yield replace(empty, status=status, message=_sentence(error))
        return
    for case in adapter.cases:
        yield _row(entry, empty, function, case)


def _row(entry: Library, empty: Row, function: Any, case: Case) -> Row:
    penalties = resolve(entry, [Setting(key, value) for key, value in case.settings.items()]).penalties
    (penalty,) = penalties
    recipe = bare(penalty.recipe, penalty.placement)
    row = replace(
        empty,
        settings=", ".join(f"{key}={written(value)}" for key, value in case.settings.items()),
        placement=penalty.placement,
        expected=reading([(1.0, recipe)]).name,
    )
    try:
        with _quiet():
            called = case.call(function)
            off, where = deviation(called, recipe, penalty.placement)
            found, problem = _verdict(called, penalty.placement)
    except Exception as error:  # a signature that changed is a finding
        return replace(row, status="broken", message=_sentence(error))
    if problem:
        return replace(row, status="broken", message=problem)
    row = replace(row, found=found)
    if off > _TOLERANCE:
        message = f"its {'value' if penalty.placement == 'reward' else 'gradient'} is off by {off:.3g} at {where}"
        return replace(row, status="drift", message=message)
    if found != row.expected:
        return replace(row, status="drift", message=f"{found} and not {row.expected}")
    return replace(row, status="agrees")


def bare(recipe: Recipe, placement: str) -> Recipe:
    """The recipe without what the library does to a batch, a group or a reply around its KL function."""
    c = replace(recipe.configuration, baseline="none", baseline_value=0.0, aggregation="sum", divisor=1.0)
    if placement == "reward":
        c = replace(c, credit="whole", ratio="none", rollout_value=False)
    return replace(recipe, configuration=c, advantage="none", group=0, token_mean=False)


def deviation(called: Callable[..., Any], recipe: Recipe, placement: str) -> tuple[float, str]:
    """The largest difference between function and recipe, relative where large, and the log-ratio it is found at."""
    import torch

    log_probs, reference, behaviour, mask = _far_batch()
    given = torch.tensor(log_probs, requires_grad=placement == "loss")
    rest = [torch.tensor(a) for a in (reference, behaviour)]
    if placement == "reward":
        out = called(given, *rest, torch.tensor(mask))
        found = out.detach().double().numpy()
        est, bound = recipe.configuration.estimator, recipe.clamp
        expected = np.clip(est.value(log_probs - reference), -bound, bound)
    else:
        found = _gradient(called, given, rest, torch.tensor(mask))
        expected, *_ = token_weights(recipe, log_probs, reference, mask, behaviour)
    if found.shape != mask.shape:
        raise ValueError(f"it returns the shape {list(found.shape)} for [B, T] = {list(mask.shape)}")
    off = np.where(mask, np.abs(found - expected) / np.maximum(1.0, np.abs(expected)), 0.0)
    off = np.where(np.isfinite(off), off, np.inf)
    at = np.unravel_index(int(np.argmax(off)), off.shape)
    return float(off[at]), f"log pi/pi_ref = {(log_probs - reference)[at]:.3g}"


def _gradient(called: Callable[..., Any], log_probs: Any, rest: list[Any], mask: Any) -> np.ndarray:
    """``[B, T]`` each sequence's own gradient: rows one by one where the function returns a loss."""
    import torch

    out = called(log_probs, *rest, mask)
    if out.ndim == 2:
        out = torch.where(mask, out, torch.zeros_like(out)).sum()
        return np.asarray(torch.autograd.grad(out, log_probs)[0].double().numpy())
    rows = []
    for i in range(len(mask)):
        own = log_probs[i : i + 1].detach().requires_grad_()
        loss = called(own, *(a[i : i + 1] for a in rest), mask[i : i + 1]).sum()
        rows.append(torch.autograd.grad(loss, own)[0].double().numpy())
    return np.concatenate(rows)


def _far_batch() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Log-probs of policy, reference and sampler ``[B, T]`` with log-ratios from 0 to 25 nats, and a mask."""
    rng = np.random.default_rng(_SEED)
    size = rng.choice([0.3, 2.0, 8.0], (_ROWS, _LENGTH))
    delta = np.clip(size * rng.normal(size=(_ROWS, _LENGTH)), -25, 25)
    log_probs = -rng.exponential(2.0, (_ROWS, _LENGTH)) - np.maximum(-delta, 0.0)
    behaviour = log_probs - 0.1 * rng.normal(size=(_ROWS, _LENGTH))
    mask = np.arange(_LENGTH) < rng.integers(1, _LENGTH + 1, (_ROWS, 1))
    return log_probs, log_probs - delta, behaviour, mask


def _verdict(called: Callable[..., Any], placement: str) -> tuple[str, str]:
    """The verdict of ``klgrad check`` in that placement, or the problem it met."""
    from klgrad.analysis.checking import check

    def kl(log_probs: Any, reference: Any, behaviour: Any, mask: Any) -> Any:
        return called(log_probs, reference, behaviour, mask)

    report = check(kl, placement=placement, sections=("gradient",), timeout=120.0)
    if placement not in report.gradient:
        return "", "; ".join(f.message for f in report.findings if f.level == "error")
    verdict = report.gradient[placement]["verdict"]
    return ("other" if verdict == "divergence" else verdict), ""


def _version(distribution: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return "unknown"


def _other_version(entry: Library, version: str) -> str:
    return "" if version in {edition.version for edition in editions(entry)} else f"{entry.version} was read"


def _sentence(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what a library prints and warns off the terminal."""
    import logging
    import warnings

    said = io.StringIO()
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except SystemExit as error:
        raise ImportError(f"it exits with {error.code}") from None
    finally:
        logging.disable(before)
