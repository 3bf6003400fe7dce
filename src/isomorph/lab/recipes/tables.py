"""The papers' tables and figures, read from published/*.yaml, with the commands of every row and the runs of them."""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from isomorph.errors import UserError
from isomorph.json_values import is_number
from isomorph.lab.recipes import RECIPES, Fields, load_recipe
from isomorph.lab.report.evaluations import Evaluation
from isomorph.lab.report.page_models import short_name
from isomorph.lab.report.published_table import COLUMNS, MEASURED, RunResult, TableRow
from isomorph.lab.report.run_files import RunLog
from isomorph.lab.training.recipe.differences import describe_differences, differing_fields

FOLDER = Path(__file__).with_name("published")
PAPERS = {
    "tcnn": "T-CNN",
    "convit": "ConViT",
    "coatnet": "CoAtNet",
    "tdrl": "TDRL",
    "refiner": "Refiner",
}
# Steps of a row that are not recipes, as commands on a model. Those with a file write it for `isomorph table`.
STEPS = {
    "robustness": "isomorph robustness {model} --data imagefolder --root /data/imagenet --size 224"
    " --json > {name}-c.json",
    "suites": "isomorph evaluate {model} --suite imagenet imagenet-a imagenet-r --size {argument} --root /data"
    " --json > {name}-suites.json",
    "suites_v2": "isomorph evaluate {model} --suite imagenet imagenet-a imagenet-r imagenet-sketch "
    "imagenet-v2-matched-frequency imagenet-v2-threshold-0.7 imagenet-v2-top-images --root /data"
    " --json > {name}-suites.json",
    "rfc": "isomorph evaluate {model} --suite imagenet --rfc {argument} --rfc-fill black --root /data"
    " --json > {name}-rfc.json",
    "real": "isomorph evaluate {model} --suite real --root /data --json > {name}-real.json",
    "evaluate": "isomorph evaluate {model} --suite imagenet {argument} --root /data --json > {name}.json",
    "analyze": "isomorph analyze {model} --image {argument}",
    "figure": "see docs/guides/figures.md",
}
# Steps whose files have numbers of the row.
EVALUATIONS = ("robustness", "suites", "suites_v2", "rfc", "real", "evaluate")
# Those of a number that a run does not measure itself, in a row whose other numbers it does.
ADDITIONS = ("real",)


@dataclass(frozen=True)
class PublishedTable:
    """A table or figure of a paper: its rows, the columns of their values, and the charts to draw of them."""

    name: str
    """Paper and number, e.g. ConViT Table 2."""
    title: str
    columns: tuple[str, ...]
    rows: tuple[TableRow, ...]
    charts: tuple[Mapping[str, str], ...] = ()
    note: str = ""

    def recipes(self) -> list[str]:
        """Return the recipes whose runs are rows."""
        return [row.recipe for row in self.rows if row.recipe]


@cache
def published_tables() -> dict[str, PublishedTable]:
    """Return all tables and figures by name."""
    tables = {}
    for file, paper in PAPERS.items():
        contents = yaml.safe_load((FOLDER / f"{file}.yaml").read_text(encoding="utf-8"))
        for number, fields in contents.items():
            name = f"{paper} {number}"
            tables[name] = _read_table(name, fields)
    return tables


def _read_table(name: str, fields: Fields) -> PublishedTable:
    columns = tuple(fields["columns"])
    rows = [_read_row(columns, values) for values in fields["rows"]]
    # a figure without numbers, of which runs measure the accuracy
    if not MEASURED.keys() & set(columns):
        columns = (*columns, "top1")
        rows = [replace(row, values={**row.values, "top1": None}) for row in rows]
    for column, value in fields.get("where", {}).items():
        rows = [row for row in rows if row.values[column] == value]
    for recipe in fields.get("controls", ()):
        rows.append(
            TableRow(f"{recipe} (not in the paper)", {}, recipe, commands=commands_of(recipe))
        )
    charts = fields.get("chart", [])
    if isinstance(charts, Mapping):
        charts = [charts]
    return PublishedTable(
        name, fields["title"], columns, tuple(rows), tuple(charts), fields.get("note", "")
    )


def _read_row(columns: Sequence[str], values: Sequence[Any]) -> TableRow:
    label, steps, *cells = values
    by_column = dict(zip(columns, cells, strict=True))
    if steps == "-":
        return TableRow(str(label), by_column)
    if steps == "mean":
        return TableRow(str(label), by_column, recipe="mean")
    parts = steps.split(" > ")
    training = [step for step in parts if step not in ADDITIONS]
    before = [step for step in training[:-1] if step in RECIPES]
    evaluated = None
    if any(step.partition(" ")[0] in EVALUATIONS for step in parts):
        trained = [step for step in parts if step in RECIPES]
        evaluated = trained[-1] if trained else parts[0]
    return TableRow(
        label=str(label),
        values=by_column,
        recipe=training[-1] if training[-1] in RECIPES else None,
        before=before[-1] if before else None,
        evaluated=evaluated,
        sizes=_sizes_in(parts, by_column.get("size")),
        commands=commands_of(steps),
    )


def _sizes_in(steps: Sequence[str], printed: Any) -> tuple[int, ...]:
    """Return the sides of the images that a row is evaluated at: those in its steps, else the printed size."""
    for step in steps:
        given = re.fullmatch(r"(?:suites|suites_v2|evaluate --size)((?: \d+)+)", step)
        if given:
            return tuple(map(int, given[1].split()))
    if isinstance(printed, int):
        return (printed,)
    return ()


def commands_of(steps: str) -> list[str]:
    """Return the commands of steps like `tdrl_vit_ti_g2sd > fuse > tdrl_fused_100ep`, each on the model before it.

    A step is a recipe, `fuse`, one of `STEPS` with its argument, or at the start a model with public weights.
    """
    commands = []
    model = ""
    for step in steps.split(" > "):
        word, _, argument = step.partition(" ")
        if step in RECIPES:
            name = step
            command = f"isomorph train {step}"
            if model:
                command += f" --model.weights {model}"
            if model.endswith("-fused.safetensors"):  # one recipe trains all fused networks
                name = f"{step}-from-{model.removesuffix('-fused.safetensors')}"
                command += f" --out runs/{name}"
            commands.append(command)
            model = f"runs/{name}/model.safetensors"
        elif step == "fuse":
            fused = f"{Path(model).parent.name}-fused.safetensors"
            commands.append(f"isomorph fuse {model} --out {fused}")
            model = fused
        elif word in STEPS:
            line = STEPS[word].format(model=model, argument=argument, name=short_name(model))
            commands.append(" ".join(line.split()))
        else:
            model = step
    return commands


def find_table(name: str) -> PublishedTable:
    """Return a table by paper and number, in any case: `convit table 2`, `TDRL B.8`, `TDRL Figure 2a`.

    Raises: UserError, with the closest names, if there is none.
    """
    tables = published_tables()
    wanted = _normal(name)
    for known, table in tables.items():
        if _normal(known) == wanted:
            return table
    for paper in PAPERS.values():
        if name.lower().startswith(paper.lower()):
            numbers = [
                known.removeprefix(f"{paper} ") for known in tables if known.startswith(paper)
            ]
            given = name[len(paper) :].strip() or "such table"
            raise UserError(f"{paper} has no {given!r} here; give one of {', '.join(numbers)}")
    close = difflib.get_close_matches(name, tables, n=3)
    hint = " or ".join(close or ["ConViT Table 2"])
    raise UserError(f"there is no table {name!r}; give a paper and its table, for example {hint}")


def _normal(name: str) -> str:
    short = re.sub(r"\b(figure|fig)\b\.?", "fig.", name.strip().lower())
    short = re.sub(r"\btab\b\.?", "table", short)
    short = re.sub(r"\bappendix ", "", short)
    short = re.sub(r"(\d) ?\(?[a-e]\)?$", r"\1", short)  # a part, such as Fig. 2a
    return " ".join(short.split())


def table_with_runs(table: PublishedTable, logs: Sequence[RunLog]) -> PublishedTable:
    """Return a table whose rows have the runs of their recipes, and the mean of the runs of a part where it prints one.

    A run belongs to the row of the recipe that it names, and of several to that of the weights it starts from; a run
    of another name, such as a second seed, to a row whose recipe has the same `source`, and of several to the one that
    it differs least from.
    """
    rows = list(table.rows)
    placed: dict[int, list[RunResult]] = {}
    for log in logs:
        for index in _rows_of(table, log):
            published = load_recipe(str(rows[index].recipe))
            differences = [
                describe_differences(
                    log.recipe, published, _trained_epochs(log), _trained_steps(log)
                )
            ]
            if not _starts_from(log, rows[index].before):
                differences.append(f"from {_start(log)}, not {rows[index].before}")
            differs = ", ".join(filter(None, differences))
            placed.setdefault(index, []).append(RunResult.of(log, table.columns, differs))
    for index, results in placed.items():
        rows[index] = replace(rows[index], runs=tuple(results))
    return replace(table, rows=tuple(_with_means(rows)))


def table_with_evaluations(
    table: PublishedTable, evaluations: Sequence[Evaluation]
) -> PublishedTable:
    """Return a table whose rows have what was evaluated of their models, each at the row's size and ratio."""
    rows = []
    for row in table.rows:
        runs = list(row.runs)
        for evaluation in evaluations:
            if _is_of(row, evaluation):
                runs.append(
                    RunResult(evaluation.title, dict(evaluation.measured), evaluation.differs)
                )
        rows.append(replace(row, runs=tuple(runs)))
    return replace(table, rows=tuple(rows))


def _is_of(row: TableRow, evaluation: Evaluation) -> bool:
    if row.evaluated is None or short_name(evaluation.model) != row.evaluated:
        return False
    if evaluation.size is not None:
        if row.sizes and evaluation.size not in [(side, side) for side in row.sizes]:
            return False
        if not row.sizes and not evaluation.is_own_size:
            return False
    printed_ratio = row.values.get("rfc_ratio")
    if evaluation.rfc is not None and is_number(printed_ratio) and printed_ratio != evaluation.rfc:
        return False
    return any(column in row.values for column in evaluation.measured)


def _rows_of(table: PublishedTable, log: RunLog) -> list[int]:
    own = str(log.recipe.get("name"))
    named = [i for i, row in enumerate(table.rows) if row.recipe == own]
    if len(named) > 1:
        named = [i for i in named if _starts_from(log, table.rows[i].before)]
    if named or own in RECIPES:
        return named
    source = log.recipe.get("source")
    if not source:
        return []
    differences = {}
    for i, row in enumerate(table.rows):
        if row.recipe in RECIPES and RECIPES[row.recipe].get("source") == source:
            differences[i] = len(differing_fields(log.recipe, load_recipe(row.recipe)))
    if not differences:
        return []
    return [min(differences, key=differences.__getitem__)]


def _start(log: RunLog) -> str | None:
    """Return the file of the weights that a run starts from, None for none."""
    model = log.recipe.get("model")
    return model.get("weights") if isinstance(model, Mapping) else None


def _starts_from(log: RunLog, recipe: str | None) -> bool:
    """True if the weights that a run starts from are of a recipe's run, fused or not, or where either is not known."""
    start = _start(log)
    if recipe is None or start is None:
        return True
    return re.search(rf"(?<!\w){re.escape(recipe)}(?!\w)", start) is not None


def _trained_epochs(log: RunLog) -> int:
    epochs = [row["epoch"] for row in log.epochs if isinstance(row.get("epoch"), int)]
    return max(epochs, default=0)


def _trained_steps(log: RunLog) -> int | None:
    steps = [row["step"] for row in log.steps if isinstance(row.get("step"), int)]
    return max(steps, default=None)


def _with_means(rows: Sequence[TableRow]) -> Iterator[TableRow]:
    """Fill the rows `mean` with the mean of what the rows of the same label measured, if all of them were."""
    for row in rows:
        if row.recipe != "mean":
            yield row
            continue
        others = [other for other in rows if other.label == row.label and other is not row]
        scores = []
        for other in others:
            counted = [run for run in other.runs if not run.differs and "score" in run.measured]
            if counted:
                scores.append(fmean(run.measured["score"] for run in counted))
        runs: tuple[RunResult, ...] = ()
        if len(scores) == len(others):
            runs = (RunResult("mean", {"score": sum(scores) / len(scores)}),)
        yield replace(row, recipe=None, runs=runs)


def published_rows(recipe: str) -> list[str]:
    """Return a line for each row that a recipe has in a table, with its measurable numbers."""
    lines = []
    for name in tables_of(recipe):
        for row in published_tables()[name].rows:
            if row.recipe != recipe:
                continue
            numbers = []
            for column in MEASURED:
                if row.values.get(column) is not None:
                    numbers.append(f"{COLUMNS[column]} {row.values[column]}")
            if numbers:
                lines.append(f"{name}, {row.label}: {', '.join(numbers)}")
    return lines


def tables_of(recipe: str) -> list[str]:
    """Return the names of the tables and figures that a recipe has a row in."""
    return [name for name, table in published_tables().items() if recipe in table.recipes()]
