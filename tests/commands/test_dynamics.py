"""`klgrad dynamics`, `field` and `stability`: files, tables, JSON, and what they say to bad input."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from interrupts import heed_interrupts

from klgrad import cli
from klgrad.analysis.dynamics.runs import COLUMNS
from klgrad.commands.folders import STORE
from klgrad.synth.tasks import TASKS

ROOT = Path(cli.__file__).resolve().parent
SMALL = ("--task", "phase", "--steps", "6", "--samples", "8", "--workers", "1")


def run(*arguments):
    return CliRunner().invoke(cli.main, [str(a) for a in arguments])


@pytest.fixture
def pair_file(tmp_path):
    logits = np.array([[0.0, 1.0], [0.5, 0.0]])
    arrays = {"next_context": np.array([[0, 1], [0, 1]]), "start": 0, "end": -1}
    np.savez(tmp_path / "mine.npz", policy_logits=logits, reference_logits=np.zeros((2, 2)), **arrays)
    return tmp_path / "mine.npz"


# ------------------------------------------------------------------------------------------------------ dynamics


def test_dynamics_writes_its_files_and_a_table(tmp_path):
    done = run("dynamics", *SMALL, "--seeds", "2", "--beta", "0.1,0.3", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"dynamics.{k}" for k in ("csv", "json", "pdf", "png")]
    frame = pd.read_csv(tmp_path / "dynamics.csv")
    assert tuple(frame.columns) == COLUMNS
    assert len(frame) == 5 * 2 * 2 * 7
    content = json.loads((tmp_path / "dynamics.json").read_text())
    assert content["manifest"]["request"]["steps"] == 6
    assert content["manifest"]["request"]["runs"][0]["algorithm"]["samples"] == 8
    table = done.output
    assert "phase after 6 steps of rloo, 8 sequences a step, learning rate 0.5" in table
    assert table.count("k3-in-reward") == 2
    assert "J* - J = beta KL(pi || pi*) held to" in table


def test_a_summary_tells_the_median_and_the_range_over_seeds(tmp_path):
    asked = ["dynamics", *SMALL, "--seeds", "5", "--config", "k3-in-reward", "--beta", "0.5"]
    (row,) = json.loads(run(*asked, "--out", tmp_path, "--json").output)
    frame = pd.read_csv(tmp_path / "dynamics.csv")
    last = frame[frame["step"] == 6]
    for name in ("objective", "reward", "kl", "entropy"):
        told = [row[name], row[f"{name}_low"], row[f"{name}_high"]]
        assert told == pytest.approx([last[name].median(), last[name].min(), last[name].max()])
        assert told[1] < told[0] < told[2]
    text = run(*asked, "--out", tmp_path).stdout
    assert "median and range over 5 seeds" in text
    assert f"[{row['kl_low']:.3g}, {row['kl_high']:.3g}]" in text.splitlines()[3]


@pytest.mark.parametrize(
    ("asked", "said"), [(["--seeds", "1"], True), (["--seeds", "5"], False), (["--expected"], False)]
)
def test_few_sampled_runs_are_cautioned(tmp_path, asked, said):
    done = run("dynamics", *SMALL, *asked, "--config", "none", "--out", tmp_path)
    assert ("noisy training amplifies rounding" in done.stderr) == said


def test_the_same_command_gives_the_same_numbers(tmp_path):
    first, second = (run("dynamics", *SMALL, "--seeds", "2", "--out", tmp_path / name, "--json") for name in "ab")
    assert first.output == second.output
    rows = json.loads(first.output)
    assert [row["configuration"] for row in rows][-1] == "none"
    assert rows[0]["seeds"] == 2


def test_expected_updates_have_one_seed(tmp_path):
    done = run("dynamics", *SMALL, "--expected", "--config", "k1-in-reward", "--json", "--out", tmp_path)
    (row,) = json.loads(done.output)
    assert (row["seeds"], row["source"]) == (1, "expected")
    assert row["cosine"] > 1 - 1e-9


def test_staleness_and_ratios_are_a_grid_with_a_figure_and_a_caution(tmp_path):
    done = run(
        "dynamics", *SMALL, "--seeds", "1", "--staleness", "0,3", "--ratio", "none", "--ratio", "token",
        "--advantage", "dr-grpo", "--config", "k1-in-reward", "--out", tmp_path,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert (tmp_path / "dynamics-staleness.png").exists()
    assert "write k1-in-reward+token-ratio to weigh it alike" in done.stderr
    assert len(pd.read_csv(tmp_path / "dynamics.csv").groupby(["ratio", "staleness"])) == 4


def test_a_pair_of_ones_own_trains(pair_file, tmp_path):
    done = run(
        "dynamics", "--pair", pair_file, "--reward", "contains(1,0)+0.1*each(1)", "--length", "5", "--start", "policy",
        "--steps", "5", "--samples", "8", "--seeds", "1", "--workers", "1", "--optimiser", "adam",
        "--learning-rate", "0.02", "--out", tmp_path / "out",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "mine after 5 steps" in done.output


def test_a_collapse_is_reported(tmp_path):
    done = run(
        "dynamics", *SMALL, "--seeds", "2", "--config", "k1-in-loss", "--learning-rate", "1e8", "--out", tmp_path
    )
    assert done.exit_code == 0, done.output
    assert "2 of 2, first at step 1: the parameters run away" in done.output


def test_an_interrupted_study_goes_on(tmp_path):
    arguments = ["dynamics", "--task", "pattern", "--steps", "150", "--seeds", "30", "--workers", "1", "--every", "50"]
    arguments += ["--out", str(tmp_path / "out"), "--config", "k1-in-reward", "--config", "k3-in-loss"]
    command = [sys.executable, "-m", "klgrad.cli", *arguments]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stderr=pipe, stdout=pipe, text=True, preexec_fn=heed_interrupts)
    store = tmp_path / "out" / STORE
    for _ in range(600):
        if list(store.glob("*/block-*.npz")) or process.poll() is not None:
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert "finished blocks are kept in" in error
    assert not (tmp_path / "out" / "dynamics.csv").exists()
    kept = len(list(store.glob("*/block-*.npz")))
    assert kept >= 1
    done = subprocess.run([*command, "-q"], capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "dynamics.csv").exists()
    assert not store.exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--task", "patern"), "did you mean 'pattern'"),
        (("--task", "phase", "--preset", "near"), "give --task, or --preset or --pair"),
        (("--preset", "near"), "need a --reward"),
        (("--preset", "stale", "--reward", "each(1)"), "--behaviour policy"),
        (("--reward", "contain(1)"), "did you mean 'contains'"),
        (("--config", "k9-in-loss"), "unknown estimator"),
        (("--beta", "0.1,x"), "'x' is not one"),
        (("--beta=-1",), "must be 0 or more"),
        (("--learning-rate", "0"), "must be positive"),
        (("--staleness", "1.5"), "whole numbers"),
        (("--steps", "0"), "steps = 0"),
        (("--samples", "10", "--group", "3"), "groups of 3"),
        (("--advantage", "ppo"), "unknown advantage"),
        (("--ratio", "both"), "unknown ratio"),
        (("--preset", "counts", "--reward", "each(1)", "--length", "3", "--optimiser", "lion"), "unknown optimiser"),
        (("--task", "tree", "--expected", "--advantage", "grpo", "--steps", "2"), "expected update of grpo is exact"),
    ],
)
def test_bad_input_is_one_sentence_and_code_2(arguments, says, tmp_path):
    done = run("dynamics", *arguments, "--out", tmp_path / "out")
    assert done.exit_code == 2, done.output
    assert says in done.output
    assert "Traceback" not in done.output
    assert not (tmp_path / "out" / "dynamics.csv").exists()


# --------------------------------------------------------------------------------------------------------- field


def test_field_prints_ends_and_curl_and_writes_its_figures(tmp_path):
    done = run(
        "field", "--task", "phase", "--beta", "0.3,1", "--lengths", "1,3", "--config", "k1-in-reward", "--config",
        "k3-in-reward", "--longest", "1e3", "--out", tmp_path,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert {p.stem for p in tmp_path.iterdir()} == {"field", "field-curl", "field-phase"}
    assert done.output.count("attracting") == 2
    assert done.output.count("runaway") == 2
    assert "curl by length" in done.output


def test_field_as_json():
    done = run("field", "--task", "tree", "--beta", "1", "--config", "k2-in-loss", "--json")
    found = json.loads(done.output)
    assert found["ends"][0]["kind"] == "attracting"
    assert found["ends"][0]["closed_form_distance"] < 1e-9
    assert found["curl"] == []


@pytest.mark.parametrize(
    ("arguments", "says"), [(("--beta", "0"), "must be positive"), (("--longest", "0"), "longest = 0")]
)
def test_field_refuses(arguments, says):
    done = run("field", "--task", "phase", *arguments)
    assert (done.exit_code, says in done.output) == (2, True)


# ----------------------------------------------------------------------------------------------------- stability


def test_stability_judges_and_checks():
    done = run("stability", "--task", "phase", "--samples", "64", "--check", "4", "--steps", "20", "--json")
    assert done.exit_code == 0, done.output
    rows = {row["configuration"]: row for row in json.loads(done.output)}
    verdicts = {name: row["verdict"] for name, row in rows.items()}
    assert verdicts == {
        "k1-in-reward": "hold", "k1-in-loss": "drift", "k3-in-reward": "collapse", "k3-in-loss": "hold",
    }  # fmt: skip
    assert rows["k1-in-reward"]["simulated_kl"] < rows["k3-in-reward"]["simulated_kl"]
    assert rows["k1-in-loss"]["critical_learning_rate"] is None


def test_stability_as_a_table():
    done = run("stability", "--preset", "near", "--reward", "none", "--start", "policy", "--length", "4",
               "--config", "k1-in-reward", "--learning-rate", "0.5,60")  # fmt: skip
    assert "HOLD" in done.output
    assert "COLLAPSE" in done.output or "DRIFT" in done.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--config", "full-in-loss"), "sampled token"),
        (("--samples", "1"), "at least 2"),
        (("--task", "answr"), "answer"),
    ],
)
def test_stability_refuses(arguments, says):
    done = run("stability", *arguments)
    assert (done.exit_code, says in done.output) == (2, True), done.output


# ------------------------------------------------------------------------------------------------------- presets


def test_tasks_are_listed_with_their_numbers():
    text, rows = run("presets", "--tasks").output, json.loads(run("presets", "--tasks", "--json").output)
    assert [row["name"] for row in rows] == list(TASKS)
    assert all(row["reward"] in text for row in rows)


# ------------------------------------------------------------------------------------------------- the docs page


NUMBER = r"(-?[\d.]+(?:e[+-]?\d+)?)"


@pytest.mark.slow
def test_the_page_tells_what_the_command_prints(tmp_path):
    """Medians lie in the ranges told, and the other way round, where another CPU may move single runs."""
    page = (ROOT / "docs" / "dynamics.md").read_text()
    done = run("dynamics", "--beta", "0.02,0.05,0.2", "--out", tmp_path, "--json")
    rows = {row["configuration"]: row for row in json.loads(done.output) if row["beta"] == 0.05}
    for name, row in rows.items():
        (line,) = re.findall(rf"^\| {name} \|(.*)\|$", page, re.MULTILINE)[:1]
        told = [tuple(map(float, each)) for each in re.findall(rf"{NUMBER} \[{NUMBER}, {NUMBER}\]", line)]
        assert len(told) == 6, line
        for (median, low, high), measure in zip(told, ("objective", "reward", "kl"), strict=False):
            room = 0.01 * max(abs(low), abs(high))
            assert low - room <= row[measure] <= high + room, (name, measure)
            assert row[f"{measure}_low"] - room <= median <= row[f"{measure}_high"] + room, (name, measure)


def test_every_number_of_sampled_runs_on_the_page_has_its_range():
    page = (ROOT / "docs" / "dynamics.md").read_text()
    table = re.search(r"^\| beta = 0.05, after.*?\n\n", page, re.MULTILINE | re.DOTALL)[0].splitlines()[2:]
    table += re.search(r"^\| staleness \|.*?\n\n", page, re.MULTILINE | re.DOTALL)[0].splitlines()[2:]
    cells = [cell for line in table if line for cell in line.strip("| ").split(" | ")[1:]]
    assert len(cells) == 5 * 6 + 4 * 5
    for cell in cells:
        low, high = re.fullmatch(rf"{NUMBER} \[{NUMBER}, {NUMBER}\]", cell).group(2, 3)
        assert float(low) <= float(high)
