"""Configurations: estimator, placement and options, one complete recipe for a stochastic gradient.

For a sequence y drawn from mu, with token scores p_t, importance ratios rho_t = pi / mu and values c_u:

    g(y) = (1/D) [ R * sum over (t, u) in credit of omega(t, u) c_u p_t  -  R * b * sum_t omega(t) p_t
                   +  Lo * sum_t lambda_t w_t ]

Gradients are *of the penalty*: descending them reduces the KL. Names parse and print in one normal form,
``NAME[(args)]-in-PLACEMENT[+option[=value]]*``. Placement as in A Comedy of Estimators (arXiv 2512.21852),
section 2.2: in the reward the estimate is detached and multiplies scores, in the loss it is differentiated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from klgrad.synth.estimators import ESTIMATORS, Estimator, array_namespace, estimator, number, unknown

if TYPE_CHECKING:
    from klgrad.synth.policies import PolicyPair

PLACEMENTS = ("reward", "loss", "both")
CREDITS = ("whole", "rtg", "token", "future")
RATIOS = ("none", "token", "prefix", "sequence")
BASELINES = ("none", "constant", "mean", "optimal", "optimal-per-coordinate", "loo")
AGGREGATIONS = ("sum", "divide", "length-mean")
_LIVE = {"live-token-ratio": "token", "live-prefix-ratio": "rtg", "live-sequence-ratio": "whole"}

# option as written -> (what it sets, to what, whether it takes a value: "no", "may" or "must")
OPTIONS: dict[str, tuple[str, str, str]] = {
    **{name: ("credit", name, "no") for name in CREDITS},
    **{f"{name}-ratio": ("ratio", name, "no") for name in RATIOS[1:]},
    **{name: ("live", name, "no") for name in _LIVE},
    "b": ("baseline", "constant", "must"),
    "mean-baseline": ("baseline", "mean", "no"),
    "optimal-baseline": ("baseline", "optimal", "no"),
    "optimal-baseline-per-coordinate": ("baseline", "optimal-per-coordinate", "no"),
    "loo": ("baseline", "loo", "may"),
    "sum": ("aggregation", "sum", "no"),
    "divide": ("aggregation", "divide", "must"),
    "length-mean": ("aggregation", "length-mean", "no"),
    "rollout-value": ("rollout_value", "yes", "no"),
}


@dataclass(frozen=True)
class Configuration:
    """One recipe for a stochastic gradient. Plain data; see the module's formula.

    Args:
        estimator: what one token contributes.
        placement: ``reward``, ``loss`` or ``both``.
        credit: which pairs (t, u): ``whole`` (all), ``rtg`` (t <= u), ``token`` (t = u), ``future`` (t < u).
        ratio: omega: ``none``, ``token`` (rho_t), ``prefix`` (rho_1:max(t,u)), ``sequence`` (rho_1:T).
        baseline: b: ``none``, ``constant``, ``mean`` (E[C]), ``optimal``, ``optimal-per-coordinate``
            (exact constants), or ``loo`` (leave-one-out).
        baseline_value: b for ``constant``; the group size for ``loo`` (0: all N sequences).
        aggregation: D: ``sum`` (1), ``divide`` (a constant), ``length-mean`` (|y|).
        divisor: D for ``divide``.
        rollout_value: values frozen at rollout time, phi(log mu / pi_ref).

    Raises:
        ValueError: for options that cannot go together.
    """

    estimator: Estimator
    placement: str
    credit: str = "whole"
    ratio: str = "none"
    baseline: str = "none"
    baseline_value: float = 0.0
    aggregation: str = "sum"
    divisor: float = 1.0
    rollout_value: bool = False

    def __post_init__(self) -> None:
        for field, choices in (
            ("placement", PLACEMENTS),
            ("credit", CREDITS),
            ("ratio", RATIOS),
            ("baseline", BASELINES),
            ("aggregation", AGGREGATIONS),
        ):
            if getattr(self, field) not in choices:
                raise unknown(field, str(getattr(self, field)), list(choices))
        in_reward = [self.credit != "whole", self.baseline != "none", self.rollout_value]
        if self.placement == "loss" and any(in_reward):
            which = ("credit", "a baseline", "rollout-value")[in_reward.index(True)]
            raise ValueError(
                f"{which} belongs to the reward placement and {self.estimator}-in-loss has none: "
                f"write {self.estimator}-in-reward or -in-both, or drop the option"
            )
        size = self.baseline_value
        if self.baseline == "loo" and size != 0 and not (size >= 2 and size == size // 1):
            raise ValueError(f"loo={number(size)} must be a group size of 2 or more")
        if not math.isfinite(self.baseline_value):
            raise ValueError(f"baseline value {self.baseline_value} must be finite")
        if self.aggregation == "divide" and not 0 < self.divisor < math.inf:
            raise ValueError(f"divide={number(self.divisor)} must be positive and finite")
        if self.aggregation != "divide" and self.divisor != 1:
            raise ValueError(
                f"a divisor of {number(self.divisor)} needs the aggregation 'divide', not {self.aggregation!r}"
            )
        if self.rollout_value and self.estimator.full:
            raise ValueError("rollout-value freezes a sampled token's log-ratio; a full-vocabulary estimator has none")

    @property
    def in_reward(self) -> bool:
        """R = 1."""
        return self.placement != "loss"

    @property
    def in_loss(self) -> bool:
        """Lo = 1."""
        return self.placement != "reward"

    def __str__(self) -> str:
        options = []
        if self.credit != "whole":
            options.append(self.credit)
        if self.ratio != "none":
            options.append(f"{self.ratio}-ratio")
        if self.baseline == "constant":
            options.append(f"b={number(self.baseline_value)}")
        elif self.baseline == "loo":
            options.append("loo" if self.baseline_value == 0 else f"loo={number(self.baseline_value)}")
        elif self.baseline != "none":
            options.append(self.baseline.replace("optimal", "optimal-baseline").replace("mean", "mean-baseline"))
        if self.aggregation == "divide":
            options.append(f"divide={number(self.divisor)}")
        elif self.aggregation == "length-mean":
            options.append("length-mean")
        if self.rollout_value:
            options.append("rollout-value")
        return "+".join([f"{self.estimator}-in-{self.placement}", *options])

    def group(self, samples: int) -> int:
        """How many sequences share one leave-one-out baseline.

        Raises:
            ValueError: when the group is larger than the samples or does not divide them.
        """
        size = int(self.baseline_value) or samples
        if self.baseline == "loo" and (size < 2 or samples % size):
            raise ValueError(
                f"{self}: {samples} samples cannot be split into groups of {size}: "
                "give samples in a multiple of the group"
            )
        return size

    def cautions(self, pair: PolicyPair | None = None) -> list[str]:
        """Sentences about options that are allowed and probably not what is meant."""
        found = []
        if pair is not None and self.ratio != "none":
            found += [f"{self}: {gap}, so no ratio makes up for it" for gap in pair.sampling_gaps()[:1]]
        if (
            self.credit == "future"
            and self.placement == "both"
            and self.estimator.consistent
            and not self.estimator.full
        ):
            found.append(
                f"{self}: the own-token term of the reward is left out, "
                "which only a full-vocabulary or a straight-through loss makes up for"
            )
        if self.baseline != "none" and pair is not None:
            if not pair.on_policy and self.ratio == "none":
                found.append(f"{self}: off-policy without a ratio, a baseline shifts the expected gradient")
            if self.aggregation == "length-mean" and pair.automaton.end >= 0:
                found.append(f"{self}: with a length mean and random length, a baseline shifts the expected gradient")
        return found


def _option(text: str, whole: str) -> tuple[str, str, float | None]:
    name, equals, value = (piece.strip() for piece in text.partition("="))
    if name not in OPTIONS:
        raise unknown("option", name, list(OPTIONS))
    kind, choice, takes = OPTIONS[name]
    if (equals and takes == "no") or (not equals and takes == "must"):
        raise ValueError(f"option {text!r} in {whole!r}: {name} takes {'a value' if takes == 'must' else 'no value'}")
    if not equals:
        return kind, choice, None
    try:
        given = float(value)
    except ValueError:
        given = math.nan
    if not math.isfinite(given):
        raise ValueError(f"{name}={value} in {whole!r} is not a finite number")
    return kind, choice, given


def parse(text: str) -> Configuration:
    """The configuration of that name: ``k1-in-reward``, ``k3-in-both+rtg+prefix-ratio``, ``alpha(0.75)-in-reward+loo``.

    Raises:
        ValueError: for a name outside the grammar, an option that is unknown, given twice, or impossible there.
    """
    head, *tail = re.split(r"\+(?!\s*[\d.])", text.strip())  # a plus before a digit belongs to a number
    match = re.fullmatch(r"(.+)-in-([^()]+)", head.strip())
    if match is None:
        raise ValueError(
            f"{text!r} is no configuration: write ESTIMATOR-in-PLACEMENT[+option], "
            f"with an estimator of {', '.join(ESTIMATORS)} and a placement of {', '.join(PLACEMENTS)}"
        )
    fields: dict[str, Any] = {}
    spelled: dict[str, str] = {}

    def put(kind: str, choice: Any, option: str) -> None:
        if kind in fields:
            raise ValueError(f"{text!r} gives {spelled[kind]!r} and {option!r}: one {kind} at most")
        fields[kind], spelled[kind] = choice, option

    placement = match[2]
    for option in tail:
        kind, choice, given = _option(option, text)
        if kind == "live":
            if placement != "loss":
                raise ValueError(f"{option!r} in {text!r} is a way to write a loss: use it with -in-loss")
            put("ratio", choice.removeprefix("live-").removesuffix("-ratio"), option)
            put("credit", _LIVE[choice], option)
        elif kind == "rollout_value":
            put(kind, True, option)
        else:
            put(kind, choice, option)
        if given is not None:
            if choice == "loo" and given == 0:
                raise ValueError("loo=0 must be a group size of 2 or more")
            fields["divisor" if kind == "aggregation" else "baseline_value"] = given
    if any(option.strip() in _LIVE for option in tail):
        placement = "both"
    elif placement == "loss" and "credit" in fields:
        raise ValueError(
            f"credit {fields['credit']!r} belongs to the reward placement and {text!r} has none: "
            "write -in-reward or -in-both, or drop the option"
        )
    return Configuration(estimator(match[1]), placement, **fields)


def check_names(configurations: Iterable[Configuration]) -> None:
    """Raise ValueError where two estimators have one name: a table goes by names and could not tell them apart."""
    named: dict[str, Estimator] = {}
    for configuration in configurations:
        if named.setdefault(configuration.estimator.name, configuration.estimator) != configuration.estimator:
            raise ValueError(
                f"two estimators with other functions are named {configuration.estimator.name!r}: "
                "give each a name of its own, or use one object for both"
            )


def score_coefficients(
    configuration: Configuration,
    log_probs: Any,
    reference: Any,
    mask: Any,
    *,
    behaviour: Any = None,
    full_log_probs: Any = None,
    full_reference: Any = None,
    baseline: Any = 0.0,
) -> tuple[Any, Any]:
    """A batch's gradient as weights on scores: ``g = sum_t token_t p_t + sum_t,v vocab_tv p_tv`` per sequence.

    The bridge between the worlds: the exact and sampled engines take moments of the weighted scores, and a
    language model gets the same gradient from ``(token.detach() * log_probs).sum()``. numpy or torch alike.

    Args:
        log_probs: ``[B, T]`` policy log-probs of the sampled tokens; anything where ``mask`` is False.
        reference: ``[B, T]`` reference log-probs of the same tokens.
        mask: ``[B, T]`` True for real tokens, which come first.
        behaviour: ``[B, T]`` log-probs of the policy that sampled; ``None`` on-policy.
        full_log_probs: ``[B, T, V]`` policy next-token log-probs, for full-vocabulary estimators.
        full_reference: ``[B, T, V]`` the reference's.
        baseline: b, a constant; for ``loo`` it is computed from the batch (in groups of consecutive rows).

    Returns:
        ``token [B, T]``, zero where masked, and ``vocab [B, T, V]`` or ``None``.

    Raises:
        ValueError: when a full-vocabulary estimator is not given the full log-probs.
    """
    xp = array_namespace(log_probs)
    est = configuration.estimator
    zero = xp.zeros_like(log_probs)
    behaviour = log_probs if behaviour is None else behaviour
    delta = xp.where(mask, log_probs - reference, zero)
    log_rho = xp.where(mask, log_probs - behaviour, zero)
    if est.full:
        if full_log_probs is None or full_reference is None:
            raise ValueError(f"{configuration} needs the full next-token log-probs of policy and reference")
        full_log_probs, full_reference = (
            xp.where(mask[..., None], full, xp.zeros_like(full)) for full in (full_log_probs, full_reference)
        )
        values = est.value(full_log_probs, full_reference)  # every value is 0 at the reference, hence on padding
    else:
        values = est.value(delta - log_rho if configuration.rollout_value else delta)
    own, before = importance_ratios(configuration.ratio, log_rho, xp)  # omega(t, t), and the ratio ahead of token t
    inside = before if est.full and configuration.ratio == "prefix" else own
    token = zero
    if configuration.in_reward:
        token = credit_sums(configuration, values, own, inside, xp)
        total = xp.sum(values, axis=1, keepdims=True)
        if configuration.baseline == "loo":
            grouped = xp.reshape(total, (-1, configuration.group(total.shape[0])))
            mean = (xp.sum(grouped, axis=1, keepdims=True) - grouped) / (grouped.shape[1] - 1)
            baseline = xp.reshape(mean, total.shape)
        token = token - baseline * own
    vocab = None
    if configuration.in_loss and not est.full:
        token = token + loss_weights(configuration, own, before) * est.slope(delta)
    elif configuration.in_loss:
        vocab = xp.where(mask, loss_weights(configuration, own, before), zero)[..., None] * est.slope(
            full_log_probs, full_reference
        )
    divisor: Any = configuration.divisor
    if configuration.aggregation == "length-mean":
        divisor = xp.sum(xp.where(mask, xp.ones_like(log_probs), zero), axis=1, keepdims=True)
    token = xp.where(mask, token / divisor, zero)
    return token, None if vocab is None else vocab / (divisor[..., None] if hasattr(divisor, "shape") else divisor)


def importance_ratios(ratio: str, log_rho: Any, xp: Any) -> tuple[Any, Any]:
    """``[B, T]`` omega(t, t), and the ratio ahead of token t (rho_1:t-1 for ``prefix``), from ``log rho [B, T]``."""
    if ratio == "none":
        return xp.ones_like(log_rho), xp.ones_like(log_rho)
    if ratio == "token":
        return xp.exp(log_rho), xp.ones_like(log_rho)
    if ratio == "sequence":
        whole = xp.exp(xp.sum(log_rho, axis=1, keepdims=True)) * xp.ones_like(log_rho)
        return whole, whole
    running = _cumulative(log_rho, xp)
    return xp.exp(running), xp.exp(running - log_rho)


def loss_weights(configuration: Configuration, own: Any, before: Any) -> Any:
    """``[B, T]`` lambda_t: omega(t, t); full-vocabulary terms do not depend on the sampled token, so 1 or rho_1:t-1."""
    return before if configuration.estimator.full and configuration.ratio in ("token", "prefix") else own


def _cumulative(x: Any, xp: Any) -> Any:
    return xp.cumulative_sum(x, axis=1) if hasattr(xp, "cumulative_sum") else xp.cumsum(x, axis=1)


def credit_sums(configuration: Configuration, values: Any, own: Any, inside: Any, xp: Any) -> Any:
    """``[B, T]`` sum over u in credit of omega(t, u) c_u, for every t."""
    credit, prefix = configuration.credit, configuration.ratio == "prefix"
    future_terms = inside * values if prefix else values  # omega = rho_1:max(t,u) follows u where u > t
    running = _cumulative(future_terms, xp)
    future = running[:, -1:] - running
    if not prefix:
        future = own * future
    parts: dict[str, Callable[[], Any]] = {
        "whole": lambda: own * _cumulative(values, xp) + future,
        "rtg": lambda: own * values + future,
        "token": lambda: own * values,
        "future": lambda: future,
    }
    return parts[credit]()
