"""The site: built with warnings as errors, theory from the derivations, mathematics typeset, nothing fetched."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))


def sources(path):
    """Code cells: run plainly, since they use nothing of a kernel, and a kernel would have to be installed."""
    return ["".join(c["source"]) for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, monkeypatch, tmp_path, capsys):
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "notebook"}
    for number, source in enumerate(sources(path)):
        assert not re.match(r"\s*[%!]", source), "a cell that only a kernel understands"
        exec(compile(source, f"{path.name}[{number}]", "exec"), namespace)
    assert capsys.readouterr().out
    assert pyplot.get_fignums()
    pyplot.close("all")


def test_there_are_the_two_notebooks():
    headings = [json.loads(path.read_text())["cells"][0]["source"][0].strip() for path in NOTEBOOKS]
    assert headings == ["# From KL to its gradient", "# Which estimator, where?"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_carry_no_outputs(path):
    assert [c for c in json.loads(path.read_text())["cells"] if c.get("outputs") or c.get("execution_count")] == []


@pytest.fixture(scope="module")
def hooks():
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_mathematics_becomes_mathml_and_code_does_not(hooks):
    made = hooks.on_page_markdown("Of $r^*_t$.\n\n```sh\necho $HOME $PATH\n```\nand `$x$`, $$\n\\sum_t r_t\n$$\n")
    assert made.count("<math") == 2
    assert "echo $HOME $PATH" in made
    assert "`$x$`" in made
    inside = re.sub(r"<[^>]*>", "", made.split("```")[0])
    assert "*" not in inside
    assert "_" not in inside


def test_theory_pages_are_the_derivations(hooks):
    from klgrad.analysis.derivations import DERIVATIONS

    for name, shown in DERIVATIONS.items():
        assert shown.title in hooks.theory(name)
        assert f"({name}.md)" in hooks.derivations_table()


def test_a_step_that_does_not_hold_stops_the_build(hooks, monkeypatch):
    import numpy as np

    from klgrad.analysis.derivations import DERIVATIONS, Derivation, Step, StepFailed

    wrong = Step("a", "b", "because", (lambda m: m.exact("kl"), lambda m: np.array(0.0)))
    monkeypatch.setitem(DERIVATIONS, "wrong", Derivation("wrong", "a wrong one", "here", (wrong,), ""))
    with pytest.raises(StepFailed):
        hooks.theory("wrong")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built in strict mode: any warning stops it."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def pages(site):
    return [path for path in sorted(site.rglob("*.html")) if path.name != "404.html"]


@pytest.mark.slow
def test_site_has_its_pages(site):
    names = {path.relative_to(site).as_posix() for path in pages(site)}
    assert {
        "index.html",
        "tour.html",
        "api.html",
        "theory/k3.html",
        "notebooks/1-from-kl-to-its-gradient.html",
    } <= names


@pytest.mark.slow
def test_site_fetches_nothing_from_elsewhere(site):
    fetching = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=["']?(https?:)?//""")
    for path in pages(site):
        assert not fetching.search(path.read_text()), path.name
    for path in site.rglob("*.css"):
        assert not re.search(r"url\(\s*['\"]?https?:|@import", path.read_text()), path.name


@pytest.mark.slow
def test_site_is_typeset(site):
    for path in sorted((site / "theory").glob("*.html")):
        text = re.sub(r"<(script|code|pre)\b.*?</\1>", "", path.read_text(), flags=re.DOTALL)
        assert "<math" in text, path.name
        assert not re.search(r"\\[a-zA-Z]+\{|\$\$", text), path.name
