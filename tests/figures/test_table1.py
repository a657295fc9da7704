"""Table 1 in its formats: same cells, aligned, escaped, never wider than a terminal."""

import numpy as np
import pandas as pd
import pytest

from klgrad.figures import table1

WORDS = {
    "k1-in-reward": "sequence",
    "k1-in-loss": "zero",
    "k3-in-reward": "sequence - token-forward",
    "odd_one-in-loss": "50% | other",
}


def frame(lengths=(1, 20), names=tuple(WORDS), preset="near"):
    rows = []
    for name in names:
        estimator, rest = name.split("-in-")
        for length in lengths:
            value = {"k1-in-reward": 3e-16, "k1-in-loss": 1.0, "odd_one-in-loss": 1234.5}.get(name, 0.02664663)
            rows.append((preset, name, estimator, rest.split("+")[0], length, "exact", value))
    columns = ["preset", "configuration", "estimator", "placement", "length", "source", "relative_bias"]
    return pd.DataFrame(rows, columns=columns)


def test_text():
    assert table1(frame(), WORDS) == (
        "near: relative bias |E g - grad KL| / |grad KL|, exact\n"
        "estimator  placement  expected gradient            T = 1    T = 20\n"
        "------------------------------------------------------------------\n"
        "k1         reward     sequence                         0         0\n"
        "k1         loss       zero                          1.00      1.00\n"
        "k3         reward     sequence - token-forward    0.0266    0.0266\n"
        "odd_one    loss       50% | other               1.23e+03  1.23e+03"
    )


def test_markdown():
    lines = table1(frame(), WORDS, "markdown").splitlines()
    assert lines[2] == "| estimator | placement | expected gradient | T = 1 | T = 20 |"
    assert lines[3] == "| --- | --- | --- | ---: | ---: |"
    assert lines[-1] == "| odd_one | loss | 50% \\| other | 1.23e+03 | 1.23e+03 |"
    assert len({line.replace("\\|", "").count("|") for line in lines[2:]}) == 1


def test_latex():
    text = table1(frame(), WORDS, "latex")
    assert "\\begin{tabular}{lllrr}\n\\toprule" in text
    assert text.endswith("\\bottomrule\n\\end{tabular}")
    assert "k3 & reward & sequence $-$ token-forward & 0.0266 & 0.0266 \\\\" in text
    assert "odd\\_one & loss & 50\\% \\textbar{} other & $1.23\\times 10^{3}$ & $1.23\\times 10^{3}$ \\\\" in text
    assert text.count("\\addlinespace") == 2
    assert "$-$0.5 token" in table1(frame(names=("k1-in-loss",)), {"k1-in-loss": "-0.5 token"}, "latex")


def test_options_stay_with_the_placement():
    assert "k1         reward+rtg+divide=3" in table1(frame(names=("k1-in-reward+rtg+divide=3",)), {})


@pytest.mark.parametrize("count", [1, 16, 60])
def test_text_fits_a_hundred_columns_and_shows_every_length(count):
    long = "sequence + 0.3333 token - 0.3333 token-forward - something else altogether"
    text = table1(frame(tuple(range(5, 5 + count))), {**WORDS, "k3-in-reward": long})
    assert max(map(len, text.splitlines())) <= 100
    heads = [line for line in text.splitlines() if line.startswith("estimator")]
    assert [int(part.split()[0]) for line in heads for part in line.split("T = ")[1:]] == list(range(5, 5 + count))
    assert all(word in text for word in long.split())


def test_several_presets_are_sections():
    text = table1(pd.concat([frame(), frame(preset="far")]), WORDS)
    assert [block.split(":")[0] for block in text.split("\n\n")] == ["near", "far"]


def test_what_is_missing_or_infinite_is_shown_as_such():
    rows = frame(names=("k1-in-reward", "k1-in-loss"))
    rows.loc[0, "relative_bias"] = np.nan
    rows.loc[1, "relative_bias"] = np.inf
    text = table1(rows.drop(index=3), {})
    assert text.splitlines()[3].split()[2:] == ["-", "-", "inf"]
    assert text.splitlines()[4].split()[2:] == ["-", "1.00", "-"]
    assert "$\\infty$" in table1(rows, {}, "latex")


def test_only_exact_rows_count():
    sampled = frame().assign(source="monte_carlo", relative_bias=9.0)
    assert table1(pd.concat([sampled, frame()]), WORDS) == table1(frame(), WORDS)
    for nothing in (sampled, frame()[:0]):
        with pytest.raises(ValueError, match="no exact rows"):
            table1(nothing, WORDS)


def test_an_unknown_format_is_refused():
    with pytest.raises(ValueError, match="'rtf' is none of text, markdown, latex, html"):
        table1(frame(), WORDS, "rtf")


def test_html_has_a_row_for_each_configuration_and_is_escaped():
    text = table1(frame(preset="<b>"), {**WORDS, "k1-in-loss": "<i>"}, "html")
    assert text.count("<tr>") == 1 + len(WORDS)
    assert "&lt;b&gt;: relative bias" in text
    assert "<td>&lt;i&gt;</td>" in text
    assert '<td class="number">1.23e+03</td>' in text
