"""What is checked: a built-in configuration, or a function of the user's, called safely and by the names it asks for.

Both answer ``evaluate(batch)``: the penalty of every token, sequence or batch, and its derivative in the log-probs,
by autograd for torch, by differences for numpy. A user's function may raise, hang, print or change what it is
given; each becomes a ``Fault``, one sentence, and never a traceback in the caller's face.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from klgrad.analysis.checking.calling import Fault, copied, guarded, note, unchanged, uncompiled
from klgrad.analysis.checking.inputs import MASKS, REWARDS, arguments
from klgrad.analysis.checking.signature import Plan, plan
from klgrad.synth.configurations import Configuration
from klgrad.synth.enumeration import Batch

RETURNS = ("penalty", "reward", "return")
# relative changes that are lost, what to compare to then, the step of differences, and the precision's name
_PRECISIONS = ((1e-6, 3e-2, 0.25, "half"), (1e-11, 1e-4, 1e-2, "single"))
COMPUTES = "it computes in"
HALF = 1e-3  # tolerances past this are those of half precision
_DIFFERENCES = ((1, 8 / 12), (2, -1 / 12))


@dataclass(frozen=True, eq=False)
class Terms:
    """What one batch gave, as a penalty.

    Args:
        value: ``[B, T]`` (0 where padded), ``[B]`` or ``[]``.
        token: ``[B, T]`` derivative of the sum of all values in the sampled tokens' log-probs; None if not asked for.
        vocab: ``[B, T, V]`` the same in the full next-token log-probs; None where they were not used.
        raw: what was returned, padding and all.
    """

    value: np.ndarray
    token: np.ndarray | None = None
    vocab: np.ndarray | None = None
    raw: np.ndarray | None = None

    @property
    def by_sequence(self) -> np.ndarray:
        """``[B]`` each sequence's penalty."""
        return self.value.sum(axis=1) if self.value.ndim == 2 else self.value


@dataclass(frozen=True, eq=False)
class BuiltIn:
    """A configuration of klgrad, or with ``anywhere`` an estimator in every placement, looked at like a function."""

    configuration: Configuration
    anywhere: bool = False
    kind: str = "token"
    backend: str = "numpy"
    returns: str = "penalty"
    tolerance: float = 1e-8

    @property
    def name(self) -> str:
        """The normal form."""
        return str(self.configuration.estimator) if self.anywhere else str(self.configuration)

    def evaluate(self, batch: Batch, *, dtype: str = "float64", differentiate: bool = True, beta: float = 1.0) -> Terms:
        """Values and slopes of the estimator, on the tokens that are real."""
        estimator = self.configuration.estimator
        mask = np.asarray(batch.mask)
        with np.errstate(all="ignore"):
            if estimator.full:
                rows = (_array(batch.full_log_probs, dtype), _array(batch.full_reference, dtype))
                value, slope = (_float64(f(*rows)) for f in (estimator.value, estimator.slope))
                vocab = np.where(mask[..., None], slope, 0.0)
                return Terms(np.where(mask, value, 0.0), np.zeros(mask.shape), vocab)
            delta = _array(batch.log_probs, dtype) - _array(batch.reference, dtype)
            value, slope = (_float64(f(delta)) for f in (estimator.value, estimator.slope))
        return Terms(np.where(mask, value, 0.0), np.where(mask, slope, 0.0))


@dataclass(frozen=True, eq=False)
class Function:
    """A function of the user's.

    Args:
        name: how it was named.
        function: the callable.
        plan: which parameter gets what.
        kind: ``token`` (it returns ``[B, T]``), ``sequence`` (``[B]``) or ``loss`` (a scalar).
        backend: ``torch`` or ``numpy``.
        returns: ``penalty``, ``reward`` (its negative) or ``return`` (``[B, T]`` rewards to go, one per token).
        mask: the type its mask has: ``bool``, ``float`` or ``int``.
        tolerance: relative; wider where it computes in less than float64.
        step: of the differences, where there is no autograd; their error is of fourth order.
        timeout: seconds for one call.
        shift, spread: rewards and advantages are the shift, and the spread times what differs from row to row.
        notes: what was seen on the way: prints, extra outputs, a lower precision.
        compiled: the same as ``torch.compile`` made it, where the user's is compiled.
    """

    name: str
    function: Callable[..., Any]
    plan: Plan
    kind: str = "token"
    backend: str = "torch"
    returns: str = "penalty"
    mask: str = "bool"
    tolerance: float = 1e-8
    step: float = 1e-3
    timeout: float = 30.0
    shift: float = 0.0
    spread: float = 0.0
    notes: list[str] = field(default_factory=list)
    compiled: Callable[..., Any] | None = None

    def evaluate(self, batch: Batch, *, dtype: str = "float64", differentiate: bool = True, beta: float = 1.0) -> Terms:
        """Call it once.

        Args:
            batch: numpy arrays.
            dtype: of the log-probs it is given.
            differentiate: also take the derivative of the sum of what it returns over real tokens.
            beta: given where it takes a coefficient.

        Raises:
            Fault: when it raises, hangs, changes its input, or returns something else than before.
        """
        if self.backend == "torch":
            return self._torch(batch, dtype, differentiate, beta)
        value = self._numpy(batch, dtype, beta)
        if not differentiate:
            return value
        token = np.zeros(batch.mask.shape)
        for place in self._places(batch.mask.shape):
            token[place] = self._difference(batch, place, dtype, beta, "log_probs")
        if not self.plan.full:
            return Terms(value.value, token, None, value.raw)
        vocab = np.zeros(np.shape(batch.full_log_probs))
        for place in self._places(vocab.shape):
            vocab[place] = self._difference(batch, place, dtype, beta, "full_log_probs")
        return Terms(value.value, np.zeros(token.shape) if self._log_probs_from_full else token, vocab, value.raw)

    # -- the two backends

    def _torch(self, batch: Batch, dtype: str, differentiate: bool, beta: float) -> Terms:
        import torch

        kind = getattr(torch, dtype)
        leaves = {
            role: torch.tensor(_held(getattr(batch, role)), dtype=kind, requires_grad=True)
            for role in ("log_probs", *(("full_log_probs",) if self.plan.full else ()))
        }
        given = {role: leaf.clone() for role, leaf in leaves.items()}  # no leaves: a change in place must not raise
        if self._log_probs_from_full:
            picked = given["full_log_probs"].gather(-1, torch.as_tensor(batch.tokens)[..., None])[..., 0]
            given["log_probs"] = torch.where(torch.as_tensor(batch.mask), picked, torch.zeros_like(picked))
        arguments = self._arguments(batch, beta, given, lambda a: torch.tensor(_held(a), dtype=kind), torch.as_tensor)
        out = self._called(arguments)
        self._check(out, batch)
        raw = _float64(out)
        value = self._signed(raw, batch)
        if not differentiate:
            return Terms(value, raw=raw)
        slopes = dict.fromkeys(leaves, None)
        if getattr(out, "requires_grad", False):
            real = torch.where(torch.as_tensor(batch.mask), out, torch.zeros_like(out)) if out.ndim == 2 else out
            try:
                found = torch.autograd.grad(real.sum(), list(leaves.values()), allow_unused=True)
            except RuntimeError as error:
                raise Fault(f"its gradient cannot be taken: {' '.join(str(error).split())[:200]}") from None
            slopes = dict(zip(leaves, found, strict=True))
        signed = {
            role: np.zeros(tuple(leaves[role].shape)) if slope is None else self._sign * _float64(slope)
            for role, slope in slopes.items()
        }
        return Terms(value, signed["log_probs"], signed.get("full_log_probs"), raw)

    def _numpy(self, batch: Batch, dtype: str, beta: float) -> Terms:
        given = {role: _array(getattr(batch, role), dtype) for role in ("log_probs", "full_log_probs")}
        if self._log_probs_from_full:
            picked = np.take_along_axis(given["full_log_probs"], np.asarray(batch.tokens)[..., None], -1)[..., 0]
            given["log_probs"] = np.where(batch.mask, picked, np.zeros_like(picked))
        out = self._called(self._arguments(batch, beta, given, lambda a: _array(a, dtype), np.array))
        self._check(out, batch)
        raw = np.asarray(out, float)
        return Terms(self._signed(raw, batch), raw=raw)

    @property
    def rewarded(self) -> bool:
        """Whether it takes rewards or advantages."""
        return bool(REWARDS & set(self.plan.roles.values()))

    @property
    def _log_probs_from_full(self) -> bool:
        """Where both are asked for, the sampled tokens' log-probs follow from the full ones."""
        return self.plan.full

    def _places(self, shape: tuple[int, ...]) -> Iterator[Any]:
        """Entries to differentiate in together: rows of their own for a token term, one by one for a loss."""
        if self.kind == "loss":
            yield from np.ndindex(shape)
        else:
            yield from ((slice(None), *place) for place in np.ndindex(shape[1:]))

    def _difference(self, batch: Batch, place: Any, dtype: str, beta: float, role: str) -> Any:
        total: Any = 0.0
        for steps, weight in _DIFFERENCES:
            for sign in (1, -1):
                moved = {name: getattr(batch, name) for name in Batch.__dataclass_fields__}
                moved[role] = np.array(moved[role], float)
                moved[role][place] += sign * steps * self.step
                total = total + sign * weight / self.step * self._numpy(Batch(**moved), dtype, beta).by_sequence
        return total

    # -- what goes in and what comes out

    @property
    def _sign(self) -> float:
        return 1.0 if self.returns == "penalty" else -1.0

    def _arguments(
        self,
        batch: Batch,
        beta: float,
        given: Mapping[str, Any],
        array: Callable[[Any], Any],
        whole: Callable[[Any], Any],
    ) -> dict[str, Any]:
        made = arguments(
            self.plan.roles, batch, given, array, whole,
            mask_as=self.mask, beta=beta, shift=self.shift, spread=self.spread,
        )  # fmt: skip
        return {**self.plan.constants, **made}

    def _called(self, arguments: dict[str, Any]) -> Any:
        before = {name: copied(value) for name, value in arguments.items()}
        out = guarded(self.function, self.plan, arguments, self.timeout, self.notes)
        for name, value in arguments.items():
            if not unchanged(before[name], value):
                raise Fault(f"it changes its argument {name!r} in place: work on a copy")
        if isinstance(out, (tuple, list)) and out:
            note(self.notes, "it returns several things; the first array among them is checked")
            out = next((part for part in out if hasattr(part, "shape")), out[0])
        return out

    def _check(self, out: Any, batch: Batch) -> None:
        if isinstance(out, (bool, int, float)) and self.backend == "torch":
            raise Fault(
                "it returns a Python number: no gradient flows through it; return the tensor (no .item(), no float())"
            )
        if not hasattr(out, "shape") and not isinstance(out, (int, float)):
            raise Fault(f"it returns {type(out).__name__}, not an array: return [B, T], [B] or a scalar")
        shape = tuple(np.shape(out)) if self.backend == "numpy" else tuple(out.shape)
        kinds = {"token": batch.mask.shape, "sequence": batch.mask.shape[:1], "loss": ()}
        if shape != kinds[self.kind]:
            raise Fault(
                f"given [B, T] = {list(batch.mask.shape)} it returns the shape {list(shape)}; "
                f"it can be [B, T] (a token term), [B] (a sequence term) or [] (a loss)",
                kind="shape", mend=self._shift_mend(shape, batch),
            )  # fmt: skip
        if "float" not in str(getattr(out, "dtype", "float")):
            raise Fault(f"it returns {out.dtype}, not floating-point numbers")

    def _shift_mend(self, shape: tuple[int, ...], batch: Batch) -> str:
        rows, length = batch.mask.shape
        if shape != (rows, length - 1):
            return ""
        if self.plan.full:
            return "klgrad's logits[t] predict token t already: leave the shift (logits[:, :-1], ids[:, 1:]) out"
        return "one place is lost: log-probs are given aligned, place t for token t, with no shift to make"

    def _signed(self, raw: np.ndarray, batch: Batch) -> np.ndarray:
        return self._sign * (np.where(batch.mask, raw, 0.0) if self.kind == "token" else raw)


def function_subject(
    function: Callable[..., Any],
    probe: Batch,
    *,
    name: str = "",
    returns: str = "penalty",
    mapping: Mapping[str, str] = {},
    constants: Mapping[str, Any] = {},
    timeout: float = 30.0,
) -> Function:
    """Find out how the function wants to be called: numpy or torch, its mask's type, and what shape it returns.

    Args:
        probe: a small batch whose numbers of rows and tokens differ.

    Raises:
        ValueError: for bad use: an unknown ``returns``, a parameter that cannot be filled.
        Fault: when no way of calling it works.
    """
    if returns not in RETURNS:
        raise ValueError(f"returns = {returns!r} is none of {', '.join(RETURNS)}")
    shown = name or getattr(function, "__name__", type(function).__name__)
    plain = uncompiled(function)
    compiled, function = (None, function) if plain is None else (function, plain)
    how = plan(function, mapping, constants)
    first: Fault | None = None
    for backend in ("torch", "numpy") if _mentions_torch(function) else ("numpy", "torch"):
        for mask in MASKS if how.takes("mask") else ("bool",):
            try:
                tried = Function(
                    shown, function, how, "token", backend, returns, mask, timeout=timeout, compiled=compiled
                )  # fmt: skip
                found = _probed(tried, probe)
                for sentence in _assumed(how, mapping):
                    note(found.notes, sentence)
                return found
            except Fault as fault:
                if fault.kind != "raises":
                    raise
                first = first or fault
    assert first is not None
    raise first


def _assumed(how: Plan, mapping: Mapping[str, str]) -> Iterator[str]:
    """What a name alone does not settle, or a small model does not show."""
    for name, role in how.roles.items():
        if role.endswith("log_ratio") and name not in mapping:
            meant, other = ("pi / pi_ref", "reverse_log_ratio") if role == "log_ratio" else ("pi_ref / pi", "log_ratio")
            yield f"{name!r} is given log {meant}; if it means the other way round, say --map {name}={other}"
    if how.full:
        yield "vocabularies of 2, 3, 4 and 8 tokens are tried: a truncation to more tokens than that does not show"


def _probed(subject: Function, probe: Batch) -> Function:
    """The subject with the kind of what it returns."""
    last: Fault | None = None
    for kind in ("token", "sequence", "loss"):
        tried = replace(subject, kind=kind, notes=[])
        try:
            found = replace(tried, spread=1.0).evaluate(probe, differentiate=False)
        except Fault as fault:
            if fault.kind != "shape":
                raise
            last = fault
            continue
        if tried.returns == "return" and kind != "token":
            raise ValueError(f"returns = 'return' is one number per token, [B, T]; {tried.name} gives {kind}")
        if not np.isfinite(found.value).all():
            raise Fault("on ordinary log-probs, with 0 at padded places, it returns NaN or infinity")
        for digits, tolerance, step, precision in _PRECISIONS:
            if _coarse(tried, probe, digits):
                note(
                    tried.notes,
                    f"{COMPUTES} {precision} precision, whatever it is given; compared to {tolerance:g}",
                )
                return replace(tried, tolerance=tolerance, step=step)
        return tried
    assert last is not None
    raise last


def _coarse(subject: Function, probe: Batch, digits: float) -> bool:
    """Whether a relative change so small in the log-probs is lost on a value or a slope that depends on them."""
    slopes = subject.backend == "torch"  # of numpy they are differences, and no finer than the value

    def moved(by: float) -> list[np.ndarray]:
        fields = {name: getattr(probe, name) for name in Batch.__dataclass_fields__}
        fields |= {role: np.asarray(fields[role]) * (1 + by) for role in ("log_probs", "full_log_probs")}
        terms = subject.evaluate(Batch(**fields), differentiate=slopes)
        return [part for part in (terms.value, terms.token, terms.vocab) if part is not None]

    here, far, near = moved(0.0), moved(0.02), moved(digits)
    return any(  # a clamp's slope moves too, where an entry crosses it: most must
        2 * np.count_nonzero(a != b) > np.count_nonzero(a) > 0 and np.array_equal(a, c)
        for a, b, c in zip(here, far, near, strict=True)
    )


def _mentions_torch(function: Callable[..., Any]) -> bool:
    """Whether the function's module uses torch: then it is given tensors."""
    import functools

    while isinstance(function, functools.partial):
        function = function.func
    if not hasattr(function, "__code__") and not hasattr(function, "__func__"):
        function = type(function).__call__
    names = getattr(getattr(function, "__func__", function), "__globals__", {})
    homes = ((getattr(v, "__name__", ""), getattr(v, "__module__", "")) for v in list(names.values()))
    return any(str(home).partition(".")[0] == "torch" for pair in homes for home in pair)


# ---------------------------------------------------------------------------------------------------- arrays


def _held(array: Any) -> np.ndarray:
    return np.array(array, float)


def _array(array: Any, dtype: str) -> Any:
    """The numbers in that precision: numpy, or torch where numpy has none (bfloat16)."""
    if dtype == "bfloat16":
        import torch

        return torch.tensor(_held(array), dtype=torch.bfloat16)
    with np.errstate(over="ignore"):
        return np.array(array, dtype)


def _float64(array: Any) -> np.ndarray:
    if hasattr(array, "detach"):
        array = array.detach().double().numpy()
    return np.array(array, float)
