"""Expected gradients named in the one vocabulary; wrong names must not fit."""

import numpy as np
import pytest

from klgrad.analysis.verdicts import FIELDS, probes, verdict
from klgrad.synth.configurations import parse
from klgrad.synth.enumeration import enumerate_configuration
from klgrad.synth.exact import future_gradient, token_forward_gradient, token_gradient, true_gradient

EXPECTED = {
    "k1-in-reward": ("sequence", "sequence"),
    "k1-in-loss": ("zero", "zero"),
    "k1-in-both": ("sequence", "sequence"),
    "k2-in-loss": ("token", "token"),
    "k2-in-reward": ("other", "other"),
    "k3-in-reward": ("other", "sequence - token-forward"),
    "k3-in-loss": ("token-forward", "token-forward"),
    "k3-in-both+rtg": ("sequence", "sequence"),
    "k3-straight-through-in-loss": ("token", "token"),
    "alpha(0.3)-in-loss": ("other", "0.3 token-forward"),
    "full-in-loss": ("token", "token"),
    "full-in-reward": ("future", "future"),
    "full-in-reward+token": ("zero", "zero"),
    "full-in-both+future": ("sequence", "sequence"),
    "k1-in-reward+divide=4": ("scaled-sequence", "0.25 sequence"),
    "k1-in-reward+token+divide=2": ("scaled-token", "0.5 token"),
    "alpha(-1)-in-loss": ("other", "-token-forward"),
    "k1-in-loss+length-mean": ("other", "other"),
    "abs-in-loss": ("other", "other"),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_verdicts_on_policy(name):
    found = verdict(parse(name))
    assert (found.name, found.phrase) == EXPECTED[name]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("k1-in-reward", "other"), ("k1-in-loss", "other"), ("k3-in-loss+token-ratio", "token-forward"),
        ("k3-in-both+token+token-ratio", "token"), ("k1-in-reward+prefix-ratio", "sequence"),
        ("k3-in-loss+prefix-ratio", "token-forward"), ("k3-in-both+token+sequence-ratio", "token"),
        ("full-in-loss+prefix-ratio", "token"), ("full-in-reward+prefix-ratio", "future"),
        ("k3-in-both+sequence-ratio", "sequence"), ("k1-in-loss+token-ratio", "zero"), ("full-in-loss", "token"),
    ],
)  # fmt: skip
def test_verdicts_off_policy(name, expected):
    assert verdict(parse(name), off_policy=True).name == expected


def test_the_phrase_says_whose_prefixes():
    assert verdict(parse("full-in-loss"), off_policy=True).phrase == "token on stale prefixes"
    assert verdict(parse("full-in-loss+prefix-ratio"), off_policy=True).phrase == "token"


@pytest.mark.parametrize("name", ["k3-in-reward", "full-in-reward", "k1-in-reward+divide=4"])
def test_coefficients_rebuild_the_enumerated_gradient(name):
    """Second route: the fields times the coefficients equal the enumerated expected gradient."""
    found = verdict(parse(name))
    for pair in probes():
        fields = [f(pair, [3])[0] for f in (true_gradient, token_gradient, token_forward_gradient)]
        rebuilt = sum(w * f for w, f in zip(found.coefficients, fields, strict=True))
        assert rebuilt == pytest.approx(enumerate_configuration(parse(name), pair, 3).mean, abs=1e-10)


def test_the_probes_tell_the_fields_apart():
    """Negative control: on the probes no field is close to another, nor to zero."""
    for pair in probes():
        fields = [f(pair, [4])[0] for f in (true_gradient, token_gradient, token_forward_gradient, future_gradient)]
        for i, a in enumerate(fields):
            assert np.linalg.norm(a) > 0.05
            for b in fields[:i]:
                assert np.linalg.norm(a - b) > 0.05
    assert len(FIELDS) == 3
