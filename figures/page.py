"""One self-contained HTML page: figures as SVG within it, tables, and sections that were made elsewhere."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from html import escape

import matplotlib
from matplotlib.figure import Figure

from klgrad.figures import style

STYLE = """
:root { color-scheme: light dark; --line: #8884; }
body { font: 1rem/1.55 system-ui, sans-serif; max-width: 56rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; } h3 { font-size: 1rem; margin-top: 1.5rem; }
.figure { background: #fff; border-radius: .3rem; padding: .3rem; margin: 1rem 0; overflow-x: auto; }
.figure svg { display: block; width: 100%; min-width: 36rem; height: auto; }
.wide { overflow-x: auto; }
.wide > table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
.wide > table td, .wide > table th { border-bottom: 1px solid var(--line); padding: .25rem .8rem .25rem 0; }
.wide > table td, .wide > table th { text-align: left; }
.wide > table .number { text-align: right; white-space: nowrap; }
nav a { margin-right: 1rem; }
pre { overflow-x: auto; font-size: .8rem; }
@media (max-width: 600px) {
  .figure svg { min-width: 0; }
  .wide > table { font-size: .65rem; line-height: 1.35; }
  .wide > table td, .wide > table th { padding-right: .35rem; }
  .wide > table th.number { white-space: normal; }
}
@media print {
  :root { color-scheme: light; }
  body { margin: 0; max-width: none; font-size: 10pt; }
  nav { display: none; }
  .figure svg { min-width: 0; }
  .figure, tr { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
  pre { white-space: pre-wrap; }
}
""".strip()


def svg(figure: Figure, name: str) -> str:
    """The figure as an inline SVG, letters as outlines, under ids of its own; the same figure gives the same text."""
    buffer = io.StringIO()
    with style.context(), matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": name}):
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # laid out once: saving would do it again, slowly
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    # the elements that matplotlib numbers, figure_1 and so on, would stand twice on a page of two figures
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(url\(#|href="#)', rf"\g<1>{name}-", text)
    return f'<div class="figure" role="img" aria-label="{escape(name)}">{text}</div>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, text: int) -> str:
    """A table that scrolls sideways where it must; all but the first ``text`` columns are numbers."""

    def cells(row: Sequence[str], tag: str) -> str:
        kinds = ["" if i < text else ' class="number"' for i in range(len(row))]
        return "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, row, strict=True))

    body = "\n".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{cells(head, "th")}</tr></thead><tbody>{body}</tbody></table></div>'


def page(title: str, sections: Sequence[tuple[str, str]], css: str = "") -> str:
    """The page: title, contents, and each section's HTML under its heading.

    Args:
        title: plain text.
        sections: heading (plain text; empty for none) and HTML.
        css: what the sections need beyond ``STYLE``.
    """
    anchors = {heading: re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-") for heading, _ in sections if heading}
    contents = " ".join(f'<a href="#{anchor}">{escape(heading)}</a>' for heading, anchor in anchors.items())
    body = "\n".join(
        f'<section id="{anchors[heading]}">\n<h2>{escape(heading)}</h2>\n{html}\n</section>' if heading else html
        for heading, html in sections
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{css}\n{STYLE}\n</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n<nav>{contents}</nav>\n{body}\n</body>\n</html>\n"
    )
