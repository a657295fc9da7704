"""Derivations as text, Markdown, LaTeX and HTML: the same content, readable, and nothing fetched."""

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from klgrad.analysis.derivations import DERIVATIONS, check, derivation
from klgrad.analysis.derivations.latex import MACROS, expand, mathml, plain
from klgrad.analysis.derivations.render import as_data, formats
from klgrad.analysis.derivations.terms import NOTATION
from klgrad.synth.presets import preset


def shown(name, lengths=None):
    found = derivation(name)
    lengths = lengths or found.lengths
    return check(found, preset(found.preset, max(lengths)), lengths)


def formulas():
    """Every LaTeX of every derivation."""
    for found in DERIVATIONS.values():
        for step in found.steps:
            yield from filter(None, (step.left, step.right, step.where, *step.reason.split("$")[1::2]))
        yield from found.conclusion.split("$")[1::2]
    for tex, words in (*NOTATION, *(pair for found in DERIVATIONS.values() for pair in found.notation)):
        yield from (tex, *words.split("$")[1::2])


@pytest.mark.parametrize(
    ("tex", "text"),
    [
        (r"\E{\sum_t \nabla\fKLt}", "E[Σ_t ∇KL_t(q‖π)]"),
        (r"\log\frac{\pi(y)}{q(y)}", "log(π(y)/q(y))"),
        (r"-\log r_t = \delta_t", "-log r_t = δ_t"),
        (r"\E{\left(\sum_t \delta_t\right)\score}", "E[(Σ_t δ_t) ∇log π(y)]"),
        (r"\sum_{u \ge t}\delta_u", "Σ_{u≥t} δ_u"),
        (r"(r_t - 1)^2 + x^{2k}", "(r_t - 1)² + x^(2k)"),
        (r"\frac{q(y)^2}{\pi(y) + 1}", "(q(y)²/(π(y) + 1))"),
        (r"\rho_{\le T}\,\pi^*(y_{<t})", "ρ_≤T π*(y_<t)"),
        (r"\E{\tfrac{1}{|y|}}", "E[1/|y|]"),
    ],
)
def test_plain_text_reads_like_mathematics(tex, text):
    assert plain(tex) == text


@pytest.mark.parametrize("tex", [r"\unheard x", r"\E{x", r"{x", "x}"])
def test_what_is_no_latex_of_ours_is_refused(tex):
    with pytest.raises(ValueError, match=r"no plain form|unbalanced"):
        plain(tex)


def test_every_formula_has_a_plain_form_and_a_typeset_one():
    every = set(formulas())
    assert len(every) > 150
    for tex in every:
        assert not re.search(r"[\\$]", plain(tex)), tex
        assert not re.search("|".join(re.escape(name) + r"(?![A-Za-z])" for name in MACROS), expand(tex)), tex
        root = ElementTree.fromstring(mathml(tex))
        assert root.tag.endswith("math")
        assert "\\" not in "".join(root.itertext()), tex


def test_k3_can_be_followed_in_the_terminal():
    text = formats()["text"](shown("k3"))
    for line in (
        "E[Σ_t k_{3,t}] = KL(π‖q)",
        "where k_{3,t} = r_t - 1 - log r_t",
        "E[Σ_t ∇k_{3,t}] = E[Σ_t (1 - r_t) ∇log π_t]",
        "-E[Σ_t Σ_v q(v|y_<t) ∇log π(v|y_<t)] = E[Σ_t ∇KL_t(q‖π)]",
        "E[Σ_t ∇k_{3,t}] = E[Σ_t ∇KL_t(q‖π)]",
    ):
        assert line in text
    assert "\nk3 in the loss is a token-level forward-KL gradient" in text
    assert "11 steps hold" in text
    assert not re.search(r"[\\$]", text)
    assert max(map(len, text.splitlines())) <= 110
    residuals = [float(x) for x in re.findall(r"residual (\S+)$", text, re.MULTILINE)]
    assert len(residuals) == 11
    assert max(residuals) < 1e-10


@pytest.mark.parametrize("name", DERIVATIONS)
def test_every_format_has_every_step(name):
    checked = shown(name)
    written = {form: write(checked) for form, write in formats().items()}
    assert written["markdown"].count("$$") == 2 * len(checked.results[0])
    assert written["markdown"].count(" | left | `") == written["markdown"].count(" | right | `") > 0
    assert written["latex"].count(r"\[") == len(checked.results[0])
    assert written["html"].count('<div class="step">') == len(checked.results[0])
    assert len(as_data(checked)["steps"]) == len(checked.results[0])
    assert written["latex"].startswith(r"\documentclass")
    assert not re.search(r"[^\x00-\x7f]", re.sub(r"[–’]", "", written["latex"])), "LaTeX in ASCII"


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.seen, self.attributes = [], set(), []

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        self.attributes += attrs
        if tag not in ("meta", "mspace"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in ("meta", "mspace"):
            assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.attributes += attrs


@pytest.mark.parametrize("name", DERIVATIONS)
def test_the_page_is_whole_and_fetches_nothing(name):
    page = formats()["html"](shown(name))
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert not {"script", "link", "img", "iframe"} & tags.seen
    assert not {"src", "href"} & {key for key, _ in tags.attributes}
    assert "url(" not in page
    assert "@import" not in page
    assert "$" not in page


def test_several_lengths_stand_side_by_side():
    text = formats()["text"](shown("k1", (1, 2)))
    assert "T = 1 left " in text
    assert "T = 2 residual" in text
    assert [s["length"] for s in as_data(shown("k1", (1, 2)))["steps"][0]["sides"]] == [1, 2]


def test_long_vectors_are_told_by_their_norm():
    checked = check(derivation("k1"), preset("words"), [1])
    assert "240 numbers of norm" in formats()["text"](checked)


def test_words_of_a_users_pair_are_escaped():
    from dataclasses import replace

    checked = check(derivation("k1"), replace(preset("near"), name="<b>&_#$x"), [1])
    assert "<b>" not in formats()["html"](checked)
    assert "<b>&_#" in formats()["text"](checked)


def test_a_comparison_says_when_its_sides_coincide():
    differ = "Nor is it the sequence-level forward KL"
    for lengths, coincide in (([1], True), ([2], False), ([1, 2], False)):
        told = formats()["text"](check(derivation("k3"), preset("far"), lengths))
        assert (differ not in told, "Here the two coincide." in told) == (coincide, coincide)


def test_rounding_has_no_direction():
    told = formats()["text"](check(derivation("aggregation"), preset("near"), [3]))
    assert "of the right side), cosine -\n" in told
    assert "cosine 0.7966" not in told
