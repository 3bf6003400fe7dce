"""Write the pages of the documentation that follow from the program.

Run `python docs_build/generate.py` after a change of the command line, recipes, models or the public API.

Command line, recipe fields, recipes, models, suites, the API's pages and the table of messages. These pages are
committed, so that they can be read without a build; `tests/test_docs.py` holds them equal to what this script writes.
The changelog's page is a copy of CHANGELOG.md, and only made for the site.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, get_args, get_origin
from unittest.mock import patch

import isomorph

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
GENERATED = "<!-- written by docs_build/generate.py -->"
NAMESPACES = (
    "surgery",
    "layers",
    "models",
    "analysis",
    "data",
    "evaluation",
    "report",
    "training",
    "deployment",
)
"""Packages of the public API that have a page of their own."""


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; vertical bars in cells are escaped."""
    lines = [list(head), ["---"] * len(head), *map(list, rows)]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines
    )


def page(title: str, *parts: str) -> str:
    """Return a page with its title, and a mark that it is generated."""
    return "\n\n".join([f"# {title}", GENERATED, *parts]).rstrip() + "\n"


def public_names(package: ModuleType) -> list[str]:
    """Return the names that a package of the public API offers, without its namespaces and constants."""
    return [name for name in package.__all__ if name not in NAMESPACES and not name.isupper()]


def first_paragraph(path: Path) -> str:
    """Return the first paragraph of a file's docstring."""
    return (
        (ast.get_docstring(ast.parse(path.read_text())) or "")
        .partition("\n\n")[0]
        .replace("\n", " ")
    )


def api_page(package: ModuleType, shown: str) -> str:
    """Return the page of a namespace: one directive of mkdocstrings for each public name."""
    names = sorted(public_names(package), key=str.lower)
    entries = (f"::: {package.__name__}.{name}\n" for name in names)
    lead = f"After `import isomorph as iso`, the names on this page are in `{shown}`."
    title = shown.replace("iso", "isomorph", 1)
    return page(title, first_paragraph(Path(package.__file__ or "")), lead, *entries)


def command_line_page() -> str:
    """Return the reference of all commands in alphabetical order, as cyclopts documents them."""
    from isomorph.cli.run import app

    with patch.object(sys, "argv", ["isomorph"]):  # cyclopts reads the program's name from here
        text = app.generate_docs(output_format="markdown", heading_level=1)
    _, *commands = re.split(r"^(?=## isomorph)", text.strip() + "\n\n", flags=re.MULTILINE)
    body = "".join(sorted(commands))
    body = re.sub(r" \*\[default: (?:False|\(\)|\[\])\]\*", "", body)
    body = re.sub(r"Example: (isomorph .*)", r"Example: `\1`", body)
    body = re.sub(r"\*\*(Arguments|Parameters)\*\*:\n+", "", body)
    body = re.sub(
        r"Every field of the recipe is an option:\n.*?(?=^## |\Z)",
        "Every [field of the recipe](recipe-fields.md) is an option, for example `--optim.lr 1e-4`.\n\n",
        body,
        flags=re.MULTILINE | re.DOTALL,
    )
    return page(
        "Command line",
        "Every command, with its options and defaults. `isomorph COMMAND --help` prints the same. The exit status is "
        "0; 2 after an error, or if models are not equal; 1 if weights or outputs are not finite, or `doctor` finds a "
        "problem; and 128 plus the number of a signal that stopped the command.",
        *shared_options(name_rule_options(body)),
    )


OPTION = re.compile(r"^\* `(--[a-z-]+|[A-Z]+\b).*\n(?: +.*\n)*", re.MULTILINE)
"""An option or argument in the reference that cyclopts writes."""


def name_rule_options(body: str) -> str:
    """Replace the texts of rules, and of their options, by their names and a link."""
    from isomorph.lab.training.recipe.rule_options import rule_options, rule_texts

    flags = {f"--{name.replace('_', '-')}" for name in rule_options()}
    before, start, rest = body.partition("\n## isomorph recast\n")
    recast, end, after = rest.partition("\n## ")
    names = ", ".join(f"`{name}`" for name in rule_texts())
    listed = ", ".join(f"`{match[1]}`" for match in OPTION.finditer(recast) if match[1] in flags)
    line = f"* Options of the rules, [explained there](rules.md): {listed}.\n"
    recast = OPTION.sub(lambda match: "" if match[1] in flags else match[0], recast)
    recast = re.sub(
        r"(?m)^\* `--rule CHOICE`.*\n",
        lambda match: (
            f"* `--rule CHOICE`: The [rule](rules.md): {names}. *[default: ConvToGPSA]*\n{line}"
        ),
        recast,
    )
    return f"{before}{start}{recast}{end}{after}"


def shared_options(body: str) -> tuple[str, str]:
    """Return a section of the options that two commands or more have, and the commands with these by name only."""
    shared: dict[str, str] = {}  # of several texts for one name, the most frequent
    for text, times in Counter(match[0] for match in OPTION.finditer(body)).most_common():
        name = OPTION.match(text)[1]  # type: ignore[index]
        if times > 1 and name not in shared.values():
            shared[text] = name
    parts = []
    for command in re.split(r"(?=^## )", body, flags=re.MULTILINE):
        names = [shared[match[0]] for match in OPTION.finditer(command) if match[0] in shared]
        rest = OPTION.sub(lambda match: "" if match[0] in shared else match[0], command).rstrip()
        line = f"\n\n[Shared options](#options-of-several-commands): {', '.join(f'`{name}`' for name in names)}."
        if "Example: " in rest:
            rest = re.sub(r"```console\n.*\n```\n\n", "", rest)
        rest = re.sub(r"\n{3,}", "\n\n", rest)
        parts.append(rest + (line if names else ""))
    return "## Options of several commands\n\n" + "".join(shared), "\n\n".join(filter(None, parts))


def type_text(hint: Any) -> str:
    """Return a type as readers of a recipe need it: choices, number, text, yes or no."""
    origin, arguments = get_origin(hint), get_args(hint)
    if str(origin) == "typing.Literal":
        return ", ".join(f"`{choice}`" for choice in arguments)
    if origin is not None and getattr(origin, "__name__", "") in ("Union", "UnionType"):
        return " or ".join(
            dict.fromkeys(type_text(part) for part in arguments if part is not type(None))
        )
    if hasattr(hint, "__metadata__"):
        return type_text(arguments[0])
    if origin in (list, tuple):
        kind = type_text(arguments[0])
        return f"list of {kind}{'s' * kind.endswith('number')}"
    names = {
        dict: "mapping",
        Mapping: "mapping",
        bool: "true or false",
        int: "whole number",
        float: "number",
        str: "text",
        Path: "path",
    }
    return names.get(origin or hint, getattr(hint, "__name__", str(hint)))


def default_text(field: Any) -> str:
    """Return the default of a field as it is written in a recipe."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return (
        "none"
        if value in (None, "", [], {})
        else f"`{str(value).lower() if isinstance(value, bool) else value}`"
    )


def field_line(name: str, field: Any, meaning: str = "") -> str:
    """Return a field as a line of a list: name, type, default and meaning."""
    kind, default = type_text(field.annotation), default_text(field)
    kinds = [] if kind == "Any" or (kind == "true or false" and default != "none") else [kind]
    defaults = (
        [] if default == "none" else [default if default == "required" else f"default {default}"]
    )
    brackets = "; ".join([*kinds, *defaults])
    text = meaning or " ".join((field.description or "").split())
    return f"* `{name}`{f' ({brackets})' if brackets else ''}: {text}"


def group_lines(part: Any, prefix: str) -> str:
    """Return the fields of a group that are not groups themselves, as lists; those of rules and tasks by owner."""
    from isomorph.lab.training.recipe.fields import TaskPart, part_of
    from isomorph.lab.training.recipe.rule_options import rule_texts
    from isomorph.lab.training.recipe.tasks import TASKS, find_task

    lists: dict[str, list[str]] = {}
    if part is TaskPart:
        fields = dict(part.model_fields)
        owners: dict[str, list[str]] = {}
        for task in TASKS:
            for name, field in find_task(task).fields.model_fields.items():
                owners.setdefault(field_line(prefix + name, field), []).append(f"`{task}`")
        for line, tasks in owners.items():
            lists.setdefault(" and ".join(tasks), []).append(line)
    else:
        fields = {
            name: field
            for name, field in part.documented_fields().items()
            if not part_of(field.annotation)
        }
    names = "|".join(rule_texts())
    of_rules: dict[str, list[str]] = {}
    for name, field in fields.items():
        owners = re.findall(
            rf"(?:^| )((?:{names})(?:, (?:{names}))*): ",
            " ".join((field.description or "").split()),
        )
        if not owners:
            lists.setdefault("", []).append(field_line(prefix + name, field))
        for rule in ", ".join(owners).split(", ") if owners else ():
            of_rules.setdefault(rule, []).append(f"`{name}`")
    blocks = ["\n".join(lists.pop("", []))]
    blocks += [f"Fields of {owner}:\n\n" + "\n".join(lines) for owner, lines in lists.items()]
    if of_rules:
        lines = [f"* `{rule}`: {', '.join(own)}" for rule, own in of_rules.items()]
        blocks.append(
            f"Fields `{prefix}NAME` of the rules, [explained there](rules.md):\n\n"
            + "\n".join(lines)
        )
    return "\n\n".join(blocks)


def group_sections(part: Any, prefix: str = "") -> list[str]:
    """Return a section for a group of fields, and for each group in it."""
    from isomorph.lab.training.recipe.fields import part_of

    title = f"## {prefix.rstrip('.')}" if prefix else "## The run"
    lead = [] if not prefix else [first_line(part.__doc__)]
    inner = [(name, part_of(field.annotation)) for name, field in part.documented_fields().items()]
    return [
        title,
        *lead,
        group_lines(part, prefix),
        *(
            text
            for name, kind in inner
            if kind
            for text in group_sections(kind, f"{prefix}{name}.")
        ),
    ]


def first_line(docstring: str | None) -> str:
    """Return the first line of a docstring."""
    return (docstring or "").strip().partition("\n")[0]


def recipe_fields_page() -> str:
    """Return the reference of all recipe fields, from the models that validate them."""
    from isomorph.lab.training import Recipe

    lead = (
        "A recipe is a YAML or TOML file with these fields. Every field is also an option of `isomorph train`: the "
        "field `optim.lr` is `--optim.lr 1e-4`. Values there are YAML; a size is `--data.size 224 320`.\n\n"
        "`isomorph recipes show NAME > mine.yaml` writes a recipe to start from. How training works: "
        "[training](../training.md)."
    )
    return page("Recipe fields", lead, *group_sections(Recipe))


SHORT_SOURCES = r" \[[a-g]\]|, -V-\d+|(?<=[6l]), (cola|mnli|mrpc|qnli|qqp|rte|sst2|stsb)$"
"""Parts of sources that the names of the recipes say too."""

PAPERS = ("T-CNN", "ConViT", "TDRL", "Refiner", "CoAtNet")
"""Sections of the page of all recipes, by the first word of their sources."""


def recipes_page() -> str:
    """Return the list of all named recipes, by paper and source."""
    from isomorph.lab.recipes import RECIPES

    papers: dict[str, dict[str, list[str]]] = {paper: {} for paper in (*PAPERS, "isomorph")}
    for name, fields in sorted(RECIPES.items()):
        source = fields.get("source", "")
        paper = source.partition(" ")[0] if source.partition(" ")[0] in PAPERS else "isomorph"
        source = re.sub(SHORT_SOURCES, "", source.removeprefix(f"{paper} "))
        papers[paper].setdefault(source, []).append(f"`{name}`")
    lead = (
        "`isomorph train NAME` runs a recipe, `isomorph recipes show NAME` prints it. `isomorph table` has the papers' "
        "numbers, and what each run starts from. JFT is not public. Which published rows have no recipe, and why: "
        "[published runs](../recipes.md)."
    )
    sections = [
        f"## {paper}\n\n"
        + "\n".join(f"* {source}: {', '.join(names)}" for source, names in sorted(found.items()))
        for paper, found in papers.items()
    ]
    return page("Recipes by name", lead, *sections)


def model_rows() -> list[list[str]]:
    """Return name, input size, parameters, multiply-accumulates and source of weights of every model."""
    import timm
    import torch

    import isomorph as iso
    from isomorph.lab.evaluation import count_macs

    rows = []
    for name in iso.models.names():
        with torch.device("meta"):
            model = timm.create_model(name).eval()
        size = model.pretrained_cfg["input_size"]
        parameters = sum(p.numel() for p in model.parameters())
        macs = count_macs(model, tuple(size))
        weights = "yes" if timm.is_model_pretrained(name) else ""
        rows.append(
            [
                f"`{name}`",
                " x ".join(map(str, size[1:])),
                f"{parameters:,}",
                f"{macs / 1e9:.2f}",
                weights,
            ]
        )
    return rows


def models_page() -> str:
    """Return the table of all models."""
    lead = (
        "`import isomorph` adds these models to timm's registry; `timm.create_model(NAME)` creates them. Parameters "
        "are those in training, and multiply-accumulates (MACs) are of one image in inference, before fusing. "
        "Public weights exist where the table says so; those of `t_*` are their CNN's, recast. No weights are public "
        "for the other families.\n\n"
        "Arguments: [arguments of the models](model-arguments.md)."
    )
    head = ["model", "input", "parameters", "GMACs", "public weights"]
    return page("Models", lead, markdown_table(head, model_rows()))


def suites_page() -> str:
    """Return the tables of the test suites: ImageNet's, and the corruptions."""
    from isomorph.lab.data import CORRUPTION_CATEGORIES, EXTRA_CORRUPTIONS
    from isomorph.lab.evaluation import SUITES

    categories = {**CORRUPTION_CATEGORIES, "extra": EXTRA_CORRUPTIONS}
    rows = [
        [
            f"`{suite.name}`",
            f"{suite.images:,}",
            str(1000 if suite.class_indices is None else len(suite.class_indices)),
            ", ".join(f"`{folder}`" for folder in suite.folders if folder != ".")
            or "as `imagenet`",
        ]
        for suite in SUITES.values()
    ]
    corruptions = [
        [kind, ", ".join(f"`{name}`" for name in names)] for kind, names in categories.items()
    ]
    return page(
        "Test suites",
        "`isomorph evaluate MODEL --suite NAME,NAME --root FOLDER` evaluates on these. Labels, metrics and errors: "
        "[evaluation](../evaluation.md).",
        markdown_table(["suite", "images", "classes", "folder below the root"], rows),
        "## Corruptions",
        "`isomorph robustness MODEL` applies these, each at severity 1 to 5; `extra` with `--extra`. Protocol: "
        "[robustness](../robustness.md).",
        markdown_table(["kind", "corruptions"], corruptions),
    )


def changelog_page() -> str:
    """Return the changelog, its links made relative to the documentation."""
    text = (ROOT / "CHANGELOG.md").read_text()
    text = re.sub(r"\]\(docs/", "](", text)
    return re.sub(r"\A(# .*\n)", rf"\1\n{GENERATED}\n", text)


def troubleshooting_page() -> str:
    """Return the page of messages explained, its table from the tests that raise them."""
    sys.path.insert(0, str(ROOT / "tests"))
    from messages import MESSAGES

    rows = [[f"`{contains}`", why, remedy] for contains, (why, remedy, _) in MESSAGES.items()]
    table = markdown_table(["message contains", "why", "what to do"], rows)
    text = (DOCS / "guides" / "troubleshooting.md").read_text()
    return re.sub(r"(?s)\| message contains .*?(?=\n\n)", lambda _: table, text)


PAGES: dict[str, Callable[[], str]] = {
    "guides/troubleshooting.md": troubleshooting_page,
    "reference/command-line.md": command_line_page,
    "reference/recipe-fields.md": recipe_fields_page,
    "reference/recipe-names.md": recipes_page,
    "reference/models.md": models_page,
    "reference/suites.md": suites_page,
    "reference/api/isomorph.md": lambda: api_page(isomorph, "iso"),
    **{
        f"reference/api/{name}.md": lambda name=name: api_page(
            getattr(isomorph, name), f"iso.{name}"
        )  # type: ignore[misc]
        for name in NAMESPACES
    },
}


BUILT: dict[str, Callable[[], str]] = {"changelog.md": changelog_page}
"""Pages that are made with the site, and not committed."""


def main(names: Sequence[str]) -> None:
    """Write the pages whose path contains one of `names`; all committed ones without names."""
    pages = PAGES | BUILT if names else PAGES
    for path, write in pages.items():
        if not names or any(name in path for name in names):
            (DOCS / path).parent.mkdir(parents=True, exist_ok=True)
            (DOCS / path).write_text(write())
            print(f"wrote docs/{path}")


if __name__ == "__main__":
    main(sys.argv[1:])
