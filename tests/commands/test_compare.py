"""``klgrad compare`` with ``--unbiased``, ``--rank`` and ``--error``: what it prints, writes and refuses."""

import json

import pandas as pd
import pytest
from click.testing import CliRunner

from klgrad import cli
from klgrad.analysis.results import COLUMNS


def run(*arguments):
    return CliRunner().invoke(cli.main, ["compare", *(str(a) for a in arguments)])


ASK = ("--unbiased", "--rank", "variance", "--error", "0.1")


def test_ranked_rows_carry_all_that_was_asked():
    rows = json.loads(run("--preset", "far", "--lengths", "5,20", *ASK, "--json").stdout)
    assert [tuple(row) for row in rows] == [(*COLUMNS, "cost", "sequences_for_error", "rank")] * len(rows)
    assert {row["source"] for row in rows} == {"exact"}
    assert max(row["relative_bias"] for row in rows) < 1e-9
    for length in (5, 20):
        part = [row for row in rows if row["length"] == length]
        assert len(part) > 50
        assert [row["rank"] for row in part] == sorted(row["rank"] for row in part)
    best, plain = (
        next(row for row in rows if row["length"] == 20 and row["configuration"] == name)
        for name in ("full-in-both+optimal-baseline", "k1-in-reward")
    )
    assert plain["variance"] / best["variance"] == pytest.approx(14_900, rel=0.01)
    assert (best["sequences_for_error"], plain["sequences_for_error"]) == (1, 6554)
    assert best["cost"] == "full vocabulary + exact constant"


def test_the_table_prints_the_best_and_the_benchmark_without_dull_columns():
    done = run("--preset", "far", "--lengths", "20", *ASK, "--top", "4")
    title, header, *rows = done.stdout.splitlines()
    assert title.endswith("relative error of 0.1")
    assert header.split() == ["configuration", "T", "rank", "variance", "sequences", "cost"]
    assert len(rows) == 6  # four, and the two that others are measured by
    assert rows[0].startswith("full-in-both+optimal-baseline-per-coordinate")
    assert rows[-2].split()[:5] == ["k1-in-reward", "20", "40", "132.8", "6,554"]
    assert rows[-1].split()[:2] == ["k3-in-both", "20"]
    assert done.stderr == ""


def test_csv_and_manifest_hold_every_rank(tmp_path):
    assert run("--preset", "near", "--lengths", "5", *ASK, "--top", "1", "--out", tmp_path).exit_code == 0
    frame = pd.read_csv(tmp_path / "compare.csv")
    assert len(frame) > 50
    assert frame["rank"].is_monotonic_increasing
    request = json.loads((tmp_path / "compare.json").read_text())["manifest"]["request"]
    assert {name: request[name] for name in ("unbiased", "rank", "error")} == {
        "unbiased": True, "rank": "variance", "error": 0.1,
    }  # fmt: skip
    assert len(request["configurations"]) == len(frame)


def test_named_configurations_are_filtered():
    names = ("k3-in-loss", "k1-in-reward", "k3-in-both+rtg")
    done = run("--lengths", "5", "--unbiased", "--json", *(part for name in names for part in ("--config", name)))
    assert [row["configuration"] for row in json.loads(done.stdout)] == list(names[1:])


def test_an_error_adds_its_column_to_any_table():
    done = run("--lengths", "5", "--config", "k1-in-reward", "--error", "0.1", "--trials", "3", "--samples", "4")
    header, exact, sampled = done.stdout.splitlines()[1:]
    assert header.split()[-2:] == ["sequences", "cost"]
    assert "floor" in header
    assert " 291 " in exact
    assert " 291 " in sampled


def test_a_variance_without_an_upper_end_comes_with_its_reason():
    asked = ("--preset", "ending", "--lengths", "8", "--config", "k1-in-reward", "--config", "k1-in-loss")
    asked = (*asked, "--trials", "50", "--samples", "100")
    done = run(*asked)
    endless, mild = (line for line in done.stdout.splitlines() if "monte carlo" in line)
    assert ", -]" in endless
    assert ", -]" not in mild
    assert done.stderr.startswith("note: ending: k1-in-reward at T = 8: no upper end of the variance's interval")
    assert len(done.stderr.splitlines()) == 1
    assert run(*asked, "--quiet").stderr == ""
    rows = json.loads(run(*asked, "--json").stdout)
    assert [row["variance_interval"] for row in rows] == ["exact", "exact", "low end", "fourth moment"]
    assert [row["variance_high"] is None for row in rows] == [False, False, True, False]
    assert run(*asked, "--exact-only").stderr == ""


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--error", "0"), "error = 0 must be positive"),
        (("--error", "nan"), "error = nan must be positive"),
        (("--rank", "speed"), "unknown rank 'speed': there is variance"),
        (("--unbiased", "--config", "k3-in-loss"), "no unbiased one among the 1 configurations"),
        (("--unbiased", "--preset", "nowhere"), "unknown preset"),
    ],
)
def test_bad_input_is_one_sentence(arguments, sentence):
    done = run("--lengths", "5", *arguments)
    assert done.exit_code == 2
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1
