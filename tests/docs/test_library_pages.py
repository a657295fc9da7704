"""The pages on libraries: every command in them is run, and what they show is what it prints."""

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from klgrad import cli
from klgrad.analysis.libraries import libraries

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "libraries").glob("*.md"))
BLOCK = re.compile(r"^```console\n\$ (.+)\n((?:.*\n)*?)```$", re.MULTILINE)
BLOCKS = [(page, *match) for page in PAGES if page.stem != "audit" for match in BLOCK.findall(page.read_text())]


def printed(command, monkeypatch):
    """The lines of a command as a shell would run it from the repository's root."""
    monkeypatch.chdir(ROOT)
    echoed, pipe, rest = command.rpartition(" | ")
    words = shlex.split(rest)
    assert words[0] == "klgrad"
    text = shlex.split(echoed)[1] + "\n" if pipe else None
    done = CliRunner().invoke(cli.main, words[1:], input=text)
    assert done.exit_code in (0, 1) or "verdict       not known" in done.output, done.output
    return done.stdout.splitlines()


@pytest.mark.parametrize(("page", "command", "shown"), BLOCKS, ids=[f"{b[0].stem}-{i}" for i, b in enumerate(BLOCKS)])
def test_what_a_page_shows_is_what_the_command_prints(page, command, shown, monkeypatch):
    lines = iter(printed(command, monkeypatch))
    for line in shown.splitlines():  # in order; lines may be left out
        assert line in lines, f"{page.name}: {command}\nno longer prints: {line}"


def test_every_library_has_a_page_that_runs_its_lint():
    commands = [command for _, command, _ in BLOCKS]
    for name in libraries():
        assert any(f"--library {name}" in command or f"configs/{name}/" in command for command in commands), name


def test_the_page_on_verl_recommends_what_the_command_does():
    """Settings that are not the defaults, all of them, in the page's first block."""
    entry = libraries()["verl"]
    text = (ROOT / "docs" / "libraries" / "verl.md").read_text()
    block = re.search(r"```bash\n(.*?)```", text, re.DOTALL)[1].split()
    needed = {key: value for key, value in entry.unbiased.items() if value != entry.keys[key].default}
    assert "actor_rollout_ref.rollout.n" in needed
    assert {f"{key}={value}" for key, value in needed.items()} <= set(block)


def test_the_table_on_the_front_page_is_the_commands(monkeypatch):
    lines = printed("klgrad libraries --format markdown", monkeypatch)
    text = (ROOT / "docs" / "libraries" / "README.md").read_text()
    assert "\n".join(lines) in text


def test_pages_link_to_pages_that_are_there():
    for page in PAGES:
        for target in re.findall(r"\]\(([\w-]+\.md)\)", page.read_text()):
            assert (page.parent / target).is_file()
