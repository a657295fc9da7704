"""Every code block and every command in the README and the documentation is run, where a reader would run it.

Fenced blocks: ``python`` is executed, all blocks of a page in one namespace; one with a title is written to a file of
that name; ``sh`` and unnamed blocks hold commands, one a line; ``text`` is output. Commands within sentences, tables
and indented lists are run as well, but for those with a placeholder in capitals, of which the command must exist.
Configurations in indented lists are parsed.
"""

import contextlib
import io
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from klgrad.cli import COMMANDS, main
from klgrad.commands.llm import llm
from klgrad.synth.configurations import parse

ROOT = Path(__file__).parents[2]
# those on libraries have a test of their own, which also holds them to what is printed
PAGES = [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").rglob("*.md") if p.parent.name != "libraries")]
FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^(?:    .*\n)+", re.MULTILINE)
SPAN = re.compile(r"`(klgrad [^`]+)`")
PLACEHOLDER = re.compile(r"\b[A-Z]{3,}\b")
SLOW = ("figure1", "growth", "check", "report", "dynamics", "field", "stability")  # commands that take seconds
SLOW_PAGES = ("engineer.md",)
SHELL = ("", "sh")
EITHER = ("check", "lint")  # commands that may fail what they look at


def blocks(page):
    """Language, title and text of every fenced block."""
    for language, rest, text in FENCE.findall(page.read_text()):
        title = re.search(r'title="([^"]+)"', rest)
        yield language, title and title[1], text


def lines(page):
    """Every command line of a page, from blocks, indented lists and sentences."""
    text = page.read_text()
    for language, _, block in blocks(page):
        if language in SHELL:
            yield from (line.strip().removeprefix("$ ") for line in block.splitlines() if line.strip())
    bare = FENCE.sub("", text)
    for listing in INDENTED.findall(bare):
        yield from (re.split(r"\s{2,}", line.strip())[0] for line in listing.splitlines() if "klgrad " in line)
    yield from SPAN.findall(bare)


def commands():
    """Every command once, with the first page it stands on; the slow ones marked."""
    found = {}
    for page in PAGES:
        for line in lines(page):
            found.setdefault(line, page)
    return [
        pytest.param(line, page, id=f"{page.name}: {line}", marks=[pytest.mark.slow] if line.split()[1] in SLOW else [])
        for line, page in found.items()
    ]


def write_titled(page, folder):
    """The files that a page tells its reader to write."""
    for language, title, text in blocks(page):
        if title:
            assert language == "python"
            (folder / title).write_text(text)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A reader's working folder: with the examples and a pair, which pages speak of without showing it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.delitem(sys.modules, "my_kl", raising=False)  # that of another page
    (tmp_path / "examples").symlink_to(ROOT / "examples")  # commands are those of somebody in the repository
    logits = {"policy_logits": [[0.0, 1.0]], "reference_logits": [[0.0, 0.0]]}
    np.savez("mine.npz", next_context=[[0, 0]], start=0, end=-1, **logits)
    return tmp_path


@pytest.mark.parametrize(("line", "page"), commands())
def test_command(line, page, folder):
    if line.startswith("make "):
        target = line.split()[1]
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), line
        return
    echoed, _, line = line.rpartition(" | ")
    words = shlex.split(line)
    assert words[0] == "klgrad", f"{line!r} on {page.name} is no command that can be tried"
    named = [word for word in words[1:] if word.strip(",") in COMMANDS or word == "--help"]
    assert named, line
    if PLACEHOLDER.search(line) or "," in words[1]:
        assert words[1].strip(",") in COMMANDS
        return
    if words[1] == "llm":  # needs a model and minutes; tests/commands/test_llm.py runs each, smaller
        for name in words[2:3]:
            llm.commands[name].make_context(name, words[3:])
        return
    if words[1] == "digits":  # ten seconds; tests/analysis/test_digits.py runs it
        assert words == ["klgrad", "digits"]
        return
    write_titled(page, folder)
    given = " ".join(shlex.split(echoed)[1:]) if echoed.startswith("echo ") else None
    done = CliRunner().invoke(main, words[1:], input=given, catch_exceptions=False)
    allowed = (0, 1) if words[1] in EITHER else (0,)
    assert done.exit_code in allowed, done.output
    assert done.stdout


def with_python():
    return [
        pytest.param(page, id=page.name, marks=[pytest.mark.slow] if page.name in SLOW_PAGES else [])
        for page in PAGES
        if any(language == "python" for language, _, _ in blocks(page))
    ]


@pytest.mark.parametrize("page", with_python())
def test_python(page, folder):
    write_titled(page, folder)
    namespace = {"__name__": "page"}
    with contextlib.redirect_stdout(io.StringIO()):
        for language, title, text in blocks(page):
            if language == "python" and not title:
                exec(compile(text, page.name, "exec"), namespace)


def test_every_block_is_of_a_kind_that_is_run():
    for page in PAGES:
        assert {language for language, _, _ in blocks(page)} <= {*SHELL, "python", "text"}, page.name


def test_configurations_in_lists_parse():
    found = []
    for listing in INDENTED.findall(FENCE.sub("", (ROOT / "README.md").read_text())):
        found += [line.split()[0] for line in listing.splitlines() if re.match(r"\s+\S+-in-", line)]
    assert len(found) >= 4
    for name in found:
        parse(name)


@pytest.mark.parametrize(
    "text", ["```sh\nklgrad nonsense\n```\n", "See `klgrad exakt`.\n", "    klgrad nothing   a list\n"]
)
def test_a_wrong_command_would_be_seen(text, tmp_path, folder):
    page = tmp_path / "page.md"
    page.write_text(text)
    (line,) = lines(page)
    with pytest.raises(AssertionError):
        test_command(line, page, folder)


def test_broken_python_would_be_seen(tmp_path, folder):
    page = tmp_path / "page.md"
    page.write_text("```python\nassert 1 == 2\n```\n")
    with pytest.raises(AssertionError):
        test_python(page, folder)
