"""klgrad audit: what it says where nothing is installed, and its exit codes."""

import json

import pytest
from click.testing import CliRunner

from klgrad import cli
from klgrad.analysis import auditing
from klgrad.analysis.auditing import Row


def run(*arguments):
    return CliRunner().invoke(cli.main, ["audit", *arguments])


@pytest.fixture
def found(monkeypatch):
    """Rows that the audit is made to find."""

    def put(*rows):
        monkeypatch.setattr(auditing, "audit", lambda adapters: list(rows))

    return put


ROW = Row("verl", "0.9.1", "f", "a=1", "loss", "token", "token", "agrees")


def test_what_is_not_installed_is_no_failure(found):
    found(Row("slime", "", "f", "", "", "", "", "not installed"))
    done = run("slime")
    assert done.exit_code == 0
    assert "1 not installed" in done.output


@pytest.mark.parametrize("status", ["drift", "broken"])
def test_a_drift_is_a_failure(found, status):
    found(ROW, Row("verl", "0.9.2", "f", "a=2", "loss", "token", "zero", status, "zero and not token"))
    done = run("verl")
    assert done.exit_code == 1
    assert "zero and not token" in done.output
    assert "called verl: verl.trainer.ppo.core_algos.kl_penalty" in done.output


def test_json_and_markdown(found):
    found(ROW)
    (row,) = json.loads(run("verl", "--json").stdout)
    assert (row["library"], row["status"], row["found"]) == ("verl", "agrees", "token")
    assert "| verl | 0.9.1 | a=1 | loss | token | token | agrees |  |" in run("verl", "--format", "markdown").output


def test_a_family_is_both_its_trainers(monkeypatch):
    seen = []
    monkeypatch.setattr(auditing, "audit", lambda adapters: seen.extend(a.library for a in adapters) or [ROW])
    run("tunix")
    assert seen == ["tunix-grpo", "tunix-ppo"]


def test_an_unknown_name_is_bad_use():
    done = run("varl")
    assert done.exit_code == 2
    assert "did you mean 'verl'" in done.output


def test_lists_of_settings_against_the_installed_source(monkeypatch):
    from klgrad.analysis import keylists

    source = keylists.SOURCES[0]
    found = keylists.Comparison(source, "9.9", ("a", "new"), ("new",), ("old",))
    monkeypatch.setattr(keylists, "compare", lambda names: iter([found, (keylists.SOURCES[1], "not installed")]))
    done = CliRunner().invoke(cli.main, ["audit", "--keys"])
    assert done.exit_code == 1
    assert f"{source.name}: differs, 2 settings in 9.9\n  + new\n  - old\n" in done.output
    assert f"{keylists.SOURCES[1].name}: not installed" in done.output
    written = []
    monkeypatch.setattr(keylists, "write", lambda *arguments: written.append(arguments))
    assert CliRunner().invoke(cli.main, ["audit", "--keys", "--write"]).exit_code == 0
    assert written == [(source, "9.9", ("a", "new"))]
    bad = CliRunner().invoke(cli.main, ["audit", "--write"])
    assert bad.exit_code == 2
    assert "give --keys with it" in bad.output
