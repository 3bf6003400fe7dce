"""The table command."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from isomorph.cli import options as opt
from isomorph.cli.output import page_footer, page_line, show
from isomorph.cli.tables import tables
from isomorph.errors import UserError
from isomorph.terminal_tables import Table, count_of, print_table, print_text_table, say

if TYPE_CHECKING:
    from isomorph.lab.recipes.tables import PublishedTable


@opt.command
def table(
    name: str | None = None,
    runs: list[Path] | None = None,
    /,
    *,
    out: Path | None = None,
    overwrite: opt.Overwrite = False,
    json_: opt.Json = False,
) -> None:
    """Print a published table or figure: what the paper has, the command of each row, and what runs measured.

    A run whose data, network or schedule are not its row's is marked with what differs, and is not counted as a
    measurement. Evaluations are read from the files that their commands write. Example: isomorph table "ConViT Table 2"
    runs/*

    Parameters
    ----------
    name
        A paper and its table, figure or appendix: 'ConViT Table 2', 'CoAtNet Fig. 1', 'TDRL B.8'; by default the list
        of all.
    runs
        Folders of runs, finished or not, and .json files of evaluations; those of other tables are left out.
    out
        File for a page with the table and its charts; by default none.
    """
    opt.check_out(out, overwrite, suffixes=(".html",))
    if name is None:
        if out:
            raise UserError(f"--out {out} is for one table; give its name")
        listed = tables()["published"]
        if json_:
            show(True, listed)
        else:
            print_text_table([["table", "what"], *([x["name"], x["title"]] for x in listed)])
        return
    with opt.loading():
        from isomorph.lab.recipes.tables import (
            find_table,
            table_with_evaluations,
            table_with_runs,
        )
        from isomorph.lab.report.evaluations import read_evaluations
        from isomorph.lab.report.published_table import command_lines, published_table
        from isomorph.lab.report.run_files import read_run_logs
    files = [path for path in runs or [] if path.suffix == ".json"]
    folders = [path for path in runs or [] if path.suffix != ".json"]
    evaluations = []
    for path in files:
        own = read_evaluations([path])
        if not own:
            say(f"isomorph: {path} has no result of a test suite, and is left out", sys.stderr)
        evaluations += own
    logs = read_run_logs(folders)
    found = table_with_runs(find_table(name), logs)
    shown = {result.run for row in found.rows for result in row.runs}
    for log in logs:
        if log.name not in shown:
            say(f"isomorph: {log.name} is not a run of this table, and is left out", sys.stderr)
    found = table_with_evaluations(found, evaluations)
    text = published_table(found.columns, found.rows)
    page = _write_page(out, found, text) if out else ""
    if json_:
        rows = [row.as_dict() for row in found.rows]
        show(json_, {"table": found.name, "title": found.title, "note": found.note, "rows": rows})
        return
    say(f"{found.name}: {found.title}")
    if found.note:
        say(found.note)
    print_table(text)
    if not any(row.runs for row in found.rows):
        say("")
        for line in command_lines(found.rows):
            say(line)
    if page:
        say(page)


def _write_page(out: Path, found: "PublishedTable", text: Table) -> str:
    """Write the page of a table, and return the line that says so."""
    from isomorph.lab.report.html import Section, write_page
    from isomorph.lab.report.published_table import command_lines, published_charts

    section = Section(
        found.name,
        f"{found.title}. {found.note}".strip(),
        text,
        listing="\n".join(command_lines(found.rows)),
        charts=published_charts(found.name, found.charts, found.rows),
    )
    measured = {result.run for row in found.rows for result in row.runs if result.run != "mean"}
    lead = f"{count_of(len(measured), 'measured result')} of runs and evaluations."
    return page_line(out, write_page(out, found.name, lead, [section], page_footer()))
