"""Sequences drawn and reduced in torch on one device: the Monte Carlo engine for a GPU.

The same ``Sums`` as ``sampling.Sampler``; tokens are drawn one after another by Walker's alias method (1977) instead of
in blocks. Names of devices: ``cpu`` is the numpy engine, the reference; ``cuda`` and ``cuda:N`` are GPUs; ``torch-cpu``
is this engine without one.

Everything is float64 and stays on the device until a block's sums are complete. The same seed gives the same bytes on
the same device and torch: sizes of parts come from the device's whole memory, not from what is free; sums are made by
``index_put_``, which sorts on CUDA where ``scatter_add_`` and ``bincount`` add in any order; on a CPU one thread adds.
Shapes: n sequences of T tokens, S contexts, V tokens, E edges (context, token) in use, U units, d parameters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from klgrad.synth.blocks import edges_in_use
from klgrad.synth.configurations import Configuration, credit_sums, importance_ratios, loss_weights
from klgrad.synth.estimators import array_namespace
from klgrad.synth.policies import PolicyPair
from klgrad.synth.rows import edge_pathwise, edge_values
from klgrad.synth.sums import Sums

if TYPE_CHECKING:
    from jaxtyping import Float, Int

Totals = Sequence[Any]  # the fields of ``Sums`` as tensors on the device

_CPU_BYTES = 1 << 26
_SHARE = 16  # of a GPU's memory, for one part
_TEMPORARIES = 24  # numbers for each token, while one configuration is reduced


# ----------------------------------------------------------------------------------------------------- devices


def absence(device: str) -> str:
    """Why the device is not here, or nothing where it is.

    Raises:
        ValueError: for a name that is no device.
    """
    match = re.fullmatch(r"cpu|torch-cpu|cuda(?::(0|[1-9]\d{0,2}))?", device)
    if match is None:
        raise ValueError(f"unknown device {device!r}: cpu (numpy, the reference), cuda, cuda:N, or torch-cpu")
    if not device.startswith("cuda"):
        return ""
    import torch

    if not torch.cuda.is_available():
        why = "is built without it" if torch.version.cuda is None else "finds no GPU or no driver"
        return f"this torch has no CUDA device: torch {torch.__version__} {why}"
    if match[1] and int(match[1]) >= torch.cuda.device_count():
        return f"there is no {device}: the last CUDA device here is cuda:{torch.cuda.device_count() - 1}"
    return ""


def identity(device: str) -> str:
    """What the bytes depend on besides the request: torch and the hardware, in words."""
    import torch

    hardware = torch.cuda.get_device_name(device) if device.startswith("cuda") else "the CPU"
    return f"torch {torch.__version__} on {hardware}"


@contextmanager
def reproducible(device: str) -> Iterator[None]:
    """On ``torch-cpu``, one thread of torch's: the last digits of its sums depend on how many there are."""
    if device != "torch-cpu":
        yield
        return
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _room(device: Any) -> int:
    """Bytes for one part: fixed for a device, so that the same seed draws the same parts."""
    if device.type != "cuda":
        return _CPU_BYTES
    import torch

    return int(torch.cuda.get_device_properties(device).total_memory) // _SHARE


def _generator(device: Any) -> Any:
    import torch

    return torch.Generator(device)


def _tensor(array: np.ndarray, device: Any) -> Any:
    import torch

    return torch.tensor(array if array.dtype.kind == "i" else array.astype(np.float64), device=device)


# ---------------------------------------------------------------------------------------------------- the draw


def alias_tables(probs: Float[np.ndarray, "S V"]) -> tuple[Float[np.ndarray, "S V"], Int[np.ndarray, "S V"]]:
    """``(keep, other)``: pick a column evenly, keep it with probability ``keep[s, column]``, else take ``other``.

    Walker 1977; a column filled from the largest remainder each time. A token of probability 0 is never taken.
    """
    left = probs / probs.sum(axis=1, keepdims=True) * probs.shape[1]
    keep, other = np.ones_like(left), np.tile(np.arange(probs.shape[1]), (len(probs), 1))
    rows, done = np.arange(len(probs)), np.zeros(left.shape, bool)
    for _ in range(probs.shape[1] - 1):
        least = np.where(done, np.inf, left).argmin(axis=1)
        most = np.where(done, -np.inf, left).argmax(axis=1)
        keep[rows, least], other[rows, least], done[rows, least] = left[rows, least], most, True
        left[rows, most] -= 1.0 - left[rows, least]
    return keep, other


class _Table(NamedTuple):
    """A configuration's terms on the edges: ``value [E + 1]``, 0 for padding; ``pathwise [E, d]`` where in the loss."""

    configuration: Configuration
    value: Any
    pathwise: Any


class TorchSampler:
    """Draws sequences of a pair on a device and reduces them to each configuration's ``Sums``.

    Args:
        pair: the pair; its sampler draws.
        configurations: what is to be estimated; all on the same sequences.
        device: ``torch-cpu``, ``cuda`` or ``cuda:N``.
    """

    def __init__(self, pair: PolicyPair, configurations: Sequence[Configuration], device: str) -> None:
        import torch

        self.pair, self.automaton, self.edges = pair, pair.automaton, edges_in_use(pair)
        self.device = torch.device(device.removeprefix("torch-"))
        at = (self.edges.context, self.edges.token)
        alive = self.automaton.alive[:, None]
        keep, other = alias_tables(np.where(alive, np.exp(np.where(alive, pair.sampler, 0.0)), 1.0))
        flat = (keep, other, self.automaton.next_context, self.edges.number)
        self.keep, self.other, self.next_context, self.number = (_tensor(table.ravel(), self.device) for table in flat)
        self.log_rho = _tensor(np.append(pair.policy.log_probs[at] - pair.sampler[at], 0.0), self.device)
        self.scores = _tensor(pair.policy.scores[at], self.device)
        self.tables = [self._table(configuration) for configuration in configurations]

    def _table(self, configuration: Configuration) -> _Table:
        at = (self.edges.context, self.edges.token)
        value = _tensor(np.append(edge_values(self.pair, configuration)[at], 0.0), self.device)
        if not configuration.in_loss:
            return _Table(configuration, value, None)
        return _Table(configuration, value, _tensor(edge_pathwise(self.pair, configuration)[at], self.device))

    def generator(self, stream: np.random.SeedSequence) -> Any:
        """torch's generator on the device, seeded by 64 bits of the stream (of which the CPU's uses 32)."""
        return _generator(self.device).manual_seed(int(stream.generate_state(1, np.uint64)[0]))

    def sums(self, length: int, units: int, size: int, rng: Any) -> list[Sums]:
        """Draw ``units`` x ``size`` sequences of the length and reduce them, one ``Sums`` per configuration.

        Raises:
            ValueError: when the device has no room for them.
        """
        import torch

        try:
            with torch.inference_mode():
                return [
                    Sums(*(part.cpu().numpy() for part in total)) for total in self.totals(length, units, size, rng)
                ]
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"{self.device} is out of memory ({str(error).split('.')[0]}): "
                "leave room on it, take fewer --samples, or leave out --device to draw on the CPU"
            ) from None

    def totals(self, length: int, units: int, size: int, rng: Any) -> list[Totals]:
        """What ``sums`` returns, as tensors that are still on the device."""
        import torch

        n, wide, narrow = units * size, (units, self.pair.policy.parameters), (units,)
        totals: list[Totals] = [
            [
                torch.zeros(shape, dtype=torch.float64, device=self.device)
                for shape in (wide, wide, wide, narrow, narrow)
            ]
            for _ in self.tables
        ]
        parts = -(-n // self.rows(length, size))
        for i in range(parts):  # even ones: torch sums a single sequence by another kernel, whose order is not fixed
            first, beyond = n * i // parts, n * (i + 1) // parts
            low, high = first // size, (beyond - 1) // size + 1
            unit = torch.arange(first, beyond, device=self.device) // size - low
            found = self.reduce(self.paths(length, beyond - first, rng), unit, high - low)
            for total, part in zip(totals, found, strict=True):
                for into, more in zip(total, part, strict=True):
                    into[low:high] += more
        return totals

    def rows(self, length: int, size: int) -> int:
        """Sequences of one part: at least 3, so that even parts of two or more sequences have two."""
        numbers = length * (_TEMPORARIES + 2 * len(self.tables)) + 2 * -(-len(self.edges) // size)
        return max(3, _room(self.device) // (8 * numbers))

    def paths(self, length: int, n: int, rng: Any) -> Any:
        """``[n, T]`` edges of n sequences, E where a sequence has ended.

        One uniform a token: its integer part names a column and its fraction keeps it or not.
        """
        import torch

        V = self.automaton.vocabulary
        uniform = torch.rand((length, n), generator=rng, dtype=torch.float64, device=self.device)
        context = torch.full((n,), self.automaton.start, device=self.device)
        emitted = []
        for scaled in uniform * V:  # below V: rounding never reaches it
            column = scaled.to(torch.int64)
            place = context * V + column
            token = column.where(scaled - column < self.keep.take(place), self.other.take(place))
            emitted.append(context * V + token)
            context = self.next_context.take(emitted[-1])
        return self.number.take(torch.stack(emitted, dim=1))

    def reduce(self, path: Any, unit: Any, units: int) -> list[Totals]:
        """Each configuration's ``Sums``, as tensors, of edges ``path [n, T]``; ``unit [n]`` says whose each is."""
        batch = _Batch(self, path, unit, units)
        return [batch.sums(table) for table in self.tables]


class _Batch:
    """One batch of paths, reduced for one configuration after another; what they share is computed once."""

    def __init__(self, sampler: TorchSampler, path: Any, unit: Any, units: int) -> None:
        self.sampler, self.path, self.unit, self.units = sampler, path, unit, units
        self.edges = len(sampler.edges)
        self.cell = (unit[:, None] * (self.edges + 1) + path).flatten()
        self.shared: dict[tuple[str, ...], Any] = {}

    def once(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """The value under the key, made at its first use."""
        if key not in self.shared:
            self.shared[key] = make()
        return self.shared[key]

    def by_edge(self, weight: Any) -> Any:
        """``[U, E]`` sum of each token's weight, by unit and edge; what stands on padding is left out."""
        cells = _add(weight.flatten(), self.cell, self.units * (self.edges + 1))
        return cells.view(self.units, -1)[:, : self.edges]

    def sums(self, table: _Table) -> Totals:
        """The configuration's sums over this batch."""
        configuration, ratio, scores = table.configuration, table.configuration.ratio, self.sampler.scores
        value = self.once((configuration.estimator, configuration.rollout_value), lambda: table.value.take(self.path))
        xp = array_namespace(value)
        own, before = self.once(
            ("ratio", ratio), lambda: importance_ratios(ratio, self.sampler.log_rho.take(self.path), xp)
        )
        each = self.once(("length",), self.lengths) if configuration.aggregation == "length-mean" else 1.0
        shared = (ratio, configuration.aggregation)
        c, weight = value.sum(dim=1, keepdim=True), loss_weights(configuration, own, before)
        nothing = scores.new_zeros((self.units, scores.shape[1]))
        x = nothing
        if configuration.in_reward:
            inside = before if configuration.estimator.full and ratio == "prefix" else own
            x = x + self.by_edge(credit_sums(configuration, value, own, inside, xp) / each) @ scores
        if configuration.in_loss:
            kind = "own" if weight is own else "before"
            x = x + self.once((kind, *shared), lambda: self.by_edge(weight / each)) @ table.pathwise
        y = cy = nothing
        if configuration.baseline != "none":
            y = self.once(("own", *shared), lambda: self.by_edge(own / each)) @ scores
        if configuration.baseline == "loo":
            cy = self.by_edge(c * own / each) @ scores
        estimate = (weight * value / each).sum(dim=1)
        D = configuration.divisor
        return x / D, y / D, cy / D, self.by_unit(c[:, 0]), self.by_unit(estimate) / D

    def lengths(self) -> Any:
        """``[n, 1]`` |y|."""
        return (self.path < self.edges).sum(dim=1, keepdim=True)

    def by_unit(self, each: Any) -> Any:
        """``[U]`` sum over each unit's sequences."""
        return _add(each, self.unit, self.units)


def _add(values: Any, place: Any, places: int) -> Any:
    """``[places]`` sums of the values at each place."""
    return values.new_zeros(places).index_put_((place,), values, accumulate=True)
