"""The self-contained page: escaped, anchored, and the same each time."""

import re
from xml.etree import ElementTree

from matplotlib.figure import Figure

from klgrad.figures import page, svg, table


def drawing():
    figure = Figure(figsize=(2, 1))
    figure.subplots().plot([0, 1], [1, 0], label="a")
    return figure


def test_an_svg_stands_alone_and_is_the_same_each_time():
    text = svg(drawing(), "one")
    assert text == svg(drawing(), "one")
    inner = text[text.index("<svg") : text.rindex("</svg>") + len("</svg>")]
    ElementTree.fromstring(inner)
    assert "<text" not in inner  # letters are outlines: no font is needed
    assert set(re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', inner))
    assert all(name.startswith("one-") for name in re.findall(r'\bid="([^"]+)"', inner))


def test_two_figures_share_no_id():
    ids = re.findall(r'\bid="([^"]+)"', svg(drawing(), "one") + svg(drawing(), "two"))
    assert len(ids) == len(set(ids))


def test_tables_and_titles_are_escaped():
    text = page("<b>&", [("", "<p>first</p>"), ("A & B", table(["x", "n"], [["<i>", "1"]], text=1))])
    assert "<title>&lt;b&gt;&amp;</title>" in text
    assert "<td>&lt;i&gt;</td>" in text
    assert '<td class="number">1</td>' in text
    assert '<section id="a-b">' in text
    assert 'href="#a-b"' in text
    assert "<p>first</p>" in text
