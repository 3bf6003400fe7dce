"""The table command."""

from pathlib import Path

from isomorph.cli import options as opt
from isomorph.cli.output import page_footer, show
from isomorph.recipes import RECIPES


@opt.command
def table(
    name: str,
    runs: list[Path] | None = None,
    /,
    *,
    out: Path | None = None,
    overwrite: opt.Overwrite = False,
    json_: opt.Json = False,
) -> None:
    """Print a published table: what runs measured next to what the paper expects; a page has the chart.

    Example: isomorph table "ConViT Table 2" runs/*

    Parameters
    ----------
    name
        A paper and its table, figure or appendix: 'ConViT Table 2', 'CoAtNet Fig. 1', 'TDRL B.8'.
    runs
        Folders of runs, finished or not; those of other tables are left out.
    out
        File for a page with the table and a chart by fraction of the data, or by hours of training; by default none.
    """
    opt.check_out(out, overwrite, suffixes=(".html",))
    with opt.loading():
        from isomorph.report.html import Section, write_page
        from isomorph.report.published_table import published_charts, published_rows, published_table
        from isomorph.report.run_files import read_run_logs
    rows = published_rows(name, RECIPES, read_run_logs(runs or []))
    text = published_table(rows)
    if out:
        section = Section(name, "Measured results next to the paper's.", text, charts=published_charts(name, rows))
        write_page(out, name, f"{sum(row['run'] is not None for row in rows)} runs.", [section], page_footer())
    show(json_, rows, text, *[f"page: {out}"] * bool(out))
