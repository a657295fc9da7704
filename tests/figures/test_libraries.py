"""The libraries' table from a frame alone."""

import pandas as pd
import pytest

from klgrad.figures.libraries import FORMATS, libraries

ROW = {
    "name": "mine-grpo", "library": "Mine & Co", "version": "1.0", "read": "run, 2026-09", "default": "sequence / E|y|",
    "switched_on": "sequence / E|y|", "settings": "use_kl=true, kind=k1", "verdict": "sequence", "cannot": "",
}  # fmt: skip
FRAME = pd.DataFrame([ROW, {**ROW, "library": "Other", "switched_on": "zero", "settings": "", "cannot": "anything"}])


def test_text():
    text = libraries(FRAME)
    assert "the same" in text
    assert "Mine & Co 1.0 (--library mine-grpo)\n  use_kl=true, kind=k1\n  -> sequence" in text
    assert text.endswith("cannot have: anything")


def test_markdown_has_one_row_each_and_bars_that_are_no_columns():
    lines = libraries(FRAME, "markdown").splitlines()
    assert len(lines) == 4
    assert all(line.replace(r"\|", "").count("|") == 10 for line in lines)


def test_latex_is_escaped():
    text = libraries(FRAME, "latex")
    assert r"Mine \& Co" in text
    assert r"use\_kl=true" in text
    assert text.startswith("% What each")
    assert r"\texttt{-{}-library} & library & " in text
    assert "--library" not in text


@pytest.mark.parametrize("form", FORMATS)
def test_a_frame_that_lacks_a_column_is_refused(form):
    with pytest.raises(ValueError, match="lacks verdict"):
        libraries(FRAME.drop(columns="verdict"), form)


def test_an_unknown_format():
    with pytest.raises(ValueError, match="'html' is none of text, markdown, latex"):
        libraries(FRAME, "html")
