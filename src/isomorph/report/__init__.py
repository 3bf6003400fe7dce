"""Figures and the self-contained page."""

from isomorph.report.analyze_page import Extras, dissect, lead_of
from isomorph.report.attention_viewer import Picture, Seen, build_viewer
from isomorph.report.charts import Bars, Chart, Dots, Line, Matrix, Panel
from isomorph.report.compare_page import compare_runs, read_runs
from isomorph.report.cost import batch_cost_table, cost_problems, fixed_cost_table, pass_cost_table
from isomorph.report.html import Section, write_page
from isomorph.report.maps import gather_maps
from isomorph.report.page_models import Subject, recipe_beside, told_apart
from isomorph.report.pictures import open_pictures
from isomorph.report.save_figures import save_figures
from isomorph.report.terminal import curve_rows, metric_rows, show, show_words

__all__ = [
    "Bars",
    "Chart",
    "Dots",
    "Extras",
    "Line",
    "Matrix",
    "Panel",
    "Picture",
    "Section",
    "Seen",
    "Subject",
    "batch_cost_table",
    "build_viewer",
    "compare_runs",
    "cost_problems",
    "curve_rows",
    "dissect",
    "fixed_cost_table",
    "gather_maps",
    "lead_of",
    "metric_rows",
    "open_pictures",
    "pass_cost_table",
    "read_runs",
    "recipe_beside",
    "save_figures",
    "show",
    "show_words",
    "told_apart",
    "write_page",
]
