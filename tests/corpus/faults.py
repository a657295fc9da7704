"""How a wrong function shows on the oracle's worlds: each fault is one question, answered by enumeration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from corpus.entries import Entry
from corpus.oracle import Given, World, arguments, call, fields, gradient, world

CLOSE = 1e-6  # relative: central differences err by 1e-9, float32 inside by less in a sum of a few terms
APART = 5e-3  # a wrong field is at least this far from the wanted one
ROUNDED = 1e-5  # more than float32 and less than half precision rounds


def distance(entry: Entry, w: World, given: Given | None = None, weight: torch.Tensor | None = None) -> float:
    """Relative distance of the expected gradient from the nearest field that the target names; inf where NaN."""
    got = gradient(entry, w, given or Given())
    each = [float((got - field).norm() / field.norm()) for field in fields(w, entry.target, weight)]
    return min(d if d == d else float("inf") for d in each)


def here(entry: Entry, layout: str) -> World:
    """The layout's world; a smaller one where groups of sequences are formed."""
    return world(layout, 3 if entry.group == 1 else 2)


def field(entry: Entry) -> bool:
    """Another field, where all tokens are real or padding follows."""
    return max(distance(entry, here(entry, layout)) for layout in ("fixed", "ends")) > APART


def holes(entry: Entry) -> bool:
    """The right field until a token of the environment stands between the policy's."""
    return distance(entry, world("fixed")) < CLOSE and distance(entry, world("holes")) > APART


def padding(entry: Entry) -> bool:
    """The right field until replies differ in length."""
    return distance(entry, world("fixed")) < CLOSE and distance(entry, world("ends")) > APART


def empty(entry: Entry) -> bool:
    """A reply without tokens is more than a row of zeros."""
    w = world("ends")
    nothing = replace(w, **{n: torch.zeros_like(getattr(w, n)[:1]) for n in ("mask", "real")}, **_row(w))
    both = replace(w, **{n: torch.cat([getattr(w, n), getattr(nothing, n)]) for n in _PER_ROW})
    out = call(entry, both)
    if out.ndim:
        last = out[-1] if out.ndim == 1 else torch.zeros(())
        return bool(last != 0 or not _same(out[:-1], call(entry, w), w))
    if not torch.isfinite(out):
        return True
    slope, alone = (_slope(entry, each) for each in (both, w))
    along = float((slope * alone).sum() / (slope.norm() * alone.norm()))
    return not along > 1 - CLOSE


_PER_ROW = ("contexts", "tokens", "mask", "real", "others")


def _row(w: World) -> dict[str, torch.Tensor]:
    return {n: getattr(w, n)[:1] for n in ("contexts", "tokens", "others")}


def _same(a: torch.Tensor, b: torch.Tensor, w: World) -> bool:
    real = w.mask if a.ndim == 2 else torch.ones(len(a), dtype=torch.bool)
    return bool(torch.allclose(a[real], b[real], rtol=CLOSE, atol=1e-12))


def _slope(entry: Entry, w: World) -> torch.Tensor:
    return torch.autograd.grad(call(entry, w), w.theta)[0]


def beta(entry: Entry) -> bool:
    """Twice the coefficient is not twice the penalty; no field is asked."""
    w = here(entry, "fixed")
    one, two, zero = (gradient(entry, w, Given(beta=b)) for b in (1.0, 2.0, 0.0))
    return bool((two - zero - 2 * (one - zero)).norm() > APART * one.norm() or (one - zero).norm() < APART * one.norm())


def beta_zero(entry: Entry) -> bool:
    """The right field, and NaN where the coefficient is 0 and the KL infinite."""
    w = here(entry, "fixed")
    reference = w.reference.clone()
    reference[0, 0] = -torch.inf
    out_of_reach, none = replace(w, reference=reference), Given(beta=0.0)
    parts = call(entry, out_of_reach, none), gradient(entry, out_of_reach, none)
    return distance(entry, w) < CLOSE and not all(bool(torch.isfinite(part).all()) for part in parts)


def reward(entry: Entry) -> bool:
    """The right field without rewards, and another one beside them."""
    w = here(entry, "fixed")
    with_kl, without = (gradient(entry, w, Given(rewards=True, beta=b)) for b in (1.0, 0.0))
    off = min(float((with_kl - without - f).norm() / f.norm()) for f in fields(w, entry.target))
    return off > APART


def reward_lost(entry: Entry) -> bool:
    """The rewards' own gradient is not theirs."""
    w = world("ends")
    got = gradient(entry, w, Given(rewards=True, beta=0.0))
    paid = (w.probability.detach() * arguments(entry, w, Given(rewards=True), "bool")["rewards"] * w.score).sum()
    wanted = -torch.autograd.grad(paid, w.theta)[0]
    return bool((got - wanted).norm() > APART * wanted.norm())


def rounding(entry: Entry) -> bool:
    """Near the field, and further than single precision is."""
    return ROUNDED < distance(entry, world("fixed")) < 0.2


def drift(entry: Entry) -> bool:
    """The right field near the reference, and another one far from it."""
    near, far = (distance(entry, world("fixed", spread=s)) for s in (0.05, 6.0))
    return near < CLOSE and far > APART


def stale(entry: Entry) -> bool:
    """The right field with the sampler near the policy, and another one where the ratio passes the cap."""
    w = world("fixed")
    found = []
    for step in (0.02, 4.0):
        mu = (w.theta + step * torch.linspace(-1, 1, w.theta.numel()).reshape(w.theta.shape)).detach()
        found.append(distance(entry, w, Given(mu=mu), w.at(mu).probability.detach()))
    return found[0] < found[1] / 10 and found[1] > APART


def random(entry: Entry) -> bool:
    """Another result the second time."""
    w = world("fixed")
    return not torch.equal(call(entry, w), call(entry, w))


def in_place(entry: Entry) -> bool:
    """An argument is another one afterwards."""
    made = arguments(entry, world("fixed"), Given(), "bool")
    before = {n: v.clone() for n, v in made.items()}
    entry.function(**made)
    return not all(torch.equal(before[n], v) for n, v in made.items())


def support(entry: Entry) -> bool:
    """The right field, and a finite number where the KL is infinite."""
    w = world("fixed")
    reference = w.reference.clone()
    reference[0, 0] = -torch.inf
    return distance(entry, w) < CLOSE and bool(torch.isfinite(call(entry, replace(w, reference=reference))).all())


def summed(entry: Entry) -> bool:
    """The right field of one row, and twice as much of two."""
    w = world("fixed")
    twice = replace(w, **{n: torch.cat([getattr(w, n)] * 2) for n in _PER_ROW})
    return distance(entry, w) < CLOSE and torch.allclose(_slope(entry, twice), 2 * _slope(entry, w))


def placement(entry: Entry) -> bool:
    """The right field in one placement and another one in another, and none is asked for."""
    off = [distance(replace(entry, placement=where), world("ends")) for where in ("reward", "loss", "both")]
    return entry.placement is None and min(off) < CLOSE and max(off) > APART


FAULTS: dict[str, Callable[[Entry], bool]] = {
    "field": field, "holes": holes, "padding": padding, "empty": empty, "beta": beta, "beta zero": beta_zero,
    "reward": reward, "reward lost": reward_lost, "rounding": rounding, "drift": drift, "stale": stale,
    "random": random, "in place": in_place, "support": support, "sum": summed, "placement": placement,
}  # fmt: skip


def sound(entry: Entry) -> list[str]:
    """What the oracle holds against a function that is said to be right: nothing, of everything that applies."""
    found = [
        layout
        for layout in ("fixed", "ends", "left", "holes")[: 4 if entry.group == 1 else 3]
        if distance(entry, here(entry, layout)) > CLOSE
    ]
    given = arguments(entry, here(entry, "fixed"), Given(), "bool")
    coefficient = any(n in given for n in ("beta", "kl_coef", "kl_ctl", "kl_loss_coef"))
    if coefficient:
        found += [name for name in ("beta", "beta zero") if FAULTS[name](entry)]
    if coefficient and any(n in given for n in ("rewards", "advantages", "token_level_rewards")):
        found += ["reward"] * reward(entry)
    return found + ["empty"] * (entry.group == 1 and "mask" in str(given.keys()) and empty(entry))
