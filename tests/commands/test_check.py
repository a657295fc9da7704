"""`klgrad check`: text, JSON, exit codes, and the example repository."""

import json
import os
import subprocess
import sys
import textwrap
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from click.testing import CliRunner

from klgrad import cli

ROOT = Path(cli.__file__).resolve().parent


def run(*arguments):
    return CliRunner().invoke(cli.main, ["check", *map(str, arguments)])


@pytest.fixture
def code(tmp_path):
    path = tmp_path / "my_kl.py"
    path.write_text(
        textwrap.dedent("""
            import torch

            def penalty(logp, ref_logp):
                return logp - ref_logp

            def k3(logp, ref_logp):
                d = ref_logp - logp
                return d.exp() - d - 1

            def flipped(logp, ref_logp):
                return ref_logp - logp

            def odd(mine, ref_logp, scale):
                return scale * (mine - ref_logp)

            def broken(logp, ref_logp):
                raise KeyError("oops")
        """)
    )
    return path


def test_a_built_in_passes_or_fails_by_its_name():
    assert run("k1-in-reward").exit_code == 0
    failed = run("k3-in-loss")
    assert failed.exit_code == 1
    assert "forward KL" in failed.output
    assert failed.output.splitlines()[0] == "FAIL  k3-in-loss: loss FAIL: token-forward"
    assert run("k3-in-loss", "--target", "token-forward").exit_code == 0


def test_a_file_is_checked(code):
    done = run(f"{code}:penalty", "--placement", "reward")
    assert done.exit_code == 0, done.output
    assert done.output.startswith("PASS")
    assert run(f"{code}:penalty", "--placement", "loss").exit_code == 1
    assert run(f"{code}:flipped").exit_code == 1
    assert run(f"{code}:flipped", "--returns", "reward", "--placement", "reward").exit_code == 0
    odd = ("--map", "mine=log_probs", "--arg", "scale=1.0", "--placement", "both")
    assert run(f"{code}:odd", *odd).exit_code == 0


def test_json_carries_everything(code):
    data = json.loads(run(f"{code}:k3", "--json").output)
    assert not data["passed"]  # the placements differ, and none was asked for
    assert data["gives_target"] == ["both"]
    assert data["gradient"]["loss"]["verdict"] == "token-forward"
    assert data["gradient"]["both"]["verdict"] == "sequence"
    assert data["function"].endswith("my_kl.py:k3")


def test_quiet_prints_the_verdict_alone(code):
    done = run(f"{code}:k3", "-q")
    assert len(done.output.splitlines()) == 1
    assert done.output.startswith("FAIL")
    assert "reward FAIL: sequence - token-forward · loss FAIL: token-forward · both PASS" in done.output
    assert run(f"{code}:k3", "-q", "--placement", "both").output.startswith("PASS")


def test_a_traceback_is_shown_on_request(code):
    assert "Traceback" not in run(f"{code}:broken").output
    verbose = run(f"{code}:broken", "-v")
    assert "Traceback" in verbose.output
    assert verbose.exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["k9"], "no built-in"),
        (["K3"], "did you mean 'k3'?"),
        (["K3-in-loss"], "did you mean 'k3'?"),
        (["FILE"], "which function in it is not said: write FILE:penalty, or :"),
        (["absent.py"], "write absent.py:NAME"),
        (["k3-in-los"], "placement"),
        (["FILE:odd"], "cannot fill the parameter 'mine'"),
        (["FILE:penalty", "--map", "logp"], "THEIRS=OURS"),
        (["FILE:penalty", "--arg", "x"], "name=value"),
        (["FILE:absent"], "it has penalty, k3"),
        (["FILE:penalty", "--target", "everything"], "unknown target"),
    ],
)
def test_bad_use_exits_with_2_and_one_sentence(code, arguments, words):
    done = run(*(a.replace("FILE", str(code)) for a in arguments))
    assert done.exit_code == 2
    assert words.replace("FILE", str(code)) in done.output
    assert "Traceback" not in done.output


def test_the_example_repository_tests_itself(tmp_path):
    """examples/kl_in_ci, with the plugin that an installed klgrad brings; its suite fails when the loss is wrong."""
    folder = tmp_path / "repository"
    folder.mkdir()
    for path in (ROOT / "examples/kl_in_ci").iterdir():
        if path.is_file():
            (folder / path.name).write_bytes(path.read_bytes())
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    if not entry_points(group="pytest11", name="klgrad"):  # the sources alone: what an installation declares, by hand
        command += ["-p", "klgrad.analysis.pytest_plugin"]

    def suite():
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=os.environ)

    done = suite()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
    source = (folder / "kl_loss.py").read_text()
    (folder / "kl_loss.py").write_text(source.replace("(later * ", "(log_ratio * "))
    failed = suite()
    assert failed.returncode == 1
    assert "in the loss" in failed.stdout


def test_the_timeout_covers_importing_the_module(tmp_path):
    (tmp_path / "endless.py").write_text("while True:\n    pass\n")
    done = run(f"{tmp_path / 'endless.py'}:penalty", "--timeout", "0.5")
    assert (done.exit_code, len(done.stderr.strip().splitlines())) == (2, 1)
    assert "takes more than 0.5 seconds: give a longer --timeout" in done.stderr


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (".", ". is a folder: name the file, FILE.py:penalty"),
        ("..", ".. is a folder: name the file, ../FILE.py:penalty"),
        ("./kl", "'./kl' is no module's name: write FILE.py or package.module"),
    ],
)
def test_a_relative_module_is_one_sentence(place, said):
    done = run(f"{place}:penalty")
    assert done.exit_code == 2
    assert said in done.stderr
