"""Figures and the self-contained page."""

from isomorph.report.figures import curves_figure, dials_figure, maps_figure
from isomorph.report.page import Section, write_page

__all__ = ["Section", "curves_figure", "dials_figure", "maps_figure", "write_page"]
