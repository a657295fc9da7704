"""`klgrad reproduce`: the same table again, or what changed and by how much; a manifest is data and runs no code."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner

from klgrad import cli
from klgrad.analysis import reproduce
from klgrad.analysis.arithmetic import arithmetic
from klgrad.analysis.results import LATER

COMPARE = ["--lengths", "2,4", "--config", "k1-in-reward", "--config", "k3-in-loss", "--trials", "3", "--samples", "4"]


def run(*arguments):
    return CliRunner().invoke(cli.main, [str(a) for a in arguments])


def on_another_cpu(*arguments):
    """The command on a CPU without what numpy found beyond its baseline, with another core's BLAS kernels."""
    found = np.show_config(mode="dicts")["SIMD Extensions"].get("found", ())
    environment = {**os.environ, "NPY_DISABLE_CPU_FEATURES": " ".join(found), "OPENBLAS_CORETYPE": "Prescott"}
    command = [sys.executable, "-m", "klgrad.cli", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def edit(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.fixture
def saved(tmp_path):
    assert run("compare", "-q", "--preset", "far", "--out", tmp_path, *COMPARE).exit_code == 0
    return tmp_path / "compare.json"


@pytest.mark.parametrize(
    "asked",
    [
        ["figure1", "--lengths", "2:3", "--trials", "3", "--samples", "4", "-q"],
        pytest.param(["figure1", "--preset", "handbook", "--exact-only", "-q"], marks=pytest.mark.slow),
        pytest.param(["growth", "--lengths", "1,10,60,100"], marks=pytest.mark.slow),
        ["compare", "--lengths", "3", "--unbiased", "--rank", "variance", "--error", "0.1"],
        ["compare", "--lengths", "3", "--error", "0.2", "--behaviour", "uniform", "--trials", "2", "--samples", "2"],
    ],
    ids=" ".join,
)
def test_what_was_saved_comes_out_byte_for_byte(tmp_path, asked):
    assert run(*asked, "--out", tmp_path / "a").exit_code == 0
    done = run("reproduce", tmp_path / "a" / f"{asked[0]}.json", "--out", tmp_path / "b", "--workers", "2", "-q")
    assert done.exit_code == 0, done.output
    assert "byte for byte" in done.output
    names = [f"{asked[0]}.{kind}" for kind in ("csv", "json")]
    assert [(tmp_path / "b" / n).read_bytes() for n in names] == [(tmp_path / "a" / n).read_bytes() for n in names]


def test_another_number_is_found_and_measured(saved):
    edit(saved, lambda c: c["rows"][0].update(variance=c["rows"][0]["variance"] * (1 + 1e-6)))
    done = run("reproduce", saved, "--json")
    assert done.exit_code == 1
    (found,) = json.loads(done.stdout)["differences"]
    assert (found["source"], found["column"], found["rows"]) == ("exact", "variance", 1)
    assert found["largest"] == pytest.approx(1e-6, rel=1e-3)
    assert run("reproduce", saved).exit_code == 1
    assert run("reproduce", saved, "--tolerance", "1e-5").exit_code == 0


def test_a_bias_is_off_by_its_share_of_the_gradient_not_of_itself(saved):
    edit(saved, lambda c: c["rows"][0].update(bias=1e-15 * c["rows"][0]["gradient_norm"]))
    (found,) = json.loads(run("reproduce", saved, "--json").stdout)["differences"]
    assert found["largest"] < 1e-14


def test_a_number_that_is_gone_is_infinitely_far(saved):
    edit(saved, lambda c: c["rows"][0].update(variance=None))
    assert json.loads(run("reproduce", saved, "--json").stdout)["differences"][0]["largest"] is None
    assert run("reproduce", saved, "--tolerance", "1e9").exit_code == 1


def test_other_bytes_in_the_csv_are_seen(saved):
    saved.with_suffix(".csv").write_text(saved.with_suffix(".csv").read_text() + "\n")
    done = run("reproduce", saved)
    assert done.exit_code == 1
    assert "other bytes" in done.output
    saved.with_suffix(".csv").unlink()
    assert run("reproduce", saved).exit_code == 0


def test_what_changed_is_named(saved):
    def change(content):
        content["manifest"]["software"]["numpy"] = "0.1\x1b[31m"
        content["manifest"]["pairs"]["far"] = "feed"

    edit(saved, change)
    done = run("reproduce", saved)
    assert done.exit_code == 0
    assert "changed: numpy was 0.1\\x1b[31m, is " in done.output
    assert "changed: pair far was feed, is " in done.output


def test_no_code_runs_because_a_manifest_names_it(tmp_path):
    code = tmp_path / "m.py"
    code.write_text("from klgrad.synth.presets import preset\ndef make():\n    return preset('near')\n")
    assert run("compare", "--pair", f"{code}:make", "--out", tmp_path, *COMPARE).exit_code == 0
    trap = tmp_path / "ran"
    code.write_text(f"import pathlib\npathlib.Path({str(trap)!r}).touch()\n" + code.read_text())
    done = run("reproduce", tmp_path / "compare.json")
    assert done.exit_code == 2
    assert "cannot be trusted" in done.stderr
    assert not trap.exists()
    assert run("reproduce", tmp_path / "compare.json", "--pair", f"{code}:make").exit_code == 0


def test_a_pair_that_moved_is_named_anew(tmp_path):
    arrays = {"next_context": np.array([[0, 1], [0, 1]]), "start": 0, "end": -1}
    np.savez(tmp_path / "a.npz", **arrays, policy_logits=np.eye(2), reference_logits=np.zeros((2, 2)))
    assert run("compare", "--pair", tmp_path / "a.npz", "--out", tmp_path, *COMPARE).exit_code == 0
    (tmp_path / "below").mkdir()
    (tmp_path / "a.npz").rename(tmp_path / "below" / "a.npz")
    assert "does not exist" in run("reproduce", tmp_path / "compare.json").stderr
    assert run("reproduce", tmp_path / "compare.json", "--pair", tmp_path / "below" / "a.npz").exit_code == 0


WRONG = {
    "command": (lambda m: m.update(command="klgrad serve"), "reproduce knows"),
    "of training": (lambda m: m.update(command="klgrad dynamics", request={"training": {}}), "is of 'dynamics'"),
    "no request": (lambda m: m.pop("request"), "request is missing"),
    "sources": (lambda m: m["request"].update(sources=[]), "one for each"),
    "source": (lambda m: m["request"].update(sources=[3]), "sources is 3"),
    "lengths": (lambda m: m["request"].update(lengths=[[0]]), "at least one token"),
    "text": (lambda m: m["request"].update(lengths=[["5"]]), "lengths is '5'"),
    "trials": (lambda m: m["request"].update(trials=True), "trials is True"),
    "seed": (lambda m: m["request"].update(seed=-1), "seed"),
    "rank": (lambda m: m["request"].update(rank="size"), "rank"),
    "configuration": (lambda m: m["request"].update(configurations=["k9-in-loss"]), "unknown estimator"),
    "huge": (lambda m: m["request"].update(samples=10**30), "past the limit"),
    "rows": (lambda m: m["request"].update(lengths=[[2, 5]]), "other rows"),
    "columns": (lambda m: m["request"].update(error=0.1), "other columns"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_manifest_that_cannot_be_run_is_one_sentence(saved, name):
    change, words = WRONG[name]
    edit(saved, lambda content: change(content["manifest"]))
    done = run("reproduce", saved, "-q")
    assert (done.exit_code, len(done.stderr.strip().splitlines())) == (2, 1), done.output
    assert words in done.stderr


def test_the_original_is_never_overwritten(saved):
    before = saved.read_bytes()
    done = run("reproduce", saved, "--out", saved.parent)
    assert done.exit_code == 2
    assert saved.read_bytes() == before


def test_a_request_reads_what_sweeps_write(saved):
    asked = reproduce.request(json.loads(saved.read_text())["manifest"])
    assert (asked.command, asked.lengths, asked.trials, asked.samples) == ("compare", [[2, 4]], 3, 4)
    assert asked.question == {"unbiased": False, "rank": None, "error": None}


# -------------------------------------------------------------------------------------------------- another arithmetic

WIDE = ["compare", "-q", "--preset", "far", "--lengths", "3,9", "--trials", "20", "--samples", "500"]


def test_another_cpu_s_table_is_the_same_to_rounding_and_its_vector_unit_is_named(tmp_path):
    made = on_another_cpu(*WIDE, "--out", tmp_path)
    assert made.returncode == 0, made.stderr
    manifest = json.loads((tmp_path / "compare.json").read_text())["manifest"]
    here = arithmetic()
    if manifest["arithmetic"] == here:
        pytest.skip("this CPU has nothing beyond the baseline")
    done = run("reproduce", tmp_path / "compare.json", "-q")
    assert done.exit_code == 0, done.output
    found = json.loads(run("reproduce", tmp_path / "compare.json", "-q", "--json").stdout)
    assert (found["reproduced"], found["to_rounding"]) == (True, True)
    assert found["arithmetic"].startswith("another CPU's vector unit (saved: ")
    if found["differences"]:
        assert "reproduced: same to 1e-1" in done.stdout
        assert f"another CPU's vector unit (saved: numpy {manifest['arithmetic']['numpy']}, " in done.stdout
        assert f"here: numpy {here['numpy']}" in done.stdout


@pytest.mark.parametrize("column", ["bias", "variance", "kl", "estimate", "cosine"])
def test_what_rounding_cannot_make_fails_whatever_the_cpu(saved, column):
    """Ten thousand units of the number's terms, on lengths of 2 and 4."""

    def change(content):
        content["manifest"]["arithmetic"] = {"numpy": "X86_V2"}
        row = content["rows"][0]
        row[column] += 1e4 * 2.2e-16 * (1 + row["variance"] + row["gradient_norm"])

    edit(saved, change)
    done = run("reproduce", saved)
    assert done.exit_code == 1
    assert done.stdout.rstrip().endswith("not reproduced: some differences are past what rounding can make")


def last_bit(content):
    row = content["rows"][0]
    row["variance"] = float(np.nextafter(row["variance"], 1e9))


def test_another_bit_of_the_same_arithmetic_is_said_so(saved):
    edit(saved, last_bit)
    done = run("reproduce", saved)
    assert done.exit_code == 0
    assert "same to 1e-1" in done.stdout
    assert "the same arithmetic and versions, so every bit should be" in done.stdout


def test_a_table_from_before_its_arithmetic_was_told(saved):
    edit(saved, lambda content: (last_bit(content), content["manifest"].pop("arithmetic")))
    done = run("reproduce", saved)
    assert done.exit_code == 0
    assert "the table does not say which arithmetic made it" in done.stdout
    assert "changed: arithmetic" not in done.stdout


def test_columns_that_tables_have_had_only_since_are_not_asked_for(saved):
    def drop(content):
        for row in content["rows"]:
            for name in LATER:
                del row[name]

    edit(saved, drop)
    saved.with_suffix(".csv").unlink()
    done = run("reproduce", saved)
    assert done.exit_code == 0, done.output
