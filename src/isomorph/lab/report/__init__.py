"""HTML pages that compare models and training runs."""

from isomorph.lab.report.analyze_page import AnalyzeOptions, analyze_sections
from isomorph.lab.report.charts import Bars, Dots, Line, Matrix, Panel, Paths, Scatter
from isomorph.lab.report.compare_page import compare_sections
from isomorph.lab.report.html import Section, write_page
from isomorph.lab.report.page_images import PageImage, open_images
from isomorph.lab.report.page_models import PageModel
from isomorph.lab.report.run_files import read_run_logs

__all__ = [
    "AnalyzeOptions",
    "Bars",
    "Dots",
    "Line",
    "Matrix",
    "PageImage",
    "PageModel",
    "Panel",
    "Paths",
    "Scatter",
    "Section",
    "analyze_sections",
    "compare_sections",
    "open_images",
    "read_run_logs",
    "write_page",
]


def __dir__() -> list[str]:
    return __all__
