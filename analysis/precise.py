"""A second route in arithmetic of any precision: the formula of ``configurations`` over every sequence, in mpmath.

It shares no number with the engine: policies come from logits, estimators from their *formulas* as the registry prints
them, slopes from sympy's derivative. What the engine says can be held against it digit by digit, where a second route
in double precision would lose the same digits.

Shapes: S contexts, V tokens, T tokens of a sequence, M sequences, d parameters; arrays hold mpf.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, cached_property
from typing import Any

import mpmath
import numpy as np

from klgrad.synth.automata import Automaton
from klgrad.synth.configurations import Configuration
from klgrad.synth.enumeration import sequences
from klgrad.synth.estimators import ESTIMATORS, Estimator, arguments

DIGITS = 60  # of a pair's arithmetic, enough while log-ratios stay below some 50
Functions = tuple[Callable[..., Any], Callable[..., Any]]

_exp = np.frompyfunc(mpmath.exp, 1, 1)
_number = np.frompyfunc(mpmath.mpf, 1, 1)


# -------------------------------------------------------------------------------------------------- estimators


def expression(text: str, parameters: tuple[str, ...] = ()) -> Any:
    """A registered formula as a sympy expression in ``delta`` (real), ``pi`` (positive) and the parameters.

    ``sum_v f(v)`` is read as the summand f.
    """
    import sympy
    from sympy.parsing import sympy_parser as reader

    delta, names = sympy.Symbol("delta", real=True), {name: sympy.Symbol(name, real=True) for name in parameters}
    names |= {
        "delta": delta,
        "r": sympy.exp(-delta),
        "pi": sympy.Symbol("pi", positive=True),
        "clip": lambda x, low, high: sympy.Max(low, sympy.Min(high, x)),
        "k3": lambda x: sympy.exp(-x) - 1 + x,
    }
    plain = re.sub(r"\|(\w+)\|", r"Abs(\1)", text.removeprefix("sum_v ").replace("(v)", ""))
    rules = (*reader.standard_transformations, reader.convert_xor, reader.implicit_multiplication)
    return reader.parse_expr(plain.replace("[", "(").replace("]", ")"), local_dict=names, transformations=rules)


@cache
def _compiled(name: str) -> Functions:
    """Value and slope of a registered entry, ``(delta, pi, *arguments) -> mpf``."""
    import sympy

    entry = ESTIMATORS[name]
    parameters = tuple(parameter for parameter, _ in entry.parameters)
    value, delta = expression(entry.formula, parameters), sympy.Symbol("delta", real=True)
    stated = entry.full or not entry.consistent  # else it is the formula's derivative
    slope = expression(entry.slope_formula.split(" for ")[0], parameters) if stated else sympy.diff(value, delta)
    symbols = (delta, sympy.Symbol("pi", positive=True), *(sympy.Symbol(p, real=True) for p in parameters))
    step = {"Heaviside": lambda x, *_: mpmath.mpf(x > 0)}
    made = [sympy.lambdify(symbols, each, [step, "mpmath"]) for each in (value, slope)]
    return made[0], made[1]


def functions(est: Estimator) -> Functions:
    """Value and slope ``(delta, pi) -> mpf`` of one token; a full-vocabulary estimator's are the summands over v."""
    name, given = arguments(est.name)
    bound = [mpmath.mpf(each) for each in given]
    value, slope = _compiled(name)
    return (lambda delta, pi=1: value(delta, pi, *bound)), (lambda delta, pi=1: slope(delta, pi, *bound))


# -------------------------------------------------------------------------------------------------------- pairs


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """``[S, V]`` normalised log-probs of rows of logits; -inf stays."""
    logits = _number(np.asarray(logits, object))
    total = np.array([mpmath.log(mpmath.fsum(mpmath.exp(x) for x in row)) for row in logits], object)
    return np.asarray(logits - total[:, None])


class PrecisePair:
    """Tabular policy and reference from logits, as ``policies.tabular`` and ``log_softmax`` make them in float64.

    Args:
        policy, reference: ``[S, V]`` logits, finite.
        behaviour: ``[S, V]`` logits of the policy that samples; ``None`` on-policy.
    """

    def __init__(
        self, automaton: Automaton, policy: np.ndarray, reference: np.ndarray, behaviour: np.ndarray | None = None
    ) -> None:
        self.automaton = automaton
        self.policy, self.reference = log_softmax(policy), log_softmax(reference)
        self.sampler = self.policy if behaviour is None else log_softmax(behaviour)
        self.delta = self.policy - self.reference
        alive, (S, V) = np.flatnonzero(automaton.alive), self.policy.shape
        self.scores = np.full((S, V, len(alive) * V), mpmath.mpf(0), object)
        probs = _exp(self.policy)
        for k, s in enumerate(alive):
            self.scores[s, :, k * V : (k + 1) * V] = _number(np.eye(V).astype(object)) - probs[s][None, :]

    def paths(self, length: int) -> list[tuple[list[int], list[int]]]:
        """Contexts and tokens of every sequence."""
        every = sequences(self.automaton, length)
        return [
            (every.contexts[i, :n].tolist(), every.tokens[i, :n].tolist())
            for i, n in enumerate(every.mask.sum(axis=1).tolist())
        ]

    def probability(self, path: tuple[list[int], list[int]], log_probs: np.ndarray | None = None) -> Any:
        """Of a sequence under the sampler, or under ``log_probs``."""
        table = self.sampler if log_probs is None else log_probs
        return mpmath.exp(mpmath.fsum(table[edge] for edge in zip(*path, strict=True)))

    def divergence(self, length: int, p: np.ndarray, q: np.ndarray) -> Any:
        """KL(p || q) of sequences under two ``[S, V]`` tables of log-probs."""
        return mpmath.fsum(
            self.probability(path, p) * mpmath.fsum(p[e] - q[e] for e in zip(*path, strict=True))
            for path in self.paths(length)
        )

    def entropy(self, length: int) -> Any:
        """Of the policy's sequences."""
        return self.divergence(length, self.policy, np.full_like(self.policy, mpmath.mpf(0))) * -1

    def true_gradient(self, length: int) -> np.ndarray:
        """``[d]`` of the sequence-level KL: the sum over sequences of pi(y) score(y) log-ratio(y)."""
        total: Any = 0
        for path in self.paths(length):
            edges = list(zip(*path, strict=True))
            weight = self.probability(path, self.policy) * mpmath.fsum(self.delta[e] for e in edges)
            total = total + weight * sum(self.scores[e] for e in edges)
        return np.asarray(total)


class PreciseMoments:
    """X (g at b = 0), Y and C of every sequence for one configuration, and what they give.

    ``mean``, ``variance`` (N times the trace of the covariance), ``estimate`` and ``estimate_variance`` are those of
    ``moments.Moments`` at one length.
    """

    def __init__(self, pair: PrecisePair, configuration: Configuration, length: int) -> None:
        self.pair, self.configuration = pair, configuration
        paths = pair.paths(length)
        self.p = np.array([pair.probability(path) for path in paths], object)
        self.value, self.slope = functions(configuration.estimator)
        parts = [self._sequence(*path) for path in paths]
        self.x, self.y, self.c, self.e = (np.array([part[k] for part in parts], object) for k in range(4))

    def _token(self, s: int, v: int) -> tuple[Any, np.ndarray]:
        """c and w of a token: the detached value, and the differentiated one's gradient."""
        pair = self.pair
        if self.configuration.estimator.full:
            tokens = range(pair.automaton.vocabulary)
            pi = _exp(pair.policy[s])
            c = mpmath.fsum(self.value(pair.delta[s, u], pi[u]) for u in tokens)
            return c, np.asarray(sum(self.slope(pair.delta[s, u], pi[u]) * pair.scores[s, u] for u in tokens))
        at = (pair.sampler if self.configuration.rollout_value else pair.policy)[s, v] - pair.reference[s, v]
        return self.value(at), self.slope(pair.delta[s, v]) * pair.scores[s, v]

    def _sequence(self, contexts: list[int], tokens: list[int]) -> tuple[Any, Any, Any, Any]:
        """X, Y, C and the KL estimate of one sequence."""
        cfg, pair, T = self.configuration, self.pair, len(tokens)
        edges, full = list(zip(contexts, tokens, strict=True)), cfg.estimator.full
        score = [pair.scores[e] for e in edges]
        c, w = zip(*(self._token(*e) for e in edges), strict=True)
        log_rho = [pair.policy[e] - pair.sampler[e] for e in edges]
        running = [mpmath.exp(mpmath.fsum(log_rho[:t])) for t in range(T + 1)]

        def omega(t: int, u: int) -> Any:
            prefix = running[max(t + 1, u if full else u + 1)]
            return {"none": 1, "token": mpmath.exp(log_rho[t]), "prefix": prefix, "sequence": running[T]}[cfg.ratio]

        def counts(t: int, u: int) -> bool:
            return {"whole": True, "rtg": t <= u, "token": t == u, "future": t < u}[cfg.credit]

        def inside(t: int) -> Any:  # lambda_t
            return {"token": 1, "prefix": running[t]}.get(cfg.ratio, omega(t, t)) if full else omega(t, t)

        divisor = {"sum": 1, "divide": mpmath.mpf(cfg.divisor), "length-mean": T}[cfg.aggregation]
        x: Any = 0 * score[0]
        for t in range(T):
            if cfg.in_reward:
                x = x + score[t] * mpmath.fsum(omega(t, u) * c[u] for u in range(T) if counts(t, u))
            if cfg.in_loss:
                x = x + inside(t) * w[t]
        y = sum(omega(t, t) * score[t] for t in range(T))
        estimate = mpmath.fsum(inside(t) * c[t] for t in range(T))
        return x / divisor, y / divisor, mpmath.fsum(c), estimate / divisor

    def _mean(self, values: np.ndarray) -> Any:
        return (self.p[:, None] * values).sum(axis=0) if values.ndim == 2 else (self.p * values).sum()

    def _covariance(self, a: np.ndarray, b: np.ndarray) -> Any:
        """Per coordinate."""
        a, b = ((z[:, None] if z.ndim == 1 else z) for z in (a, b))
        return self._mean((a - self._mean(a)) * (b - self._mean(b)))

    @cached_property
    def baseline(self) -> Any:
        """b, or what leave-one-out estimates; 0 where Y never varies."""
        kind = self.configuration.baseline
        if kind in ("mean", "loo"):
            return self._mean(self.c)
        if not kind.startswith("optimal"):
            return mpmath.mpf(self.configuration.baseline_value if kind == "constant" else 0)
        cross, spread = self._covariance(self.x, self.y), self._covariance(self.y, self.y)
        if not kind.endswith("coordinate"):
            cross, spread = cross.sum(keepdims=True), spread.sum(keepdims=True)
        return np.array([x / y if y else y for x, y in zip(cross, spread, strict=True)], object)

    @cached_property
    def mean(self) -> np.ndarray:
        return np.asarray(self._mean(self.x - self.baseline * self.y))

    def variance(self, samples: int = 1000) -> Any:
        """N times the trace of the covariance of the N-sequence estimate."""
        if self.configuration.baseline != "loo":
            g = self.x - self.baseline * self.y
            return self._covariance(g, g).sum()
        a = self.x - self.baseline * self.y - self._mean(self.y) * self.c[:, None]
        rest = self._covariance(self.c, self.c) * self._covariance(self.y, self.y)
        rest = rest + self._covariance(self.y, self.c) ** 2
        return (self._covariance(a, a) + rest / (self.configuration.group(samples) - 1)).sum()

    @cached_property
    def estimate(self) -> Any:
        return self._mean(self.e)

    @cached_property
    def estimate_variance(self) -> Any:
        return self._covariance(self.e, self.e)[0]
