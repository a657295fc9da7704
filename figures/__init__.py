"""Pictures and printed tables of results: DataFrame in, matplotlib Figure or text out. Nothing is computed here."""

from klgrad.figures.dynamics import curl_by_length, fixed_points, phase_portrait, staleness, training_curves
from klgrad.figures.figure1 import figure1, figure1_caption
from klgrad.figures.growth import growth
from klgrad.figures.page import page, svg, table
from klgrad.figures.study import study
from klgrad.figures.style import save as save_figure
from klgrad.figures.table1 import table1

__all__ = [
    "curl_by_length",
    "figure1",
    "figure1_caption",
    "fixed_points",
    "growth",
    "page",
    "phase_portrait",
    "save_figure",
    "staleness",
    "study",
    "svg",
    "table",
    "table1",
    "training_curves",
]
