"""Code as people have it, checked: the right passes at its own target, the wrong fails with its cause named.

Every entry's claim is shown twice: by ``check``, and by the oracle, which enumerates on its own. The sample that runs
by default is a dozen of each; ``make slow`` runs all.
"""

import importlib
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from corpus.faults import FAULTS, sound

from klgrad.analysis import check


def corpus(side):
    """The entries of all files of a side."""
    names = sorted(path.stem for path in Path(__file__).parent.glob(f"{side}_*.py"))
    return [entry for name in names for entry in importlib.import_module(f"corpus.{name}").CORPUS]


RIGHT, WRONG = corpus("right"), corpus("wrong")
SAMPLE = 12


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tensors of a few numbers: waiting for a second thread costs more than it does."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def sampled(entries):
    """All entries, a dozen of them not slow."""
    stride = len(entries) // SAMPLE
    slow = pytest.mark.slow
    return [pytest.param(e, id=e.name, marks=() if i % stride == 0 else slow) for i, e in enumerate(entries)]


def checked(entry):
    return check(entry.function, target=entry.target, placement=entry.placement, **entry.options)


def told(report):
    """What a report says without its notes."""
    notes = {f.message for f in report.findings if f.level == "info"}
    lines = [line for line in str(report).splitlines() if not any(note in line for note in notes)]
    return "\n".join([*lines, *(f.message for f in report.findings if f.level != "info")])


@pytest.mark.parametrize("entry", sampled(RIGHT))
def test_right_passes_without_a_false_warning(entry):
    report = checked(entry)
    assert report.passed, str(report)
    warned = [f.message for f in report.findings if f.level == "warning"]
    assert [m for m in warned if not any(re.search(true, m) for true in entry.warns)] == []


@pytest.mark.parametrize("entry", sampled(WRONG))
def test_wrong_fails_by_name(entry):
    report = checked(entry)
    found = told(report)
    assert not report.passed or entry.level == "any", str(report)
    assert any(f.level != "info" for f in report.findings), str(report)
    assert any(re.search(cause, found) for cause in entry.causes), str(report)
    assert not any(re.search(reason, found) for reason in entry.never), str(report)


def test_the_corpora_are_as_large_as_the_documentation_says():
    assert len({e.name for e in RIGHT}) == len(RIGHT) >= 70
    assert len({e.name for e in WRONG}) == len(WRONG) >= 130
    text = " ".join((Path(__file__).parents[2] / "docs" / "engineer.md").read_text().split())
    assert f"a corpus of {len(RIGHT)} right functions" in text
    assert f"of {len(WRONG)} wrong ones" in text


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's own tracing looks at it
@pytest.mark.parametrize("entry", RIGHT, ids=lambda e: e.name)
def test_the_oracle_finds_nothing_wrong(entry):
    assert sound(entry) == []


@pytest.mark.filterwarnings("ignore:reduction:UserWarning")  # F.kl_div warns of the mean that is tried here
@pytest.mark.filterwarnings("ignore:(invalid|divide):RuntimeWarning")
@pytest.mark.parametrize("entry", WRONG, ids=lambda e: e.name)
def test_the_oracle_shows_the_fault(entry):
    assert FAULTS[entry.shows](entry)


@pytest.mark.parametrize("entry", RIGHT[:: len(RIGHT) // SAMPLE], ids=lambda e: e.name)
def test_the_oracle_refuses_right_code_at_another_target(entry):
    other = "token" if entry.target == "sequence" else "sequence"
    assert FAULTS["field"](replace(entry, target=other))


def test_every_kind_of_fault_is_there():
    assert {e.shows for e in WRONG} == set(FAULTS)
