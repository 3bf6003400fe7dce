"""Figures and the self-contained page."""

from isomorph.report.cost import batch_cost_table, fixed_cost_table
from isomorph.report.figures import curves_figure, dials_figure, maps_figure
from isomorph.report.page import Section, write_page
from isomorph.report.terminal import curve_rows, metric_rows, show

__all__ = [
    "Section",
    "batch_cost_table",
    "cost_table",
    "curve_rows",
    "curves_figure",
    "dials_figure",
    "fixed_cost_table",
    "maps_figure",
    "metric_rows",
    "show",
    "write_page",
]
