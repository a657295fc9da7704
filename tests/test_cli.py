"""The command line: what it writes, what it prints, and what it says to bad input."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

from klgrad import cli
from klgrad.analysis.results import COLUMNS
from klgrad.synth.estimators import ESTIMATORS
from klgrad.synth.exact import kl, true_gradient
from klgrad.synth.presets import PRESETS, preset

SMALL = ["--trials", "3", "--samples", "4"]


def run(*arguments):
    return CliRunner().invoke(cli.main, [str(a) for a in arguments])


def pair_arrays(**changes):
    arrays = {
        "next_context": np.array([[0, 1], [0, 1]]), "start": 0, "end": -1,
        "policy_logits": np.array([[0.0, 1.0], [0.5, 0.0]]), "reference_logits": np.zeros((2, 2)),
    }  # fmt: skip
    return arrays | changes


@pytest.fixture
def pair_file(tmp_path):
    np.savez(tmp_path / "mine.npz", **pair_arrays())
    return tmp_path / "mine.npz"


def test_figure1_writes_its_four_files(tmp_path):
    done = run("figure1", "--lengths", "2:4", "--out", tmp_path, *SMALL)
    assert done.exit_code == 0, done.output
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"figure1.{k}" for k in ("csv", "json", "pdf", "png")]
    frame = pd.read_csv(tmp_path / "figure1.csv")
    assert tuple(frame.columns) == COLUMNS
    assert set(frame.preset) == {"near", "far"}
    assert set(frame.length) == {2, 3, 4}
    content = json.loads((tmp_path / "figure1.json").read_text())
    assert content["manifest"]["request"]["seed"] == 0
    assert len(content["rows"]) == len(frame)
    assert "does not publish" in done.output


def test_the_same_seed_gives_the_same_bytes_at_any_number_of_workers(tmp_path):
    for name, workers in (("a", 1), ("b", 2)):
        run("figure1", "--lengths", "3", "--out", tmp_path / name, "--workers", workers, *SMALL)
    assert (tmp_path / "a/figure1.csv").read_bytes() == (tmp_path / "b/figure1.csv").read_bytes()


def test_growth_writes_its_files(tmp_path):
    done = run("growth", "--lengths", "1,10,60,100", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert {p.suffix for p in tmp_path.iterdir()} == {".png", ".pdf", ".csv", ".json"}


def test_compare_json_is_the_rows_with_every_column():
    done = run("compare", "--preset", "far", "--lengths", "5,6", "--config", "k1-in-loss", "--json", *SMALL)
    rows = json.loads(done.stdout)
    assert [tuple(row) for row in rows] == [COLUMNS] * 4
    assert [row["length"] for row in rows] == [5, 6, 5, 6]
    assert rows[0]["cosine"] is None


def test_compare_exact_only_draws_nothing():
    rows = json.loads(run("compare", "--exact-only", "--lengths", "5", "--json").stdout)
    assert {row["source"] for row in rows} == {"exact"}
    assert len(rows) == len(cli.DEFAULT)


def test_compare_prints_a_readable_table():
    done = run("compare", "--preset", "far", "--lengths", "5", "--config", "k1-in-reward", *SMALL)
    head, titles, exact, sampled = done.stdout.splitlines()
    assert "far" in head
    assert "floor" in titles
    assert exact.split()[:4] == ["k1-in-reward", "5", "exact", "0"]
    assert "monte carlo" in sampled


def test_exact_json_matches_the_engine():
    rows = json.loads(run("exact", "--preset", "far", "--lengths", "5:7", "--json").stdout)
    pair = preset("far")
    assert list(rows[0]) == ["length", "kl", "forward_kl", "entropy", "gradient", "gradient_norm"]
    assert [row["kl"] for row in rows] == kl(pair, [5, 6, 7]).tolist()
    assert np.array([row["gradient"] for row in rows]) == pytest.approx(true_gradient(pair, [5, 6, 7]))


def test_a_pair_of_ones_own(pair_file):
    rows = json.loads(run("exact", "--pair", pair_file, "--lengths", "3", "--json").stdout)
    assert rows[0]["kl"] > 0


def test_a_pair_from_a_function(tmp_path):
    (tmp_path / "models.py").write_text(
        "from klgrad.synth.presets import preset\ndef make():\n    return preset('near')\n"
    )
    done = run("exact", "--pair", f"{tmp_path / 'models.py'}:make", "--lengths", "5", "--json")
    assert json.loads(done.stdout)[0]["kl"] == pytest.approx(kl(preset("near"), [5])[0])


def test_behaviour_makes_it_off_policy():
    on = json.loads(run("compare", "--exact-only", "--lengths", "5", "--config", "k1-in-loss", "--json").stdout)
    off = json.loads(
        run(
            "compare", "--exact-only", "--lengths", "5", "--config", "k1-in-loss", "--behaviour", "uniform", "--json"
        ).stdout
    )
    assert on[0]["scale"] == pytest.approx(0, abs=1e-12)
    assert abs(off[0]["scale"]) > 1e-3


@pytest.mark.parametrize("form", ["text", "markdown", "latex"])
def test_table1_says_what_each_configuration_optimises(form):
    done = run("table1", "--lengths", "1,5", "--format", form)
    assert done.exit_code == 0, done.output
    assert "sequence - token-forward" in done.output.replace("$-$", "-")
    for name in ESTIMATORS:
        assert name in done.output


def test_lists_follow_the_registries():
    assert [e["name"] for e in json.loads(run("estimators", "--json").stdout)] == list(ESTIMATORS)
    assert [p["name"] for p in json.loads(run("presets", "--json").stdout)] == list(PRESETS)
    for name in PRESETS:
        assert f"{name}: " in run("presets").output
    for name in ESTIMATORS:
        assert name in run("estimators").output


def test_a_new_estimator_shows_up_by_itself(monkeypatch):
    from klgrad.synth import estimators

    entry = estimators.Entry(lambda delta: delta * 2, lambda delta: delta * 0 + 2, "2 delta", "2", "a test")
    monkeypatch.setitem(estimators.ESTIMATORS, "twice", entry)
    assert "twice" in run("estimators").output
    assert "twice" in run("table1", "--lengths", "2").output
    rows = json.loads(run("compare", "--exact-only", "--lengths", "3", "--config", "twice-in-reward", "--json").stdout)
    assert rows[0]["scale"] == pytest.approx(2)


BAD = {
    ("exact", "--preset", "fur"): "did you mean 'far'",
    ("exact", "--preset", "far", "--pair", "x.npz"): "not both",
    ("compare", "--config", "k9-in-reward"): "unknown estimator 'k9'",
    ("compare", "--config", "k1"): "ESTIMATOR-in-PLACEMENT",
    ("compare", "--config", "k1-in-reward+live"): "unknown option 'live'",
    ("compare", "--config", "k1-in-loss+loo"): "reward placement",
    ("compare", "--config", "alpha(x)-in-loss"): "not a number",
    ("compare", "--lengths", "9:5"): "run backwards",
    ("compare", "--lengths", "five"): "no list of lengths",
    ("compare", "--lengths", "0:5"): "at 1 or more",
    ("compare", "--lengths", "1:99999999"): "past the limit",
    ("compare", "--trials", "1"): "trials = 1",
    ("compare", "--samples", "1"): "samples = 1",
    ("compare", "--pair", "nowhere.npz"): "does not exist",
    ("compare", "--pair", "nowhere"): "neither FILE.npz nor MODULE:FUNCTION",
    ("compare", "--pair", "no_such_module:f"): "no_such_module",
    ("compare", "--pair", "json:dumps"): "gave no pair",
    ("compare", "--behaviour", "nobody"): "none of policy",
    ("table1", "--estimator", "k7"): "unknown estimator",
    ("figure1", "--trials", "0"): "trials = 0",
}


@pytest.mark.parametrize("arguments", BAD, ids=" ".join)
def test_bad_input_is_one_sentence_and_exit_2(arguments):
    done = run(*arguments)
    assert done.exit_code == 2
    assert BAD[arguments] in done.output
    assert "Traceback" not in done.output
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_support_mismatch_says_where(tmp_path):
    logits = np.array([[0.0, 0.0], [0.0, -np.inf]])
    np.savez(tmp_path / "gap.npz", **pair_arrays(reference_logits=logits))
    done = run("compare", "--pair", tmp_path / "gap.npz")
    assert done.exit_code == 2
    assert "KL is infinite: in context 1 the policy emits token 1" in done.output


@pytest.mark.parametrize("content", [b"", b"not an archive", b"PK\x03\x04 broken"])
def test_a_file_that_is_not_what_it_claims(tmp_path, content):
    (tmp_path / "x.npz").write_bytes(content)
    done = run("exact", "--pair", tmp_path / "x.npz")
    assert done.exit_code == 2
    assert "cannot be read as .npz" in done.output


def test_an_unwritable_out_is_said_before_the_work(tmp_path):
    (tmp_path / "file").write_text("")
    done = run("figure1", "--out", tmp_path / "file")
    assert done.exit_code == 2
    assert "cannot write" in done.output


def test_an_interrupted_figure_leaves_blocks_and_no_half_written_file(tmp_path):
    """A real Ctrl-C: the process stops with 130, only finished blocks remain, and a second run completes."""
    command = [
        sys.executable,
        "-m",
        "klgrad.cli",
        "figure1",
        "--out",
        str(tmp_path),
        "--lengths",
        "40:90",
        "--workers",
        "1",
    ]
    command += ["--config", "k1-in-reward+rtg+prefix-ratio", "--preset", "near"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ)
    store = tmp_path / cli.STORE
    deadline = time.monotonic() + 60
    while not list(store.rglob("*.npz")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "interrupted" in errors
    assert "Traceback" not in errors
    assert [p.name for p in tmp_path.iterdir()] == [cli.STORE]
    assert {p.suffix for p in store.rglob("*") if p.is_file()} == {".npz"}


def test_help_is_complete():
    for name, command in cli.main.commands.items():
        done = run(name, "--help")
        assert done.exit_code == 0
        assert all(p.help for p in command.params if hasattr(p, "help")), name
    assert "..." not in "".join(run("--help").output.splitlines()[-9:])


def test_the_module_runs_as_a_script():
    done = subprocess.run([sys.executable, "-m", "klgrad.cli", "--help"], capture_output=True, text=True, check=True)
    assert "figure1" in done.stdout
    assert Path(cli.__file__).name == "cli.py"
