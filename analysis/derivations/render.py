"""A checked derivation as text, Markdown, LaTeX or HTML: for the terminal, the documentation and the classroom."""

from __future__ import annotations

import html as entities
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from klgrad.analysis.derivations.latex import expand, mathml, plain
from klgrad.analysis.derivations.steps import PARTS, Checked, Comparison, Result
from klgrad.analysis.derivations.terms import NOTATION
from klgrad.analysis.results import finite

WIDTH = 100
FINE = 1e-10  # of the sides: where an error as small as that would be seen, nothing is said of rounding
_MOST = 8  # numbers of one side that are written out

Numbers = list[tuple[str, str]]


def formats() -> dict[str, Callable[[Checked], str]]:
    """How a derivation can be written."""
    return {"text": text, "markdown": markdown, "latex": latex, "html": page}


def as_data(checked: Checked) -> dict[str, Any]:
    """For JSON: every step with its LaTeX, its plain text, both sides and the residual, by length."""
    steps = []
    for _, _, results in _grouped(checked):
        step = results[0].step
        claim = {"relation": "against" if isinstance(step, Comparison) else "=", "part": step.part}
        latex = {"left": expand(step.left), "right": expand(step.right), "where": expand(step.where)}
        sides = [
            {
                "length": n,
                "left": finite(r.left.tolist()),
                "right": finite(r.right.tolist()),
                "residual": r.residual,
                "rounding": r.rounding,
                "untold": r.untold,
            }
            for n, r in zip(checked.lengths, results, strict=True)
        ]
        reason = {"reason": inline(_reason(results), plain), "plain": plain(_equation(results[0]))}
        steps.append({**claim, "latex": latex, **reason, "sides": sides})
    shown = checked.derivation
    return {
        "name": shown.name, "title": shown.title, "source": shown.source, "pair": checked.pair.name,
        "conclusion": inline(shown.conclusion, plain), "largest_residual": checked.largest_residual, "steps": steps,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------ what to write


def _setting(checked: Checked) -> str:
    lengths = ", ".join(map(str, checked.lengths))
    return (
        f"Shown on the pair {checked.pair.name}, T = {lengths}. Means are sums over every sequence; KL in nats; "
        "gradients are of the penalty, so descending them reduces it."
    )


def _verdict(checked: Checked) -> str:
    steps = sum(not isinstance(r.step, Comparison) for r in checked.results[0]) - checked.untold
    said = f", {checked.untold} cannot be told here" if checked.untold else ""
    return f"{steps} steps hold{said}; the largest residual is {checked.largest_residual:.1g} of the largest term."


def _vector(side: np.ndarray) -> str:
    if side.ndim == 0:
        return f"{float(side):.12g}"
    if side.ndim == 2:
        return "; ".join(_vector(row) for row in side)
    if side.size > _MOST:
        return f"{side.size} numbers of norm {np.linalg.norm(side):.12g}"
    return "(" + ", ".join(f"{x:.10g}" for x in np.where(np.abs(side) < 5e-17, 0.0, side)) + ")"


def numbers(result: Result) -> Numbers:
    """Both sides of a step as labelled text, and how far apart they are."""
    found = [("left", _vector(result.left)), ("right", _vector(result.right))]
    if isinstance(result.step, Comparison):
        return [*found, ("apart", _distance(result))]
    if result.step.printed is not None:
        return [*found, ("residual", "within the printed digits")]
    told = f", told to {result.resolution:.0e} of the sides" if result.resolution > FINE else ""
    return [*found, ("residual", result.untold or f"{result.residual:.1g}{told}")]


def _distance(result: Result) -> str:
    left, right = result.left, result.right
    gap, size = float(np.linalg.norm(left - right)), float(np.linalg.norm(right))
    shown = f"{gap:.4g}" + ("" if result.vanishes(right) else f" ({gap / size:.3g} of the right side)")
    if left.ndim == 0:
        return shown
    if result.vanishes(left) or result.vanishes(right):
        return f"{shown}, cosine -"  # rounding points nowhere
    return f"{shown}, cosine {float(left.ravel() @ right.ravel()) / (float(np.linalg.norm(left)) * size):.4f}"


def _reason(results: list[Result]) -> str:
    """Why a step holds; of a comparison what it shows, unless the two sides are equal on this pair at every length."""
    shown = isinstance(results[0].step, Comparison) and all(result.coincide for result in results)
    return "Here the two coincide." if shown else results[0].step.reason


def _equation(result: Result) -> str:
    relation = r"\quad\text{against}\quad" if isinstance(result.step, Comparison) else "="
    return f"{result.step.left} {relation} {result.step.right}"


def _grouped(checked: Checked) -> Iterator[tuple[str, int, list[Result]]]:
    """Every step with its heading (where it changes) and number; one result for each length."""
    part = None
    for i, each in enumerate(zip(*checked.results, strict=True)):
        heading = PARTS[each[0].step.part] if each[0].step.part != part else ""
        part = each[0].step.part
        yield heading, i + 1, list(each)


def _rows(checked: Checked, results: list[Result]) -> Iterator[tuple[str, Numbers]]:
    several = len(checked.lengths) > 1
    for length, result in zip(checked.lengths, results, strict=True):
        yield (f"T = {length}" if several else ""), numbers(result)


def _notation(checked: Checked) -> tuple[tuple[str, str], ...]:
    return (*NOTATION, *checked.derivation.notation)


def inline(words: str, math: Callable[[str], str], escape: Callable[[str], str] = str) -> str:
    """A sentence with the mathematics between its dollar signs rendered, the rest escaped."""
    pieces = words.split("$")
    return "".join(math(piece) if i % 2 else escape(piece) for i, piece in enumerate(pieces))


# -------------------------------------------------------------------------------------------------------- text


def text(checked: Checked) -> str:
    """For a terminal: one line of Unicode for every formula, the reason under it, then both sides as numbers."""
    shown = checked.derivation
    out = [
        f"{shown.title}",
        *_wrapped(f"source: {shown.source}", ""),
        "",
        *_wrapped(_setting(checked), ""),
        "",
    ]
    notation = [(plain(tex), inline(words, plain)) for tex, words in _notation(checked)]
    width = max(len(symbol) for symbol, _ in notation)
    for symbol, words in notation:
        out += _wrapped(words, " " * (width + 4), first=f"  {symbol:<{width}}  ")
    for heading, number, results in _grouped(checked):
        if heading:
            out += ["", heading]
        out += ["", *_formula(number, results[0])]
        out += _wrapped(inline(_reason(results), plain), "      ")
        for label, sides in _rows(checked, results):
            for name, value in sides:
                out.append(f"        {label + ' ' if label else ''}{name:<9}{value}")
    return "\n".join([*out, "", *_wrapped(inline(shown.conclusion, plain), ""), _verdict(checked)])


def _formula(number: int, result: Result) -> list[str]:
    left, right = plain(result.step.left), plain(result.step.right)
    relation = "against" if isinstance(result.step, Comparison) else "="
    whole = f"{number:>3}.  {left} {relation} {right}"
    lines = [whole] if len(whole) <= WIDTH else [f"{number:>3}.  {left}", f"        {relation} {right}"]
    return lines + ([f"        where {plain(result.step.where)}"] if result.step.where else [])


def _wrapped(words: str, indent: str, first: str | None = None) -> list[str]:
    return textwrap.wrap(words, WIDTH, initial_indent=indent if first is None else first, subsequent_indent=indent)


# ---------------------------------------------------------------------------------------------------- Markdown


def markdown(checked: Checked) -> str:
    """Markdown with LaTeX between dollar signs."""

    def small(tex: str) -> str:
        return f"${expand(tex)}$"

    shown = checked.derivation
    out = [f"# {shown.title}", f"*Source: {shown.source}.*", _setting(checked)]
    out.append("\n".join(f"- {small(tex)}: {inline(words, small)}" for tex, words in _notation(checked)))
    for heading, number, results in _grouped(checked):
        if heading:
            out.append(f"## {heading}")
        where = f" Here {small(results[0].step.where)}." if results[0].step.where else ""
        out.append(f"**{number}.** {inline(_reason(results), small)}{where}")
        out.append(f"$$\n{expand(_equation(results[0]))}\n$$")
        out.append(_table(checked, results))
    return "\n\n".join([*out, f"**{inline(shown.conclusion, small)}**", _verdict(checked)]) + "\n"


def _table(checked: Checked, results: list[Result]) -> str:
    """A row for each number: side by side, two vectors are wider than a page."""
    body = ["| T | | |", "|---|---|---|"]
    for length, (_, sides) in zip(checked.lengths, _rows(checked, results), strict=True):
        body += [f"| {length} | {name} | `{value}` |" for name, value in sides]
    return "\n".join(body)


# ------------------------------------------------------------------------------------------------------- LaTeX


def latex(checked: Checked) -> str:
    """A whole LaTeX document."""
    shown = checked.derivation

    def said(words: str) -> str:
        return inline(words, lambda tex: f"${expand(tex)}$", _latex_words)

    out = [
        r"\documentclass{article}",
        r"\usepackage{amsmath,amssymb}",
        r"\begin{document}",
        rf"\section*{{{said(shown.title)}}}",
        said(f"Source: {shown.source}. {_setting(checked)}"),
    ]
    items = [rf"\item ${expand(tex)}$: {said(words)}" for tex, words in _notation(checked)]
    out += [r"\begin{itemize}", *items, r"\end{itemize}"]
    for heading, number, results in _grouped(checked):
        if heading:
            out.append(rf"\subsection*{{{heading}}}")
        where = f" Here ${expand(results[0].step.where)}$." if results[0].step.where else ""
        out.append(rf"\noindent\textbf{{{number}.}} {said(_reason(results))}{where}")
        out.append(rf"\[ {expand(_equation(results[0]))} \]")
        for length, (_, sides) in zip(checked.lengths, _rows(checked, results), strict=True):
            shown_sides = "; ".join(f"{name} {value}" for name, value in sides)
            out.append(rf"{{\footnotesize\ttfamily\raggedright T = {length}: {_latex_words(shown_sides)}\par}}")
    return "\n".join([*out, rf"\medskip\noindent {said(shown.conclusion)}", _verdict(checked), r"\end{document}", ""])


def _latex_words(words: str) -> str:
    return re.sub(r"([_%&#])", r"\\\1", words).replace("^", r"\^{}")


# -------------------------------------------------------------------------------------------------------- HTML

STYLE = """
math {
  font-size: 1.1em;
  font-family: "STIX Two Math", "Cambria Math", "Latin Modern Math", STIXGeneral, math;
}
math[display="block"] { overflow: auto hidden; max-width: 100%; margin: .6rem 0; padding-bottom: .3rem; }
@media print { math[display="block"], .numbers { overflow: visible; } }
.step { border-top: 1px solid #8884; padding: .6rem 0; break-inside: avoid; }
.numbers { overflow-x: auto; }
.numbers table { border-collapse: collapse; font: .8rem/1.5 ui-monospace, monospace; }
.numbers td, .numbers th { padding: 0 .8rem 0 0; text-align: left; white-space: nowrap; font-weight: normal; }
.conclusion { border-left: .25rem solid #2a7; padding-left: .8rem; }
""".strip()

_PAGE = """
:root { color-scheme: light dark; }
body { font: 1rem/1.55 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
@media print { :root { color-scheme: light; } body { margin: 0; max-width: none; } }
""".strip()


def article(checked: Checked, *, level: int = 1, notation: bool = True) -> str:
    """The derivation as an HTML fragment, formulas in MathML; ``STYLE`` is for it.

    Args:
        level: of the title's heading.
        notation: list what the symbols mean; once is enough on a page of several.
    """

    def said(words: str) -> str:
        return inline(words, lambda tex: mathml(tex, block=False), entities.escape)

    shown = checked.derivation
    out = [f"<h{level}>{said(shown.title)}</h{level}>", f"<p>Source: {said(shown.source)}.</p>"]
    out.append(f"<p>{said(_setting(checked))}</p>")
    listed = _notation(checked) if notation else checked.derivation.notation
    if listed:
        items = [f"<li>{mathml(tex, block=False)}: {said(words)}</li>" for tex, words in listed]
        out.append("<ul>" + "\n".join(items) + "</ul>")
    for heading, number, results in _grouped(checked):
        if heading:
            out.append(f"<h{level + 1}>{heading}</h{level + 1}>")
        where = f" Here {mathml(results[0].step.where, block=False)}." if results[0].step.where else ""
        out.append(f'<div class="step"><p>{number}. {said(_reason(results))}{where}</p>')
        out.append(mathml(_equation(results[0])))
        rows = [
            f"<tr><th>{entities.escape(label)}</th><th>{name}</th><td>{entities.escape(value)}</td></tr>"
            for label, sides in _rows(checked, results)
            for name, value in sides
        ]
        out.append(f'<div class="numbers"><table>{"".join(rows)}</table></div></div>')
    out.append(f'<p class="conclusion">{said(shown.conclusion)}</p><p>{said(_verdict(checked))}</p>')
    return "\n".join(out)


def page(checked: Checked) -> str:
    """A self-contained HTML page: no script, nothing fetched."""
    title = entities.escape(checked.derivation.title)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>\n{_PAGE}\n{STYLE}\n</style>\n</head>\n<body>\n{article(checked)}\n</body>\n</html>\n"
    )
