"""Recipes: a configuration with what libraries do to a whole batch, group or reply.

Written as configurations are, with further options: ``k1-in-reward+loo=8+token-mean``, ``k3-in-loss+geometric-ratio``.

- ``token-mean``: the batch's sum is divided by its number of tokens; exact for large batches (E g / E|y|).
- ``group-mean=G``: the baseline is the mean of a group of G, the sample itself included; exactly 1 - 1/G of
  leave-one-out, as ``C_i - mean(C) = (1 - 1/G) (C_i - mean of the others)``.
- ``group-std=G``: that, divided by the group's standard deviation (plus 1e-6). The penalty alone is normalised here,
  as in groups whose task rewards are equal. Enumerated over all groups, or sampled where there are too many.
- ``geometric-ratio``: a loss whose every token is multiplied by the live ``exp(mean_t log rho_t)``.
- ``truncated-ratio=c``: a loss whose every token is multiplied by the detached ``min(rho_t, c)``.
- ``clamp=c``: each token's penalty, its ratio included, is clipped to [-c, c]; autograd passes nothing where clipped.

On-policy all but ``group-std`` are sums of configurations, hence exact at any length; the last three are enumerated
or sampled off-policy. The clipping of the policy loss (PPO) is idle at the first update and not modelled.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from klgrad.synth.configurations import Configuration, parse, score_coefficients
from klgrad.synth.enumeration import log_probability, sequences
from klgrad.synth.estimators import Estimator, number
from klgrad.synth.exact import mean_length
from klgrad.synth.mixtures import Term, mixture_moments
from klgrad.synth.policies import PolicyPair

if TYPE_CHECKING:
    from jaxtyping import Float

OPTIONS = ("token-mean", "group-mean", "group-std", "geometric-ratio", "truncated-ratio", "clamp")
SAMPLES = 1 << 14
_STD_EPSILON = 1e-6
_MAX_SEQUENCES = 1 << 12
_MAX_GROUPS = 20_000
_CHUNK = 1 << 21  # entries of the tables that one chunk of sequences makes


@dataclass(frozen=True)
class Recipe:
    """A configuration and its batch coupling. Plain data; see the module for the options.

    Args:
        configuration: the per-sequence part.
        advantage: ``none``, ``group-mean`` or ``group-std``, over groups of ``group``.
        weight: ``none``, ``geometric`` or ``truncated`` (at ``cap``).
        clamp: the most that one token's penalty may count; infinite for none.
        token_mean: whether the batch's sum is divided by its tokens.

    Raises:
        ValueError: for options that cannot go together.
    """

    configuration: Configuration
    advantage: str = "none"
    group: int = 0
    weight: str = "none"
    cap: float = math.inf
    clamp: float = math.inf
    token_mean: bool = False

    def __post_init__(self) -> None:
        c = self.configuration
        if self.advantage != "none" and (c.placement != "reward" or c.baseline != "none"):
            raise ValueError(f"{self.advantage} is the baseline of a reward, the only one: {c} has no room for it")
        if self.advantage != "none" and self.group < 2:
            raise ValueError(f"{self.advantage}={self.group}: a group has 2 samples or more")
        if self.weight != "none" and (c.placement != "loss" or c.ratio != "none" or c.estimator.full):
            raise ValueError(f"{self.weight}-ratio is the only ratio of a sampled loss; {c} is none, or has one")
        if self.cap <= 0 or self.clamp <= 0:
            raise ValueError(f"the bound {number(min(self.cap, self.clamp))} of {c} must be positive")
        if math.isfinite(self.clamp) and (c.estimator.full or (c.placement == "both" and not self.live)):
            raise ValueError(
                f"clamp clips a sampled token's penalty in one place; {c} is in two, or of full vocabulary"
            )
        if math.isfinite(self.clamp) and c.placement == "loss" and c.ratio != "none":
            raise ValueError(f"clamp clips a loss with a live-token-ratio or none; {c} has another")
        if self.token_mean and c.aggregation != "sum":
            raise ValueError(f"token-mean divides a plain sum; {c} divides already")

    @property
    def live(self) -> bool:
        """Whether each token's penalty is differentiated together with its own importance ratio."""
        c = self.configuration
        return c.placement == "both" and c.credit == "token" and c.ratio == "token"

    def __str__(self) -> str:
        options = [str(self.configuration)]
        if self.advantage != "none":
            options.append(f"{self.advantage}={self.group}")
        if self.weight != "none":
            options.append(f"{self.weight}-ratio" + (f"={number(self.cap)}" if math.isfinite(self.cap) else ""))
        if math.isfinite(self.clamp):
            options.append(f"clamp={number(self.clamp)}")
        return "+".join(options + ["token-mean"] * self.token_mean)


Terms = Sequence[tuple[float, Recipe]]


def parse_recipe(text: str) -> Recipe:
    """The recipe of that name; every configuration is one.

    Raises:
        ValueError: as ``configurations.parse``, and for an option given twice or without its number.
    """
    head, *tail = re.split(r"\+(?!\s*[\d.])", text.strip())
    own: dict[str, str] = {}
    for option in tail:
        name, _, value = (piece.strip() for piece in option.partition("="))
        if name in OPTIONS:
            if name in own:
                raise ValueError(f"{text!r} gives {name} twice")
            own[name] = value
    rest = [option for option in tail if option.partition("=")[0].strip() not in OPTIONS]
    if "group-mean" in own and "group-std" in own:
        raise ValueError(f"{text!r} gives group-mean and group-std: one baseline at most")
    fields: dict[str, Any] = {"token_mean": "token-mean" in own}
    for name in ("group-mean", "group-std"):
        if name in own:
            fields |= {"advantage": name, "group": int(_number(name, own[name], text))}
    for name in ("geometric-ratio", "truncated-ratio"):
        if name in own:
            fields["weight"] = name.removesuffix("-ratio")
    if "truncated-ratio" in own:
        fields["cap"] = _number("truncated-ratio", own["truncated-ratio"], text)
    if "clamp" in own:
        fields["clamp"] = _number("clamp", own["clamp"], text)
    return Recipe(parse("+".join([head, *rest])), **fields)


def _number(name: str, value: str, whole: str) -> float:
    try:
        found = float(value)
    except ValueError:
        found = math.nan
    if not math.isfinite(found) or (name.startswith("group") and found != found // 1):
        kind = "a whole number" if name.startswith("group") else "a number"
        raise ValueError(f"{name}={value} in {whole!r} needs {kind}, as in {name}=8")
    return found


# ----------------------------------------------------------------------------------------- as sums of configurations


def _passing(estimator: Estimator, clamp: float, *, live: bool) -> Estimator:
    """The estimator as autograd sees it behind a clamp, where the ratio is 1.

    Detached (in a reward) the value is clipped. Differentiated with a live ratio, value and slope both count, and
    both are cut off where the clamp bites.
    """
    if not math.isfinite(clamp):
        return estimator

    def passes(delta: Any) -> Any:
        return np.abs(estimator.value(delta)) <= clamp

    def value(delta: Any) -> Any:
        if live:
            return np.where(passes(delta), estimator.value(delta), 0.0)
        return np.clip(estimator.value(delta), -clamp, clamp)

    def slope(delta: Any) -> Any:
        return np.where(passes(delta), estimator.slope(delta), 0.0)

    name = f"{estimator.name} within {number(clamp)}"
    return replace(estimator, name=name, value=value, slope=slope, unbiased=False, together=None)


def exact_terms(recipe: Recipe, *, on_policy: bool) -> list[Term] | None:
    """The recipe as a sum of configurations with the same expected gradient and variance; ``None`` if it is none."""
    c = recipe.configuration
    if recipe.advantage == "group-std":
        return None
    if not on_policy and (recipe.weight != "none" or math.isfinite(recipe.clamp)):
        return None
    live = recipe.live or recipe.weight == "geometric"
    c = replace(c, estimator=_passing(c.estimator, recipe.clamp, live=live))
    if recipe.advantage == "group-mean":
        return [Term(1 - 1 / recipe.group, replace(c, baseline="loo", baseline_value=float(recipe.group)))]
    if recipe.weight == "geometric":  # d/dtheta of exp(mean log rho) is the mean score
        return [Term(1.0, c), Term(1.0, replace(c, placement="reward"), power=1)]
    return [Term(min(recipe.cap, 1.0), c)]


# ------------------------------------------------------------------------------------------------ expected gradients


@dataclass(frozen=True, eq=False)
class Outcome:
    """Expected gradient ``mean [d]`` of a sum of recipes, and ``variance``, N times the trace of its covariance.

    ``method`` is ``exact``, ``enumeration`` or ``sampling``; ``noise`` is the standard error of the norm of a sampled
    mean, else 0.
    """

    mean: Float[np.ndarray, " d"]
    variance: float
    method: str
    noise: float = 0.0


def expected(terms: Terms, pair: PolicyPair, length: int, *, samples: int = SAMPLES, seed: int = 0) -> Outcome:
    """The expected gradient of a weighted sum of recipes under the pair's sampler, for large batches.

    Args:
        terms: weights and recipes.
        length: the horizon.
        samples: sequences to draw where neither the moments nor enumeration apply.
        seed: of that draw.

    Raises:
        ValueError: for no terms, or groups of different sizes.
    """
    if not terms:
        raise ValueError("no terms: give at least one weight and recipe")
    parts = [exact_terms(recipe, on_policy=pair.on_policy) for _, recipe in terms]
    known = [
        Term(weight * t.weight, t.configuration, t.power, recipe.token_mean)
        for (weight, recipe), part in zip(terms, parts, strict=True)
        for t in part or []
    ]
    if None not in parts and sum(t.configuration.baseline == "loo" for t in known) < 2:
        group = max(int(t.configuration.baseline_value) for t in known) or 1000
        found = mixture_moments(pair, known, [length], samples=group)
        return Outcome(found.mean[0], float(found.variance[0]), "exact")
    return _by_groups(terms, pair, length, samples, seed)


def _by_groups(terms: Terms, pair: PolicyPair, length: int, samples: int, seed: int) -> Outcome:
    """Over all multisets of sequences with their probabilities, or over drawn ones."""
    sizes = {_group(recipe) for _, recipe in terms} - {1}
    if len(sizes) > 1:
        raise ValueError(f"groups of {' and '.join(map(str, sorted(sizes)))} in one sum: give one size")
    size = max(sizes, default=1)
    if pair.automaton.vocabulary**length <= _MAX_SEQUENCES:
        every = sequences(pair.automaton, length)
        log_p = log_probability(every, pair.sampler)
        keep = log_p > -np.inf
        if math.comb(int(keep.sum()) + size - 1, size) <= _MAX_GROUPS:
            index, weight = _multisets(np.exp(log_p[keep]), size)
            drawn = (every.contexts[keep], every.tokens[keep], every.mask[keep])
            return _finish(*_unit_sums(terms, pair, drawn, index), weight, size, 0)
    units = max(samples // size, 2)
    drawn = _draw(pair, length, units * size, np.random.default_rng(seed))
    found = _unit_sums(terms, pair, drawn, np.arange(units * size).reshape(units, size))
    return _finish(*found, np.full(units, 1 / units), size, units)


def _group(recipe: Recipe) -> int:
    if recipe.advantage != "none":
        return recipe.group
    return int(recipe.configuration.baseline_value) if recipe.configuration.baseline == "loo" else 1


def _multisets(p: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """``[n, size]`` every multiset of sequences, and ``[n]`` its probability."""
    from itertools import combinations_with_replacement

    index = np.array(list(combinations_with_replacement(range(len(p)), size)))
    ways = np.full(len(index), math.lgamma(size + 1))
    run = np.ones(len(index))
    for k in range(1, size):  # divide by the factorial of every run of equal members
        run = np.where(index[:, k] == index[:, k - 1], run + 1, 1.0)
        ways -= np.log(run)
    return index, np.exp(ways + np.log(p)[index].sum(axis=1))


def _draw(pair: PolicyPair, length: int, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``[n, T]`` contexts, tokens and mask of sequences from the pair's sampler."""
    cumulative = np.cumsum(np.exp(pair.sampler), axis=1)
    contexts, tokens, mask = (np.zeros((n, length), kind) for kind in (np.intp, np.intp, bool))
    now = np.full(n, pair.automaton.start)
    for t in range(length):
        contexts[:, t], mask[:, t] = now, now != pair.automaton.end
        u = rng.random((n, 1)) * cumulative[now, -1:]
        tokens[:, t] = np.where(mask[:, t], (u >= cumulative[now]).sum(axis=1), 0)
        now = pair.automaton.next_context[now, tokens[:, t]]
    return contexts, tokens, mask


def _unit_sums(
    terms: Terms, pair: PolicyPair, drawn: tuple[np.ndarray, ...], index: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each group's sum of gradients ``[n, d]``, of terms with a token mean and of others, and its tokens ``[n]``."""
    contexts, tokens, mask = drawn
    total = {kind: np.zeros((len(index), pair.policy.parameters)) for kind in (True, False)}
    step = max(1, _CHUNK // (index.shape[1] * pair.policy.parameters))
    for weight, recipe in terms:
        x, y, c = _tables(recipe, pair, contexts, tokens, mask)
        for first in range(0, len(index), step):
            rows = slice(first, first + step)
            coupled = _coupled(recipe, x[index[rows]], y[index[rows]], c[index[rows]])
            total[recipe.token_mean][rows] += weight * coupled.sum(axis=1)
    return total[True], total[False], mask.sum(axis=1)[index].sum(axis=1).astype(float)


def _coupled(recipe: Recipe, x: np.ndarray, y: np.ndarray, c: np.ndarray) -> np.ndarray:
    """``[n, G, d]`` gradients within groups: ``(X - m Y) / s`` from X and Y ``[n, G, d]`` and C ``[n, G]``."""
    mean, size = c.mean(axis=1, keepdims=True), c.shape[1]
    if recipe.configuration.baseline == "loo":
        mean = (size * mean - c) / (size - 1)
    elif recipe.advantage == "none":
        mean = np.full_like(c, recipe.configuration.baseline_value)
    out = x - mean[..., None] * y
    if recipe.advantage == "group-std":
        out = out / (c.std(axis=1, ddof=1)[:, None, None] + _STD_EPSILON)
    return np.asarray(out)


def _tables(
    recipe: Recipe, pair: PolicyPair, contexts: np.ndarray, tokens: np.ndarray, mask: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``X [n, d]`` gradients at b = 0, ``Y [n, d]`` what a baseline multiplies, ``C [n]`` sums of values."""
    if recipe.configuration.baseline in ("mean", "optimal", "optimal-per-coordinate"):
        raise ValueError(f"{recipe}: only constant and leave-one-out baselines are enumerated")
    d = pair.policy.parameters
    x, y = np.empty((len(tokens), d)), np.empty((len(tokens), d))
    c = np.empty(len(tokens))
    full = recipe.configuration.estimator.full
    step = max(1, _CHUNK // (tokens.shape[1] * d * (pair.automaton.vocabulary if full else 1)))
    for first in range(0, len(tokens), step):
        rows = slice(first, first + step)
        at, token, real = contexts[rows], tokens[rows], mask[rows]
        scores = pair.policy.scores[at, token]
        tables = pair.policy.log_probs, pair.reference, pair.sampler
        log_probs, reference, behaviour = (np.where(real, table[at, token], 0.0) for table in tables)
        every = (pair.policy.log_probs[at], pair.reference[at]) if full else None
        zero, own, c[rows], vocab = token_weights(recipe, log_probs, reference, real, behaviour, every)
        x[rows], y[rows] = np.einsum("nt,ntd->nd", zero, scores), np.einsum("nt,ntd->nd", own, scores)
        if vocab is not None:
            x[rows] += np.einsum("ntv,ntvd->nd", vocab, pair.policy.scores[at])
    return x, y, c


def token_weights(
    recipe: Recipe,
    log_probs: np.ndarray,
    reference: np.ndarray,
    mask: np.ndarray,
    behaviour: np.ndarray,
    full: tuple[np.ndarray, np.ndarray] | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
    """One sequence's part of a recipe: weights ``[n, T]`` on its scores, those of a baseline, and C ``[n]``.

    And ``[n, T, V]`` weights on the scores of all tokens, of a full-vocabulary loss; else None.

    Args:
        log_probs, reference, behaviour: ``[n, T]`` of the sampled tokens.
        mask: ``[n, T]`` True for real tokens.
        full: ``[n, T, V]`` next-token log-probs of policy and reference, which full-vocabulary estimators need.
    """
    c = replace(recipe.configuration, baseline="none", baseline_value=0.0)
    est = c.estimator
    delta, log_rho = log_probs - reference, np.where(mask, log_probs - behaviour, 0.0)
    given: tuple[np.ndarray, ...] = (delta - log_rho if c.rollout_value else delta,)
    if full is not None:
        given = tuple(np.where(mask[..., None], every, 0.0) for every in full)
    values = np.where(mask, np.clip(est.value(*given), -recipe.clamp, recipe.clamp), 0.0)
    if recipe.weight == "none" and not (math.isfinite(recipe.clamp) and c.in_loss):
        if math.isfinite(recipe.clamp):
            c = replace(c, estimator=_passing(est, recipe.clamp, live=False))
        tables: dict[str, Any] = {"behaviour": behaviour}
        if full is not None:
            tables |= {"full_log_probs": full[0], "full_reference": full[1]}
        zero, vocab = score_coefficients(c, log_probs, reference, mask, **tables)
        one, _ = score_coefficients(c, log_probs, reference, mask, baseline=1.0, **tables)
        return zero, zero - one, values.sum(axis=1), vocab
    length = mask.sum(axis=1, keepdims=True)
    rho = np.exp(log_rho)
    if recipe.weight == "geometric":
        rho = np.exp(log_rho.sum(axis=1, keepdims=True) / length) * np.ones_like(rho)
    elif recipe.weight == "truncated":
        rho = np.minimum(rho, recipe.cap)
    elif not recipe.live:
        rho = np.ones_like(rho)
    k = np.where(mask, rho * est.value(delta), 0.0)
    passes = mask & (np.abs(k) <= recipe.clamp)
    weights = np.where(passes, rho * est.slope(delta), 0.0)
    if recipe.weight == "geometric":
        weights = weights + np.where(passes, k, 0.0).sum(axis=1, keepdims=True) / length
    elif recipe.live:
        weights = weights + np.where(passes, k, 0.0)
    divisor = length if c.aggregation == "length-mean" else c.divisor
    weights = np.where(mask, weights / divisor, 0.0)
    return weights, np.zeros_like(weights), values.sum(axis=1), None


def _finish(
    per_token: np.ndarray, plain: np.ndarray, tokens: np.ndarray, weight: np.ndarray, size: int, units: int
) -> Outcome:
    """Mean and variance over groups with their probabilities; a token mean by the delta method."""
    long = float(weight @ tokens) / size
    share = weight @ per_token / size / long
    off = (per_token - share * tokens[:, None]) / long + plain
    variance = float(weight @ ((off - weight @ off) ** 2).sum(axis=1)) / size
    noise = math.sqrt(variance / (units * size)) if units else 0.0
    return Outcome(share + weight @ plain / size, variance, "sampling" if units else "enumeration", noise)


def unit_of(terms: Terms, pair: PolicyPair, length: int) -> float:
    """What undoes a token mean, E|y| under the sampler; 1 where not all recipes have one."""
    if not all(recipe.token_mean for _, recipe in terms):
        return 1.0
    sampled = replace(pair, policy=replace(pair.policy, log_probs=pair.sampler), behaviour=None, reference=pair.sampler)
    return float(mean_length(sampled, [length])[0])
