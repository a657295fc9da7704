"""klgrad libraries: the table in every format."""

import json

import pytest
from click.testing import CliRunner

from klgrad import cli
from klgrad.analysis.libraries import libraries


def run(*arguments):
    return CliRunner().invoke(cli.main, ["libraries", *arguments])


def test_the_table_has_every_library():
    done = run()
    assert done.exit_code == 0
    for entry in libraries().values():
        assert f"{entry.title} {entry.version} (--library {entry.name})" in done.output
    assert max(map(len, done.output.splitlines())) <= 110


def test_json():
    rows = json.loads(run("--json").stdout)
    assert [row["name"] for row in rows] == list(libraries())
    row = next(row for row in rows if row["name"] == "trl-rloo")
    assert row["default"] == row["verdict"] == "sequence"
    assert row["source"] == ["trl/trainer/rloo_trainer.py"]


def test_one_library_in_markdown_and_latex():
    markdown = run("tunix-grpo", "--format", "markdown").output.splitlines()
    assert len(markdown) == 3
    assert markdown[2].startswith("| tunix-grpo | Tunix GRPO | 0.1.7 | run, 2026-06 | zero, provided")
    latex = run("tunix-grpo", "--format", "latex").output
    assert r"kl\_loss\_mode=mse\_kl" in latex
    assert latex.count(r"\\") == 2


def test_keys():
    done = run("slime", "--keys")
    assert "kl_loss_type" in done.output
    assert "k1 k2 k3 low_var_kl" in done.output
    rows = json.loads(run("slime", "--keys", "--json").stdout)
    assert {row["key"]: row["default"] for row in rows}["use_unbiased_kl"] is False


@pytest.mark.parametrize(("arguments", "says"), [(["varl"], "did you mean 'verl'"), (["--format", "html"], "html")])
def test_bad_use(arguments, says):
    done = run(*arguments)
    assert done.exit_code == 2
    assert says in done.output
