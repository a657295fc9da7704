"""The digits that are promised, and that the table sees digits that are lost."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from klgrad.analysis import digits
from klgrad.cli import main
from klgrad.synth import estimators, exact
from klgrad.synth.automata import markov
from klgrad.synth.estimators import ESTIMATORS
from klgrad.synth.policies import PolicyPair, log_softmax, tabular


def lost(lines):
    return [line for line in lines if not line.kept]


def test_every_estimator_keeps_its_digits_in_every_arithmetic():
    lines = list(digits.estimator_lines())
    assert lost(lines) == []
    assert {line.arithmetic for line in lines} == {
        f"{x} {y}" for x in ("numpy", "torch") for y in ("float64", "float32")
    }
    seen = {line.quantity for line in lines}
    assert seen >= {f"{name} {kind}" for name in ESTIMATORS for kind in ("value", "slope")}
    assert seen >= {f"{name} together" for name, entry in ESTIMATORS.items() if entry.together}


@pytest.mark.parametrize("case", [*digits.cases()], ids=lambda case: case.where)
def test_pairs_keep_theirs(case):
    lines = list(digits.pair_lines([case]))
    assert lost(lines) == []
    assert {line.quantity for line in lines} >= {"KL", "forward KL", "entropy", "true gradient", "mean", "variance"}


def test_what_is_open_is_little_where_log_ratios_are_ordinary():
    """Else the table would promise nothing."""
    (case,) = [
        c for c in digits.cases() if c.where.startswith("1 from") and c.behaviour is None and c.automaton.end < 0
    ]
    assert max(line.open for line in digits.pair_lines([case])) < 1e-12


def plain_jensen_shannon(delta):
    xp = estimators.array_namespace(delta)
    middle = xp.logaddexp(xp.zeros_like(delta), -delta) - np.log(2)
    return (-xp.exp(-delta) * (delta + middle) - middle) / 2


@pytest.mark.parametrize(
    ("name", "kind", "wrong", "where"),
    [
        ("jensen-shannon", "value", plain_jensen_shannon, "near"),
        ("k3", "value", lambda delta: np.exp(-np.asarray(delta)) - 1 + np.asarray(delta), "near"),
        ("k3", "together", lambda delta: estimators._k3(delta) + estimators._k3_slope(delta), "far"),
        ("k3", "slope", lambda delta: 1.000001 - np.exp(-np.asarray(delta)), "ordinary"),
    ],
)
def test_a_formula_that_loses_digits_is_seen(monkeypatch, name, kind, wrong, where):
    entry = ESTIMATORS[name]._replace(**{kind: wrong})
    monkeypatch.setitem(estimators.ESTIMATORS, name, entry)
    monkeypatch.setattr(digits, "ESTIMATORS", {name: entry})
    estimators._bound.cache_clear()
    try:
        bad = lost(digits.estimator_lines())
    finally:
        estimators._bound.cache_clear()
    assert {"numpy float64"} <= {line.arithmetic for line in bad}
    assert (f"{name} {kind}", where) in {line[:2] for line in bad}


def test_the_plain_sum_of_log_ratios_would_be_seen(monkeypatch):
    """sum pi delta near the reference: the old way to a KL."""
    case = next(c for c in digits.cases() if c.where.startswith("1e-08"))
    monkeypatch.setattr(exact, "kl_rows", lambda p, q: (np.exp(p) * (p - q)).sum(axis=1))
    assert {"KL", "forward KL"} <= {line.quantity for line in lost(digits.pair_lines([case]))}


@pytest.mark.parametrize("distance", [0.0, 1e-16, 1e-12, 1e-9, 1e-8, 1e-6, 1e-3])
def test_a_kl_is_never_negative(distance):
    rng, automaton = np.random.default_rng(3), markov(5, 1)
    for _ in range(50):
        logits, noise = rng.normal(size=(2, *automaton.next_context.shape))
        pair = PolicyPair(automaton, tabular(automaton, logits), log_softmax(logits + distance * noise))
        assert exact.kl(pair, [1, 7])[0] >= 0
        assert exact.forward_kl(pair, [1, 7])[0] >= 0
        assert exact.values(pair, 3)[0].min() >= 0


def test_the_command_prints_the_table_and_ends_well():
    done = CliRunner().invoke(main, ["digits", "--json"])
    assert done.exit_code == 0
    lines = json.loads(done.stdout)
    assert all(line["kept"] for line in lines)
    assert {"jensen-shannon value", "variance"} <= {line["quantity"] for line in lines}
