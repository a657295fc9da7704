"""The command line: what it writes, what it prints, and what it says to bad input."""

import gc
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from interrupts import heed_interrupts

from klgrad import cli
from klgrad.analysis.results import COLUMNS
from klgrad.commands.folders import STORE
from klgrad.commands.options import DEFAULT
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
    assert len(rows) == len(DEFAULT)


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
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ, preexec_fn=heed_interrupts)
    store = tmp_path / STORE
    deadline = time.monotonic() + 60
    while not list(store.rglob("*.npz")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "interrupted" in errors
    assert "Traceback" not in errors
    assert [p.name for p in tmp_path.iterdir()] == [STORE]
    assert {p.suffix for p in store.rglob("*") if p.is_file()} == {".npz"}


def test_help_is_complete():
    for name in cli.COMMANDS:
        command = cli.main.get_command(click.Context(cli.main), name)
        done = run(name, "--help")
        assert done.exit_code == 0
        assert all(p.help for p in command.params if isinstance(p, click.Option)), name
    assert "..." not in "".join(run("--help").output.splitlines()[-len(cli.COMMANDS) :])


def test_the_module_runs_as_a_script():
    done = subprocess.run([sys.executable, "-m", "klgrad.cli", "--help"], capture_output=True, text=True, check=True)
    assert "figure1" in done.stdout
    assert Path(cli.__file__).name == "cli.py"


def test_a_process_ends_without_a_last_collection_and_keeps_its_exit_code(monkeypatch):
    frozen = []
    monkeypatch.setattr(cli.gc, "freeze", lambda: frozen.append(True))
    monkeypatch.setattr(sys, "argv", ["klgrad", "exact", "k9-in-loss"])
    with pytest.raises(SystemExit) as stopped:
        cli.process()
    assert (stopped.value.code, frozen) == (2, [True])


def test_imports_leave_the_collector_as_it_was():
    for on in (True, False):
        (gc.enable if on else gc.disable)()
        try:
            with cli.uncollected():
                assert not gc.isenabled()
            assert gc.isenabled() == on
        finally:
            gc.enable()


# ---------------------------------------------------------------------------------- faults that readers have found


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("import sys\n    sys.exit(0)", "SystemExit"),
        ("raise RuntimeError('no')", "RuntimeError: no"),
        ("return None", "NoneType"),
    ],
)
def test_a_function_that_gives_no_pair_is_one_sentence(tmp_path, body, words):
    (tmp_path / "m.py").write_text(f"def make():\n    {body}\n")
    done = run("exact", "--pair", f"{tmp_path / 'm.py'}:make")
    assert done.exit_code == 2
    assert words in done.stderr


def test_what_a_users_module_prints_stays_out_of_our_output(tmp_path):
    (tmp_path / "m.py").write_text(
        "from klgrad.synth.presets import preset\n"
        "print('loading')\n"
        "def make():\n    print('hi')\n    return preset('near')\n"
    )
    done = run("exact", "--pair", f"{tmp_path / 'm.py'}:make", "--lengths", "2", "--json")
    assert json.loads(done.stdout)[0]["length"] == 2
    assert "hi" in done.stderr


@pytest.mark.parametrize("option", ["--preset", "--pair", "--behaviour"])
def test_an_empty_option_is_not_the_default(option):
    """A script with an unset variable must not get another model's numbers."""
    assert run("exact", option, "").exit_code == 2


def test_another_command_leaves_the_blocks_of_an_interrupted_one(tmp_path):
    kept = tmp_path / STORE / "of-another-request" / "length-5-trial-0.npz"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"")
    assert run("compare", "--out", tmp_path, "--lengths", "2", *SMALL).exit_code == 0
    assert kept.exists()
    assert [p.name for p in (tmp_path / STORE).iterdir()] == ["of-another-request"]


def test_an_interruption_while_drawing_keeps_the_blocks(tmp_path, monkeypatch):
    import klgrad.figures

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(klgrad.figures, "save_figure", stop)
    done = run("figure1", "--out", tmp_path, "--lengths", "2", *SMALL)
    assert done.exit_code == 130
    assert "finished blocks are kept" in done.stderr
    assert len(list((tmp_path / STORE).rglob("*.npz"))) == 2


def test_an_interruption_with_nothing_stored_claims_nothing(monkeypatch):
    from klgrad.analysis import results

    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(results, "compare", stop)
    done = run("compare", "--lengths", "2")
    assert (done.exit_code, done.stderr.strip()) == (130, "interrupted")


def test_one_overflow_does_not_spoil_the_others(tmp_path):
    steep = np.array([[0.0, 800.0], [800.0, 0.0]])
    np.savez(tmp_path / "steep.npz", **pair_arrays(policy_logits=steep, reference_logits=-steep))
    done = run(
        "compare", "--pair", tmp_path / "steep.npz", "--lengths", "4", "--exact-only", "--json",
        "--config", "k1-in-reward", "--config", "k3-in-loss",
    )  # fmt: skip
    k1, k3 = json.loads(done.stdout)
    assert k1["estimate"] == pytest.approx(3200)
    assert k3["variance"] is None
    assert done.stderr == "note: k3-in-loss: beyond double precision on this pair\n"


def test_a_behaviour_that_never_samples_a_token_is_said(tmp_path):
    gap = np.array([[0.0, -np.inf], [0.0, 0.0]])
    np.savez(tmp_path / "gap.npz", **pair_arrays(behaviour_logits=gap))
    done = run(
        "compare", "--pair", tmp_path / "gap.npz", "--lengths", "3", "--exact-only",
        "--config", "k1-in-reward+prefix-ratio",
    )  # fmt: skip
    assert "in context 0 the behaviour policy never samples token 1" in done.stderr
    assert run("compare", "-q", "--pair", tmp_path / "gap.npz", "--lengths", "3", "--exact-only").stderr == ""


def test_the_manifest_names_the_sampler(tmp_path):
    run("compare", "--out", tmp_path, "--lengths", "2", "--config", "k1-in-reward+rtg", *SMALL)
    manifest = json.loads((tmp_path / "compare.json").read_text())["manifest"]
    assert manifest["request"]["samplers"] == {"near": "ordered"}


def test_impossible_amounts_are_refused():
    assert "past the limit" in run("compare", "--samples", 10**12, "--lengths", "3").stderr
    assert "take fewer trials" in run("compare", "--trials", 10**9, "--lengths", "3", "--samples", "2").stderr


@pytest.mark.parametrize(("arguments", "meant"), [(["chek"], "check"), (["llm", "trian"], "train")])
def test_an_unknown_command_is_told_what_was_meant(arguments, meant):
    done = run(*arguments)
    assert (done.exit_code, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert f"unknown command {arguments[-1]!r}: did you mean {meant!r}? there is " in done.stderr


def in_a_shell(command):
    """Exit code and standard error of a shell's command line; KLGRAD stands for the command."""
    line = command.replace("KLGRAD", f"{sys.executable} -m klgrad.cli")
    done = subprocess.run(["sh", "-c", line], stderr=subprocess.PIPE, text=True, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize("name", ["estimators", "exact --lengths 2 --json", "--help"])
def test_a_closed_standard_output_is_one_sentence(name):
    code, errors = in_a_shell(f"KLGRAD {name} >&-")
    assert (code, len(errors.splitlines())) == (2, 1), errors
    assert "standard output is closed" in errors


def test_what_prints_nothing_needs_no_standard_output(tmp_path):
    quiet = f"figure1 --exact-only --preset near --lengths 2 -q --out {tmp_path}"
    assert in_a_shell(f"KLGRAD {quiet} >&- 2>&- <&-")[0] == 0
    assert (tmp_path / "figure1.png").exists()
    assert in_a_shell("KLGRAD estimators 2>&- >/dev/null")[0] == 0


@pytest.mark.parametrize("command", [["compare", "--exact-only"], ["exact"], ["growth"]], ids=lambda each: each[0])
def test_a_table_of_millions_of_rows_is_refused_before_any_work(command, tmp_path):
    done = run(*command, "--lengths", "1:1000000", *(["--out", tmp_path] if command[0] == "growth" else []))
    assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1), done.output
    assert "past the limit of 100,000: take steps, such as --lengths 1:1000000:" in done.stderr
    mend = done.stderr.rpartition("--lengths ")[2].strip()
    assert len(range(*[int(n) + (i == 1) for i, n in enumerate(mend.split(":"))])) <= 100_000


def test_a_pair_s_file_may_have_any_name(tmp_path):
    np.savez(tmp_path / "pair.npz", **pair_arrays())
    strange = os.fsencode(tmp_path) + b"/caf\xe9.npz"
    os.rename(tmp_path / "pair.npz", strange)
    for command in (["report"], ["compare"]):
        arguments = ["--pair", os.fsdecode(strange), "--exact-only", "--lengths", "2", "-q", "--out", tmp_path / "out"]
        done = run(*command, *arguments)
        assert done.exit_code == 0, done.output
    assert r"caf\xe9" in (tmp_path / "out" / "report.html").read_text()
    assert r"caf\xe9" in (tmp_path / "out" / "compare.csv").read_text()
    assert run("reproduce", tmp_path / "out" / "compare.json", "-q").exit_code == 0


WRITES = ["dynamics", *(pytest.param(c, marks=pytest.mark.slow) for c in ("figure1", "growth", "report", "field"))]


@pytest.mark.parametrize("command", WRITES)
def test_what_is_overwritten_is_said(command, tmp_path):
    more = {
        "field": ["--task", "phase", "--config", "k1-in-reward", "--lengths", "1"],
        "dynamics": ["--task", "phase", "--steps", "1", "--seeds", "1", "--config", "none", "--samples", "2"],
    }.get(command, ["--preset", "near", "--lengths", "2", *(["--exact-only"] if command != "growth" else [])])
    first, second = (run(command, *more, "--out", tmp_path) for _ in range(2))
    assert first.exit_code == second.exit_code == 0, first.output + second.output
    assert ("wrote" in first.stdout, "replaced" in first.stdout) == (True, False)
    assert ("wrote" in second.stdout, "replaced" in second.stdout) == (False, True)
    assert first.stdout.rpartition("wrote ")[2] == second.stdout.rpartition("replaced ")[2]


def test_a_table_s_files_that_are_replaced_are_said_though_new_ones_are_not(tmp_path):
    first, second = (run("compare", "--exact-only", "--lengths", "2", "--out", tmp_path, "--json") for _ in range(2))
    assert first.stderr == ""
    assert second.stderr == f"note: replaced {tmp_path / 'compare.csv'}, {tmp_path / 'compare.json'}\n"
    assert first.stdout == second.stdout


def test_the_readme_shows_files_that_exist():
    import re

    root = Path(cli.__file__).parent
    named = re.findall(r"\]\(([^)#:]+)\)", (root / "README.md").read_text())
    assert "docs/figure1.png" in named
    assert all((root / name).exists() for name in named), named
