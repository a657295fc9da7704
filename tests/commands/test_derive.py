"""`klgrad derive`, as a user meets it."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from klgrad.analysis.derivations import DERIVATIONS, Derivation, Step
from klgrad.cli import main


def run(*words):
    return CliRunner().invoke(main, ["derive", *words])


def test_without_a_name_it_lists():
    done = run()
    assert done.exit_code == 0
    listed = [line.split()[0] for line in done.stdout.splitlines()[2:]]
    assert listed == list(DERIVATIONS)
    assert [each["name"] for each in json.loads(run("--json").stdout)] == list(DERIVATIONS)


@pytest.mark.parametrize("name", DERIVATIONS)
def test_every_derivation_is_told(name):
    done = run(name)
    assert done.exit_code == 0, done.output
    assert DERIVATIONS[name].title.split()[0] in done.stdout
    assert "steps hold; the largest residual is" in done.stdout


def test_placement_pair_lengths_and_format():
    done = run("k3", "--placement", "loss", "--preset", "near", "--lengths", "1,2", "--format", "markdown")
    assert done.exit_code == 0, done.output
    assert "In the loss" in done.stdout
    assert "In the reward" not in done.stdout
    assert "pair near, T = 1, 2" in done.stdout
    assert "$$" in done.stdout
    assert run("k3", "--format", "html").stdout.startswith("<!doctype html>")
    assert run("k3", "--format", "latex").stdout.startswith(r"\documentclass")


def test_json_has_both_sides():
    found = json.loads(run("handbook", "--json").stdout)
    assert found["pair"] == "handbook"
    first = found["steps"][0]["sides"][0]
    assert (first["left"], first["right"]) == (pytest.approx(0.021007, abs=5e-7), 0.021007)


def test_a_behaviour_policy_is_left_aside_aloud():
    done = run("k1", "--preset", "stale")
    assert done.exit_code == 0
    assert "the behaviour policy is left aside" in done.stderr
    assert run("off-policy", "--preset", "near", "--behaviour", "uniform").exit_code == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["k4"], "unknown derivation 'k4'"),
        (["k3", "--placement", "los"], "no steps for the placement 'los': there is reward, loss, both"),
        (["handbook", "--preset", "near"], "about the numbers of its own pair"),
        (["off-policy", "--preset", "near"], "needs a behaviour policy"),
        (["k3", "--preset", ""], "unknown preset ''"),
        (["k3", "--lengths", "40"], "take a shorter length"),
        (["k3", "--pair", "nowhere.npz"], "nowhere.npz does not exist"),
    ],
)
def test_bad_use_is_one_sentence(words, sentence):
    done = run(*words)
    assert done.exit_code == 2
    assert sentence in done.stderr
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1


def test_a_step_that_does_not_hold_stops_with_exit_code_1(monkeypatch):
    step = Step("a", "b", "because", (lambda m: m.exact("kl"), lambda m: np.array(0.0)))
    monkeypatch.setitem(DERIVATIONS, "wrong", Derivation("wrong", "a wrong one", "here", (step,), ""))
    done = run("wrong")
    assert done.exit_code == 1
    assert "wrong on far at T = 3: the sides differ in a = b" in done.stderr
    assert done.stdout == ""


@pytest.fixture
def close(tmp_path):
    """Policy logits (0, 0.5), the reference's 1e-4 from them."""
    path = tmp_path / "close.npz"
    rows = {"policy_logits": [[0.0, 0.5]], "reference_logits": [[1e-4, 0.5]]}
    np.savez(path, next_context=[[0, 0]], start=0, end=-1, **rows)
    return ["--pair", str(path)]


@pytest.mark.parametrize("name", [name for name, d in DERIVATIONS.items() if not (d.off_policy or d.fixed)])
def test_derivations_hold_next_to_the_reference(name, close):
    done = run(name, *close, "--lengths", "1,3")
    assert done.exit_code == 0, done.output
    assert "steps hold" in done.stdout


@pytest.mark.parametrize("formula", ["r*log(r)-(r-1)", "r - 1 - log(r)", "(r-1)*log(r)"])
def test_formulas_hold_next_to_the_reference(formula, close):
    done = run("--phi", formula, *close, "--lengths", "1,3")
    assert done.exit_code == 0, done.output


def test_a_step_beyond_double_precision_says_so_and_stops_nothing(tmp_path):
    path = tmp_path / "at.npz"
    np.savez(path, next_context=[[0, 0]], start=0, end=-1, policy_logits=[[0.0, 0.5]], reference_logits=[[0.0, 0.5]])
    done = run("k1", "--pair", str(path))
    assert done.exit_code == 0, done.output
    assert "cannot be told" in done.stdout
    sides = [
        side for step in json.loads(run("k1", "--pair", str(path), "--json").stdout)["steps"] for side in step["sides"]
    ]
    assert any("cannot be told" in side["untold"] for side in sides)


def test_a_formula_past_the_largest_double_is_one_sentence(tmp_path):
    path = tmp_path / "apart.npz"
    np.savez(path, next_context=[[0, 0]], start=0, end=-1, policy_logits=[[9.0, 0.0]], reference_logits=[[0.0, 9.0]])
    assert run("--phi", "exp(r)", "--pair", str(path), "--placement", "loss").stderr.count("which this pair meets") == 1
    done = run("--phi", "exp(r)", "--pair", str(path))
    assert done.exit_code == 1
    assert "exp(r) is inf in double precision at r = 8103, which this pair meets" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_an_estimator_of_ones_own():
    done = run("--phi", "r - 1 - log(r)", "--preset", "near")
    assert done.exit_code == 0, done.output
    assert "the loss gives ∇KL_t(q‖π) and the reward ∇KL_t(π‖q) - ∇KL_t(q‖π)" in " ".join(done.stdout.split())
    assert "h(r) by quadrature = r log(r) - r + 1" in done.stdout
    only = run("--phi", "r^2", "--placement", "loss", "--format", "html")
    assert only.exit_code == 0
    assert "<math" in only.stdout


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--phi", "q - 1"], "'q' in the formula is unknown: write numbers, r"),
        (["--phi", "open('x')"], "'open' in the formula is no function of the grammar"),
        (["--phi", "log(r - 1)"], "not real and finite"),
        (["--phi", ""], "it is empty"),
        (["k3", "--phi", "r"], "give the name of a derivation (k3) or --phi, not both"),
    ],
)
def test_bad_formulas_are_one_sentence(words, sentence):
    done = run(*words)
    assert done.exit_code == 2
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1
