"""Saving whole or not at all, the same bytes each time; no engine and no pyplot behind the figures."""

import subprocess
import sys

import matplotlib
import pytest
from matplotlib.figure import Figure

from klgrad.figures import save_figure, style


def small():
    with style.context():
        figure = Figure(figsize=(2, 1.5), layout="constrained")
        axes = figure.subplots()
        axes.plot([1, 2], [3, 4])
        axes.set_title("near: bias $T$")
    return figure


def test_png_and_pdf_are_written_the_same_each_time(tmp_path):
    first = [path.read_bytes() for path in save_figure(small(), tmp_path / "new" / "a")]
    second = [path.read_bytes() for path in save_figure(small(), str(tmp_path / "b.png"))]
    assert first == second
    assert sorted(path.name for path in tmp_path.rglob("*.p*")) == ["a.pdf", "a.png", "b.pdf", "b.png"]
    png, pdf = first
    assert png.startswith(b"\x89PNG")
    assert b"CreationDate" not in pdf
    assert b"/CIDFontType2" in pdf  # TrueType, embedded as such
    assert b"/Type3" not in pdf


def test_a_dot_in_the_name_is_no_suffix(tmp_path):
    assert [path.name for path in save_figure(small(), tmp_path / "v1.2")] == ["v1.2.png", "v1.2.pdf"]


def test_a_failed_save_leaves_the_old_files_and_nothing_else(tmp_path, monkeypatch):
    png, pdf = save_figure(small(), tmp_path / "a")
    before = png.read_bytes(), pdf.read_bytes()

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(style.os, "replace", full)
    with pytest.raises(OSError, match="no space"):
        save_figure(Figure(), tmp_path / "a")
    assert (png.read_bytes(), pdf.read_bytes()) == before
    assert sorted(tmp_path.iterdir()) == [pdf, png]


def test_the_style_is_put_on_and_taken_off():
    before = dict(matplotlib.rcParams)
    with style.context():
        assert matplotlib.rcParams["pdf.fonttype"] == 42
        assert matplotlib.rcParams["font.family"] == ["DejaVu Sans"]
    assert dict(matplotlib.rcParams) == before


def test_figures_load_no_engine_and_no_pyplot():
    heavy = ("klgrad.synth", "klgrad.analysis", "matplotlib.pyplot", "torch")
    code = f"import sys, klgrad.figures; print([name for name in sys.modules if name.startswith({heavy})])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
