"""What the site is made of besides its pages: the derivations, the notebooks, and mathematics as MathML.

The theory is not written twice: each page under Theory is a derivation of ``klgrad.analysis.derivations``, evaluated
when the site is built; a step that does not hold stops the build. Notebooks are run, and shown with what they print
and draw.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

from klgrad.analysis.derivations import DERIVATIONS, check
from klgrad.analysis.derivations.latex import mathml
from klgrad.analysis.derivations.render import markdown
from klgrad.synth.presets import preset

DOCS = Path(__file__).parent
ROOT = DOCS.parent
_CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.DOTALL | re.MULTILINE)
_MATH = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+?)\$", re.DOTALL)


@event_priority(100)  # before mkdocstrings reads its options
def on_config(config: Any) -> Any:
    """Put the generated pages into the navigation and tell mkdocstrings where the package is."""
    for section in config["nav"]:
        if "Theory" in section:
            section["Theory"] += [{name: f"theory/{name}.md"} for name in DERIVATIONS]
        if "Libraries" in section:
            section["Libraries"] += [
                f"libraries/{path.name}" for path in sorted((DOCS / "libraries").glob("[a-z]*.md"))
            ]
        if "Notebooks" in section:
            section["Notebooks"] += [{title(path): f"notebooks/{path.stem}.md"} for path in notebooks()]
    config["plugins"]["mkdocstrings"].config["handlers"]["python"]["paths"] = [str(package_folder())]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made from code."""
    made = {f"theory/{name}.md": theory(name) for name in DERIVATIONS}
    for path in notebooks():
        files.remove(files.src_uris[f"notebooks/{path.name}"])
        made[f"notebooks/{path.stem}.md"] = notebook_page(path)
    for uri, content in made.items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Mathematics between dollar signs becomes MathML, and code is left alone; the list of derivations is filled in."""
    pieces = _CODE.split(markdown.replace("<!-- derivations -->", derivations_table()))
    return "".join(piece if i % 2 else _MATH.sub(_typeset, piece) for i, piece in enumerate(pieces))


def _typeset(match: re.Match[str]) -> str:
    block = match[1] is not None
    element = mathml(match[1] if block else match[2], block=block)
    for mark in "*_|\\":  # which Markdown would read as its own
        element = element.replace(mark, f"&#{ord(mark)};")
    if block:
        return f'<div class="equation">{element}</div>'  # scrolls by itself where it is wider than the page
    return f"<span>{element}</span>"  # a line that starts with <math> would be a block of its own


def package_folder() -> Path:
    """A folder with a link ``klgrad`` for each part of the package: the root of the repository is the package."""
    folder = Path(tempfile.mkdtemp(prefix="klgrad-docs-"))
    atexit.register(shutil.rmtree, folder)
    (folder / "klgrad").mkdir()
    for path in [*ROOT.glob("*.py"), *(p.parent for p in ROOT.glob("*/__init__.py"))]:
        (folder / "klgrad" / path.name).symlink_to(path)
    return folder


# ------------------------------------------------------------------------------------------------------- theory


def theory(name: str) -> str:
    """One derivation, evaluated."""
    shown = DERIVATIONS[name]
    told = markdown(check(shown, preset(shown.preset, max(shown.lengths)), shown.lengths))
    return told + f"\nThe same in a terminal, on any pair: `klgrad derive {name}`.\n"


def derivations_table() -> str:
    """The list of derivations."""
    rows = [f"| [{name}]({name}.md) | {shown.title} |" for name, shown in DERIVATIONS.items()]
    return "\n".join(["| derivation | what it shows |", "|---|---|", *rows])


# ---------------------------------------------------------------------------------------------------- notebooks


def notebooks() -> list[Path]:
    """The notebooks, in the order of their names."""
    return sorted((DOCS / "notebooks").glob("*.ipynb"))


def cells(path: Path) -> list[tuple[str, str]]:
    """Kind (``markdown`` or ``code``) and text of every cell."""
    return [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(path.read_text())["cells"]]


def title(path: Path) -> str:
    """The notebook's first heading."""
    return cells(path)[0][1].splitlines()[0].lstrip("# ")


def run_cells(path: Path) -> Iterator[tuple[str, str, str, list[bytes]]]:
    """Every cell with what its code prints and the pictures it draws (PNG); one namespace, as in a kernel."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    namespace: dict[str, Any] = {"__name__": "notebook"}
    for number, (kind, source) in enumerate(cells(path)):
        printed, pictures = io.StringIO(), []
        if kind == "code":
            with contextlib.redirect_stdout(printed):
                exec(compile(source, f"{path.name}[{number}]", "exec"), namespace)
            for figure in map(pyplot.figure, pyplot.get_fignums()):
                picture = io.BytesIO()
                figure.savefig(picture, format="png", dpi=110, bbox_inches="tight")
                pictures.append(picture.getvalue())
            pyplot.close("all")
        yield kind, source, printed.getvalue(), pictures


def notebook_page(path: Path) -> str:
    """A notebook as a page, run."""
    from base64 import b64encode

    out = []
    for kind, source, printed, pictures in run_cells(path):
        out.append(source if kind == "markdown" else f"```python\n{source}\n```")
        if printed:
            out.append(f"```text\n{printed.rstrip()}\n```")
        out += [f'<img alt="figure" src="data:image/png;base64,{b64encode(p).decode()}">' for p in pictures]
    return "\n\n".join([*out, f"This page is a notebook that was run when the site was built: `{path.name}`.", ""])
