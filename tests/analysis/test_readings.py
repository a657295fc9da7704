"""Readings: the field, the normaliser and the conditions, all from the engine."""

import pytest

from klgrad.analysis.readings import reading
from klgrad.analysis.recipes import parse_recipe

CLAMP = "no clamp is hit"
LENGTH = "all replies have the same length"
SPREAD = "every group has the same spread of penalised rewards"

# name, phrase, provided
EXPECTED = {
    "k1-in-reward": ("sequence", "sequence", ()),
    "k1-in-reward+sequence-ratio+loo=2+rollout-value": ("sequence", "sequence", ()),
    "k1-in-reward+rtg+token-mean": ("sequence", "sequence / E|y|", ()),
    "k1-in-reward+group-mean=4+token-mean": ("scaled-sequence", "0.75 sequence / E|y|", ()),
    "k1-in-reward+group-std=4": ("scaled-sequence", "0.75 sequence", (SPREAD,)),
    "k1-in-reward+length-mean": ("sequence", "sequence / T", (LENGTH,)),
    "k1-in-reward+group-std=4+length-mean": ("scaled-sequence", "0.75 sequence / T", (SPREAD, LENGTH)),
    "k1-in-reward+token+token-mean": ("token", "token / E|y|", ()),
    "k1-in-loss+token-mean": ("zero", "zero", ()),
    "k1-in-loss+length-mean": ("zero", "zero", (LENGTH,)),
    "k2-in-loss": ("token", "token", ()),
    "k2-in-loss+truncated-ratio=10": ("token", "token", ()),
    "k2-in-loss+live-token-ratio": ("other", "no known field", ()),
    "k3-in-loss": ("token-forward", "token-forward", ()),
    "k3-clamped(20,10)-in-loss+length-mean": ("token-forward", "token-forward / T", (CLAMP, LENGTH)),
    "k3-in-loss+live-token-ratio+clamp=10": ("token", "token", (CLAMP,)),
    "k3-in-loss+geometric-ratio": ("other", "0.25 sequence + 0.75 token-forward", (f"{LENGTH}, here T = 4",)),
    "k3-in-reward+loo=8+token-mean": ("other", "(sequence - token-forward) / E|y|", ()),
    "k3-in-reward+token": ("other", "token - token-forward", ()),
    "k2-in-reward": ("other", "no known field", ()),
    "abs-in-loss": ("other", "no known field", ()),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_readings(name):
    found = reading([(0.01, parse_recipe(name))])
    assert (found.name, found.phrase, found.provided) == EXPECTED[name]
    assert found.unbiased == EXPECTED[name][0].endswith("sequence")


@pytest.mark.parametrize(
    ("reward", "loss", "phrase"),
    [
        (1.0, 1.0, "sequence / E|y|"),
        (1.0, 2.0, "(0.5 sequence + 0.5 token-forward) / E|y|"),
        (2.0, 1.0, "(sequence - 0.5 token-forward) / E|y|"),
    ],
)
def test_two_places_are_read_together(reward, loss, phrase):
    """k3 in the reward and in the loss with one coefficient is the gradient, with two coefficients it is not (B11)."""
    names = ("k3-in-reward+token-mean", "k3-in-loss+token-mean")
    terms = [(0.001 * w, parse_recipe(n)) for w, n in zip((reward, loss), names, strict=True)]
    assert reading(terms).phrase == phrase


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("k2-in-loss+truncated-ratio=10", "token on stale prefixes, provided no ratio is truncated"),
        ("k3-in-loss+live-token-ratio", "token on stale prefixes"),
        ("k1-in-reward+prefix-ratio", "sequence"),
        ("k1-in-reward+sequence-ratio+rollout-value", "no known field"),
        ("k3-in-loss", "no known field"),
    ],
)
def test_readings_off_policy(name, says):
    assert str(reading([(1.0, parse_recipe(name))], off_policy=True)) == says


def test_a_verdict_that_rests_on_one_length_says_which():
    """A length mean beside a sum: at T = 4 the coefficients are to one another as 1 to 1/4."""
    names = ("k1-in-reward", "k2-in-loss+length-mean")
    found = reading([(0.01, parse_recipe(name)) for name in names])
    assert str(found) == f"sequence + 0.25 token, provided {LENGTH}, here T = 4"
    assert found.scaled == f"0.01 sequence + 0.0025 token, provided {LENGTH}, here T = 4"


def test_token_mean_and_length_mean_are_one_where_all_replies_have_the_same_length():
    names = ("k1-in-reward+token-mean", "k2-in-loss+length-mean")
    found = reading([(w, parse_recipe(name)) for w, name in zip((0.001, 0.01), names, strict=True)])
    assert found.scaled == f"(0.001 sequence + 0.01 token) / T, provided {LENGTH}"


def test_a_penalty_without_weight_has_no_reading():
    with pytest.raises(ValueError, match="no penalty to read"):
        reading([(0.0, parse_recipe("k1-in-reward"))])
