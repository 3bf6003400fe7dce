"""The table command."""

from pathlib import Path

from isomorph.cli import options as opt
from isomorph.cli.output import page_footer, show
from isomorph.cli.tables import tables
from isomorph.terminal_tables import print_table, print_text_table, say


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
        from isomorph.lab.report.html import Section, write_page
        from isomorph.lab.report.published_table import (
            command_lines,
            published_charts,
            published_table,
        )
        from isomorph.lab.report.run_files import read_run_logs
    files: list[Path] = []
    folders: list[Path] = []
    for path in runs or []:
        if path.suffix == ".json":
            files.append(path)
        else:
            folders.append(path)
    found = table_with_runs(find_table(name), read_run_logs(folders))
    found = table_with_evaluations(found, read_evaluations(files))
    text = published_table(found.columns, found.rows)
    count = sum(len(row.runs) for row in found.rows)
    if out:
        lines = [found.title, *command_lines(found.rows)]
        if found.note:
            lines.insert(1, found.note)
        charts = published_charts(found.name, found.charts, found.rows)
        section = Section(found.name, "\n".join(lines), text, charts=charts)
        write_page(out, found.name, f"{count} runs.", [section], page_footer())
    if json_:
        rows = [row.as_dict() for row in found.rows]
        show(json_, {"table": found.name, "title": found.title, "note": found.note, "rows": rows})
        return
    say(f"{found.name}: {found.title}")
    if found.note:
        say(found.note)
    print_table(text)
    if not count:
        say("")
        for line in command_lines(found.rows):
            say(line)
    if out:
        say(f"page: {out}")
