"""How noisy against the best unbiased configuration: which those are, and that none is quieter than the best."""

import pytest

from klgrad.analysis import check
from klgrad.analysis.checking import variance
from klgrad.analysis.checking.models import LENGTHS, models
from klgrad.synth.configurations import parse
from klgrad.synth.moments import moments

# written down by hand, from theory: what the derived list must have, and what it must not
UNBIASED = ["k1-in-reward", "k1-in-both+rtg", "k3-in-both", "alpha(best)-in-both+rtg+optimal-baseline", "full-in-both"]
UNBIASED += ["full-in-both+future+optimal-baseline", "k3-straight-through-in-both+future"]
BIASED = ["k1-in-loss", "k3-in-loss", "k3-in-reward", "full-in-reward", "k1-in-reward+future", "k2-in-both"]
ELSEWHERE = ["k3-clamped(20,10)-in-both"]  # its clamp is not reached on the probe pair


def test_what_is_unbiased_is_found_and_not_listed():
    found = set(variance.every_unbiased())
    assert found >= set(map(parse, UNBIASED))
    assert not found & set(map(parse, [*BIASED, *ELSEWHERE]))


@pytest.mark.parametrize("name", ["full-in-both+optimal-baseline", "full-in-both+rtg+optimal-baseline", *UNBIASED])
def test_none_is_quieter_than_the_best(name):
    for m in models(LENGTHS, 2):
        each, best = variance._best(m)
        (own,) = moments(m.pair, [parse(name)], [m.length])
        assert each[best] <= own.covariance[0] * (1 + 1e-9) + 1e-15


def test_at_one_token_the_best_has_no_noise_and_no_multiple_of_it_is_told():
    found = check("k1-in-both", sections=("gradient", "variance")).variance["both"]
    assert found["relative_to_best_unbiased"][1] is None
    assert found["relative_to_best_unbiased"][8] > 10


def test_the_future_term_has_no_drift_to_tell_of():
    """At the last token it is 0, and no share of that is off."""
    assert not [f for f in check("full-in-reward", target="sequence").findings if "drifted" in f.message]
