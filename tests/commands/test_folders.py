"""One folder, one process: each command that writes one for long refuses a second by name (`llm`: `test_llm`)."""

import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from klgrad import cli, files
from klgrad.commands.folders import STORE, resumable

COMMANDS = {
    "figure1": ["figure1", "--exact-only", "--lengths", "2"],
    "growth": ["growth", "--lengths", "2"],
    "compare": ["compare", "--exact-only", "--lengths", "2"],
    "report": ["report", "--exact-only", "--lengths", "2"],
    "dynamics": ["dynamics", "--task", "phase", "--steps", "1", "--samples", "2", "--seeds", "1", "--workers", "1"],
    "field": ["field", "--task", "phase"],
}


REFUSED = {
    "steps": ["dynamics", "--task", "phase", "--steps", "0"],
    "group": ["compare", "--preset", "near", "--lengths", "2", "--config", "k1-in-reward+loo=7", "--samples", "100"],
    "scheduler": ["figure1", "--lengths", "2", "--scheduler", "tcp://127.0.0.1:1"],
}


@pytest.mark.parametrize("name", ["steps", "group", pytest.param("scheduler", marks=pytest.mark.slow)])
def test_a_refused_request_leaves_no_new_folder(name, tmp_path):
    (tmp_path / "there").mkdir()
    for out in (tmp_path / "there" / "new" / "deep", tmp_path / "there"):
        done = CliRunner().invoke(cli.main, [*REFUSED[name], "--out", str(out)])
        assert (done.exit_code, done.output[:6]) == (2, "Error:")
        assert [p.name for p in tmp_path.rglob("*")] == ["there"]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_folder_in_use_is_refused_by_name(name, tmp_path):
    (tmp_path / f"{name}.csv").write_text("whose it is\n")
    with files.sole_use(tmp_path):
        command = [sys.executable, "-m", "klgrad.cli", *COMMANDS[name], "--out", str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    said = f"{tmp_path} is in use by another klgrad (process {os.getpid()})"
    assert done.stderr == f"Error: {said}: wait for it, or give another folder\n"
    assert [p.name for p in tmp_path.iterdir()] == [f"{name}.csv"]


def test_an_interruption_names_what_is_kept_and_leaves_the_folder_free(tmp_path):
    def interrupted():
        with resumable(tmp_path / STORE):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        interrupted()
    (tmp_path / STORE).mkdir()
    with pytest.raises(KeyboardInterrupt, match=f"finished blocks are kept in {tmp_path / STORE}; the same command"):
        interrupted()
    assert [p.name for p in tmp_path.iterdir()] == [STORE]
