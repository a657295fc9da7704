"""The corpus: right verdicts, refusals where there must be none, and hardly an alarm that is not due."""

from functools import cache

import pytest
from config_files import corpus

from klgrad.analysis.composition import documents
from klgrad.analysis.lint import examine

FILES = list(corpus())
_OF_THE_TEXT = ("unknown-key", "unknown-value", "unresolved", "missing-file", "unknown-version", "repeated-key")


@cache
def examined(name, text):
    (run,) = examine(documents(text, name))
    return run


def test_the_corpus_has_every_trainer_and_edition_that_a_file_can_tell():
    from klgrad.analysis.libraries import libraries

    assert len(FILES) >= 150
    by_name_or_memory = {
        "rl4lms",
        "trlx",
        "llama-factory",
        "transparent-grpo",
        "unsloth",
        "trl-ppo",
        "torchtune-ppo",
        "miles",
    }
    assert set(libraries()) - by_name_or_memory <= {library for _, _, _, library, _, _ in FILES}


@pytest.mark.parametrize(
    ("name", "text", "library", "field", "coefficient"), [f[1:] for f in FILES], ids=[f[0] for f in FILES]
)
def test_a_file_gets_the_right_verdict_or_none(name, text, library, field, coefficient):
    report = examined(name, text).report
    assert report.resolution.library.name == library
    if field == "open":
        assert report.open
        return
    assert not report.open, [f for f in report.findings if f.level == "open"]
    assert (report.reading.name if report.reading else "none") == field
    if coefficient is not None:
        assert report.resolution.penalties[0].coefficient == coefficient


def test_an_alarm_that_is_not_due_comes_in_one_file_of_twenty_at_most():
    alarms = [
        (name, finding.message)
        for name, file, text, _, field, _ in FILES
        if field != "open"
        for finding in examined(file, text).report.findings
        if finding.level == "warning" and finding.id in _OF_THE_TEXT
    ]
    assert len(alarms) <= len(FILES) / 20, alarms
