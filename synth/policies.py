"""Policies on an automaton: log-probs and scores; pairs of policy and reference.

Shapes: S contexts, V tokens, d parameters. A *score* is the gradient of a log-prob in the parameters.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from klgrad.files import legible, load_module
from klgrad.synth.automata import Automaton

if TYPE_CHECKING:
    from pathlib import Path

    from jaxtyping import Bool, Float

MAX_SCORE_ENTRIES = 1 << 28


class SupportError(ValueError):
    """The policy puts mass where the reference has none, so the KL is infinite; says where."""


@dataclass(frozen=True, eq=False)
class Policy:
    """Next-token log-probs in every context, with their scores.

    Args:
        log_probs: ``[S, V]`` normalised rows (nats); the end context's row is ignored.
        scores: ``[S, V, d]`` gradients of the log-probs in theta.
        theta: ``[d]`` the parameters.
    """

    log_probs: Float[np.ndarray, "S V"]
    scores: Float[np.ndarray, "S V d"]
    theta: Float[np.ndarray, " d"]

    @property
    def parameters(self) -> int:
        """Number of parameters d."""
        return self.scores.shape[2]


@dataclass(frozen=True, eq=False)
class PolicyPair:
    """A policy and its reference on one automaton, with the behaviour policy when samples are off-policy.

    Args:
        automaton: the contexts.
        policy: the policy, with scores.
        reference: ``[S, V]`` reference log-probs.
        behaviour: ``[S, V]`` log-probs of the policy that samples; ``None`` on-policy.
        name: what tables call the pair.

    Raises:
        ValueError: for shapes that disagree.
        SupportError: where the policy emits a token that the reference never does (infinite KL), or the
            behaviour policy one that the policy never does, in a context that can be reached.
    """

    automaton: Automaton
    policy: Policy
    reference: Float[np.ndarray, "S V"]
    behaviour: Float[np.ndarray, "S V"] | None = None
    name: str = "pair"

    def __post_init__(self) -> None:
        shape = self.automaton.next_context.shape
        named = {"policy": self.policy.log_probs, "reference": self.reference, "behaviour": self.behaviour}
        for name, log_probs in named.items():
            if log_probs is None:
                continue
            if log_probs.shape != shape:
                raise ValueError(f"{name} log-probs have shape {log_probs.shape}; the automaton needs {shape}")
            _check_normalised(self.automaton, _real(log_probs, f"{name} log-probs"), name)
        scores = self.policy.scores
        if scores.ndim != 3 or scores.shape[:2] != shape or scores.shape[2] == 0:
            raise ValueError(f"scores have shape {scores.shape}; the automaton needs [S, V, d] with [S, V] = {shape}")
        if not np.isfinite(_real(scores, "scores")[self.automaton.alive]).all():
            raise ValueError("scores must be finite")
        if not isinstance(self.name, str):
            raise ValueError(f"the pair's name {self.name!r} must be text")
        policy = self.policy.log_probs
        _check_support(self.automaton, policy, self.reference, "policy", "reference", "the KL is infinite")
        if self.behaviour is not None:
            _check_support(
                self.automaton, self.behaviour, policy, "behaviour policy", "policy", "the log-ratio is infinite"
            )

    @property
    def sampler(self) -> Float[np.ndarray, "S V"]:
        """``[S, V]`` log-probs that sequences are drawn from: the behaviour policy's, or the policy's."""
        return self.policy.log_probs if self.behaviour is None else self.behaviour

    @property
    def on_policy(self) -> bool:
        """Whether sequences are drawn from the policy itself."""
        return self.behaviour is None

    def sampling_gaps(self) -> list[str]:
        """Where the policy emits a token that the behaviour policy never samples, in words."""
        missing = (self.policy.log_probs > -np.inf) & (self.sampler == -np.inf) & self.automaton.alive[:, None]
        missing &= reachable(self.automaton, self.policy.log_probs)[:, None]
        return [
            f"in context {self.automaton.describe(int(s))} the behaviour policy never samples token {v}"
            for s, v in np.argwhere(missing)
        ]

    @cached_property
    def possible(self) -> Bool[np.ndarray, "S V"]:
        """``[S, V]`` True where the sampler can emit the token in a context that it can reach."""
        visited = self.automaton.alive & reachable(self.automaton, self.sampler)
        return _locked((self.sampler > -np.inf) & visited[:, None])

    @cached_property
    def log_ratio(self) -> Float[np.ndarray, "S V"]:
        """``[S, V]`` log pi - log pi_ref; 0 where the policy never emits the token."""
        return _locked(_difference(self.policy.log_probs, self.reference))

    @cached_property
    def importance_ratio(self) -> Float[np.ndarray, "S V"]:
        """``[S, V]`` pi / mu of each token; 1 on-policy, 0 where the behaviour policy never emits it."""
        if self.behaviour is None:
            return _locked(np.ones_like(self.policy.log_probs))
        with np.errstate(over="ignore"):  # infinite beyond e^709, and tables say so
            ratio = np.exp(_difference(self.policy.log_probs, self.behaviour))
        return _locked(np.where(self.behaviour > -np.inf, ratio, 0.0))


def _locked(array: np.ndarray) -> np.ndarray:
    """The array, read-only: it is kept and handed out again."""
    array.setflags(write=False)
    return array


def _real(array: Any, name: str) -> np.ndarray:
    """The array in float64; no text, complex numbers or truth values."""
    array = np.asarray(array)
    if array.dtype.kind not in "fiu":
        raise ValueError(f"{name} must hold real numbers; got dtype {array.dtype}")
    return array.astype(float)


def _check_normalised(automaton: Automaton, log_probs: np.ndarray, name: str) -> None:
    with np.errstate(over="ignore"):
        off = np.where(automaton.alive, np.abs(np.exp(log_probs).sum(axis=1) - 1), 0.0)
    if not off.max() < 1e-6:  # a NaN fails this too
        s = int(np.argmax(np.where(np.isnan(off), np.inf, off)))
        raise ValueError(
            f"{name} log-probs in context {automaton.describe(s)} do not sum to one as probabilities "
            f"(off by {off[s]:.3g}): pass them through log_softmax or log_of_probs"
        )


def _difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    finite = (a > -np.inf) & (b > -np.inf)
    return np.where(finite, np.where(finite, a, 0.0) - np.where(finite, b, 0.0), 0.0)


def reachable(automaton: Automaton, log_probs: Float[np.ndarray, "S V"]) -> Bool[np.ndarray, " S"]:
    """``[S]`` True for the contexts that ``log_probs`` reaches from the start with positive probability."""
    seen = np.zeros(automaton.contexts, bool)
    frontier = np.array([automaton.start])
    while frontier.size:
        seen[frontier] = True
        reached = np.zeros_like(seen)  # a mask, not np.unique: that imports numpy.ma, which start-up would feel
        reached[automaton.next_context[frontier][log_probs[frontier] > -np.inf]] = True
        frontier = np.flatnonzero(reached & ~seen)
    return seen


def _check_support(
    automaton: Automaton, p: np.ndarray, q: np.ndarray, p_name: str, q_name: str, consequence: str
) -> None:
    bad = (p > -np.inf) & (q == -np.inf) & automaton.alive[:, None]
    if bad.any():
        bad &= reachable(automaton, p)[:, None]
    if bad.any():
        s, v = np.argwhere(bad)[0]
        raise SupportError(
            f"{consequence}: in context {automaton.describe(int(s))} the {p_name} emits token {v} "
            f"with probability {np.exp(p[s, v]):.3g} and the {q_name} never does; give it mass there"
        )


def log_softmax(logits: Float[np.ndarray, "S V"], *, name: str = "logits") -> Float[np.ndarray, "S V"]:
    """Normalised log-probs of each row; -inf marks a token that is never emitted.

    Raises:
        ValueError: for NaN, +inf, or a row of nothing but -inf, naming the row.
    """
    logits = _real(logits, name)
    if logits.ndim != 2:
        raise ValueError(f"{name} must have shape [S, V]; got {logits.shape}")
    bad = np.isnan(logits) | (logits == np.inf)
    if bad.any():
        s, v = np.argwhere(bad)[0]
        raise ValueError(f"{name}[{s}, {v}] is {logits[s, v]}: give finite numbers, or -inf for a token never emitted")
    top = logits.max(axis=1, keepdims=True)
    if (top == -np.inf).any():
        raise ValueError(f"{name} row {np.argmin(top)} is -inf throughout: at least one token must be possible")
    shifted = logits - top
    others = np.exp(shifted)
    others[np.arange(len(logits)), logits.argmax(axis=1)] = 0.0
    return shifted - np.log1p(others.sum(axis=1, keepdims=True))  # log1p: a probability near 1 keeps its distance to 1


def log_of_probs(probs: Float[np.ndarray, "S V"], *, name: str = "probs") -> Float[np.ndarray, "S V"]:
    """Log-probs of rows of probabilities.

    Raises:
        ValueError: for an entry that is no number from 0 to 1, or a row that does not sum to one, naming it.
    """
    probs = _real(probs, name)
    if probs.ndim != 2:
        raise ValueError(f"{name} must have shape [S, V]; got {probs.shape}")
    bad = ~np.isfinite(probs) | (probs < 0) | (probs > 1 + 1e-9)
    if bad.any():
        s, v = np.argwhere(bad)[0]
        raise ValueError(f"{name}[{s}, {v}] = {probs[s, v]} is not a probability")
    total = probs.sum(axis=1)
    off = np.abs(total - 1)
    if off.max() > 1e-9:
        raise ValueError(f"{name} row {off.argmax()} sums to {total[off.argmax()]:.12g}, not 1: normalise it")
    with np.errstate(divide="ignore"):
        return np.log(probs / total[:, None])


def _check_scores_fit(contexts: int, vocabulary: int, parameters: int) -> None:
    if contexts * vocabulary * parameters > MAX_SCORE_ENTRIES:
        raise ValueError(
            f"scores of shape [{contexts}, {vocabulary}, {parameters}] do not fit: "
            "share parameters over contexts with linear(automaton, features, theta)"
        )


def tabular(automaton: Automaton, logits: Float[np.ndarray, "S V"]) -> Policy:
    """One free logit for every token in every context that emits: d = V * (S, or S - 1 with an end)."""
    log_probs = log_softmax(logits, name="policy_logits")
    contexts, vocabulary = automaton.next_context.shape
    if log_probs.shape != (contexts, vocabulary):
        raise ValueError(f"policy_logits have shape {log_probs.shape}; the automaton needs {(contexts, vocabulary)}")
    alive = np.flatnonzero(automaton.alive)
    _check_scores_fit(contexts, vocabulary, len(alive) * vocabulary)
    scores = np.zeros((contexts, vocabulary, len(alive), vocabulary))
    block = np.repeat(-np.exp(log_probs)[alive, None, :], vocabulary, axis=1)
    block[:, np.arange(vocabulary), np.arange(vocabulary)] = -np.expm1(log_probs[alive])  # 1 - p without cancellation
    scores[alive, :, np.arange(len(alive)), :] = block
    theta = np.asarray(logits, float)[alive].ravel()
    return Policy(log_probs, scores.reshape(contexts, vocabulary, -1), theta)


def linear(automaton: Automaton, features: Float[np.ndarray, "S V d"], theta: Float[np.ndarray, " d"]) -> Policy:
    """Logits linear in shared features: logit(s, v) = features[s, v] . theta."""
    features, theta = _real(features, "features"), _real(theta, "theta")
    if theta.size == 0:
        raise ValueError("theta is empty: a policy needs at least one parameter")
    if features.ndim != 3 or features.shape[:2] != automaton.next_context.shape or theta.shape != features.shape[2:]:
        raise ValueError(
            f"features {features.shape} and theta {theta.shape} must be [S, V, d] and [d] "
            f"with [S, V] = {automaton.next_context.shape}"
        )
    if not (np.isfinite(features).all() and np.isfinite(theta).all()):
        raise ValueError("features and theta must be finite")
    with np.errstate(over="ignore", invalid="ignore"):
        logits = features @ theta
    log_probs = log_softmax(logits, name="features . theta")
    likeliest = log_probs.argmax(axis=1)
    centred = features - features[np.arange(len(features)), likeliest][:, None, :]  # keeps 1 - p near determinism
    mean = np.einsum("sv,svd->sd", np.exp(log_probs), centred)
    return Policy(log_probs, centred - mean[:, None, :], theta)


def from_function(automaton: Automaton, logits: Callable[[Any], Any], theta: Float[np.ndarray, " d"]) -> Policy:
    """Any differentiable logit function ``theta [d] -> logits [S, V]`` in torch; scores by autograd."""
    import torch

    point = torch.tensor(np.asarray(theta, float), dtype=torch.float64)

    def log_probs(parameters: Any) -> Any:
        return torch.log_softmax(logits(parameters), dim=-1)

    value = log_probs(point).detach().numpy()
    if value.shape != automaton.next_context.shape:
        raise ValueError(f"logits(theta) has shape {value.shape}; the automaton needs {automaton.next_context.shape}")
    _check_scores_fit(automaton.contexts, automaton.vocabulary, len(point))
    scores = torch.autograd.functional.jacobian(log_probs, point).numpy()  # type: ignore[no-untyped-call]
    if not np.isfinite(scores[automaton.alive]).all():
        raise ValueError("the gradient of logits(theta) is not finite")
    return Policy(log_softmax(value), scores, point.numpy())


def with_behaviour(pair: PolicyPair, log_probs: Float[np.ndarray, "S V"] | None) -> PolicyPair:
    """The same pair, sampled by another behaviour policy; ``None`` for on-policy."""
    return replace(pair, behaviour=log_probs)


_REQUIRED = ("next_context", "start", "end", "policy_logits", "reference_logits")
_OPTIONAL = ("behaviour_logits", "features", "theta")


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    try:
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            if isinstance(archive, np.lib.npyio.NpzFile):
                return {key: archive[key] for key in archive.files}
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read as .npz: {error.strerror or error}") from None
    except MemoryError:
        raise ValueError(f"{path} cannot be read as .npz: it claims arrays that do not fit in memory") from None
    except Exception:  # a damaged archive may claim to be encrypted, patched, of another version, ...
        pass
    raise ValueError(f"{path} cannot be read as .npz: it is not an archive of named arrays of numbers")


def load_npz(path: str | Path) -> PolicyPair:
    """A pair from an ``.npz`` file (read without pickle).

    Keys: ``next_context [S, V]``, ``start``, ``end`` (-1: none), ``policy_logits [S, V]``,
    ``reference_logits [S, V]``; optionally ``behaviour_logits [S, V]``, and ``features [S, V, d]`` with
    ``theta [d]`` for shared parameters (``policy_logits`` must then be left out or equal features . theta up to
    a constant in each context).

    Raises:
        ValueError: for a file that is not such an archive, naming what is missing or wrong.
    """
    from pathlib import Path

    path = Path(path)
    arrays = _read_npz(path)
    parametric = "features" in arrays or "theta" in arrays
    required = [key for key in _REQUIRED if not (parametric and key == "policy_logits")]
    missing = [key for key in (*required, *(("features", "theta") if parametric else ())) if key not in arrays]
    unknown = sorted(set(arrays) - set(_REQUIRED) - set(_OPTIONAL))
    if missing or unknown:
        what = f"lacks {', '.join(missing)}" if missing else f"has unknown keys {', '.join(unknown)}"
        raise ValueError(f"{path} {what}: a pair has {', '.join(_REQUIRED)} and may have {', '.join(_OPTIONAL)}")
    if any(arrays[key].shape != () or arrays[key].dtype.kind not in "iu" for key in ("start", "end")):
        raise ValueError(f"{path}: start and end must be single integers")
    try:
        return _assemble(legible(path.stem), arrays)
    except ValueError as error:
        raise type(error)(f"{path}: {error}") from None


def _assemble(name: str, arrays: dict[str, np.ndarray]) -> PolicyPair:
    automaton = Automaton(arrays["next_context"], int(arrays["start"]), int(arrays["end"]))
    shape = automaton.next_context.shape

    def logits(key: str) -> np.ndarray:
        given = np.array(arrays[key])
        if given.shape == shape and given.dtype.kind in "fiu" and automaton.end >= 0:
            given[automaton.end] = 0  # nothing is emitted there, so anything may stand there
        return given

    def log_probs(key: str) -> np.ndarray:
        return log_softmax(logits(key), name=key)

    if "features" in arrays:
        policy = linear(automaton, arrays["features"], arrays["theta"])
        if "policy_logits" in arrays:
            stated = log_probs("policy_logits")
            if stated.shape != shape or np.abs(stated - policy.log_probs)[automaton.alive].max() > 1e-8:
                raise ValueError("policy_logits and features . theta are different policies")
    else:
        policy = tabular(automaton, logits("policy_logits"))
    behaviour = log_probs("behaviour_logits") if "behaviour_logits" in arrays else None
    return PolicyPair(automaton, policy, log_probs("reference_logits"), behaviour, name)


def load_log_probs(path: str | Path, key: str) -> Float[np.ndarray, "S V"]:
    """``[S, V]`` log-probs from the logits under one key of an ``.npz`` file (read without pickle).

    Raises:
        ValueError: for a file that is not an archive or lacks the key.
    """
    from pathlib import Path

    arrays = _read_npz(Path(path))
    if key not in arrays:
        raise ValueError(f"{path} has no {key}: it has {', '.join(arrays) or 'nothing'}")
    return log_softmax(arrays[key], name=key)


def load_function(name: str) -> PolicyPair:
    """A pair from ``module:function`` or ``file.py:function``, called without arguments.

    Raises:
        ValueError: when it cannot be imported, raises, or does not return a PolicyPair.
    """
    module_name, _, function_name = name.rpartition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # a console script does not look in the working directory
    if not module_name or not function_name:
        raise ValueError(f"{name!r} must be MODULE:FUNCTION")
    try:
        with redirect_stdout(sys.stderr):  # what their code prints must not end up in our output
            pair = getattr(load_module(module_name), function_name)()
    except (Exception, SystemExit) as error:
        raise ValueError(f"{name} gave no pair: {type(error).__name__}: {error}") from error
    if not isinstance(pair, PolicyPair):
        raise ValueError(f"{name}() returned {type(pair).__name__}, not a klgrad.synth.policies.PolicyPair")
    return pair


def load_pair(name: str) -> PolicyPair:
    """A pair from ``FILE.npz`` or ``MODULE:FUNCTION``.

    Raises:
        ValueError: for a name that is neither, or what the loader finds wrong.
    """
    if name.endswith(".npz"):
        return load_npz(name)
    if ":" in name:
        return load_function(name)
    raise ValueError(f"{name!r} is neither FILE.npz nor MODULE:FUNCTION")
