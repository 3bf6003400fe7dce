"""The recast command. It is imported when it is called, as its options are those of the registered rules."""

from functools import reduce
from operator import or_
from typing import Annotated, Any, Literal

from cyclopts import Parameter

import isomorph as iso
from isomorph.cli import options as opt
from isomorph.cli.output import show, spinner
from isomorph.cli.tables import tables
from isomorph.json_values import JsonObject
from isomorph.terminal_tables import count_of

# as they are parsed
_TYPES = {"bool": bool, "float": float, "int": opt.Whole, "str": str, "tuple[int, int]": opt.Size}


def _with_rule_options(command: opt.Command) -> opt.Command:
    """Let a command take any rule and the fields of all: `fields` becomes a dataclass, None where one is not given."""
    library = tables()
    field_types = {}
    for row in library["rule_options"]:
        field_types[row["name"]] = Annotated[_kind(row), Parameter(help=row["help"])]
    members = {"__annotations__": field_types, "__module__": __name__, **dict.fromkeys(field_types)}
    fields: Any = opt.group(type("RuleFields", (), members))
    help_ = " ".join(f"{name}: {text}" for name, text in library["rules"].items())
    command.__annotations__["rule"] = Annotated[
        Literal[tuple(library["rules"])], Parameter(help=help_)
    ]
    command.__annotations__["fields"] = fields
    assert command.__kwdefaults__ is not None
    command.__kwdefaults__["fields"] = fields()
    return command


def _kind(row: JsonObject) -> Any:
    types: list[Any] = [_TYPES[name] for name in row["types"]]
    if row["choices"]:
        types.insert(0, Literal[tuple(row["choices"])])
    return reduce(or_, types) | None


@_with_rule_options
def recast(
    model: opt.Model,
    /,
    *,
    where: list[str],
    out: opt.Out,
    rule: str = "ConvToGPSA",
    fields: Any = None,
    unstride: str | None = None,
    exclude: list[str] | None = None,
    opening: opt.OpenOptions = opt.OpenOptions(),  # noqa: B008 (cyclopts takes its fields for options)
    size: opt.Size = None,
    overwrite: opt.Overwrite = False,
    json_: opt.Json = False,
) -> None:
    """Recast modules of a model as gated attention, refined attention or pyramids; verify and save the new model.

    Example: isomorph recast resnet18 --where "layer4.*.conv2" --out t.safetensors

    Parameters
    ----------
    where
        Glob over module names, for example `layer4.*.conv2` or `blocks.*.attn`. Several may be given.
        LinearToPyramid also recasts q, k or v of a joint qkv layer: `blocks.[0-3].attn.v`. With "*" modules that the
        rule does not accept are skipped.
    unstride
        Glob over stages that lose their stride before recasting; this changes the model's function.
    exclude
        Glob over module names to leave out of --where, with the modules inside; several may be given.
    """
    opt.check_out(out, overwrite, model)
    with opt.loading():
        from isomorph.cli.open_models import open_given
        from isomorph.models.input_sizes import random_inputs
        from isomorph.surgery import NotEqual, compare_outputs, edits_since
        from isomorph.surgery.rule import build_rule
    chosen = build_rule(rule, **vars(fields))
    with spinner("recast") as show_step:
        show_step(f"loading {model}")
        base = open_given(model, opening)
        show_step(f"replacing {' '.join(where)}")
        if unstride:
            base = iso.unstride(base, unstride)
        globs: Any = where
        if where == ["*"]:  # all that the rule accepts
            globs = "*"
        new = iso.recast(base, chosen, globs, exclude or ())
        show_step("comparing the outputs of both models in float32 and float64")
        report = compare_outputs(base, new, [random_inputs(1, base, size)])
    if not report.passed and chosen.keeps_function:
        raise NotEqual(report, "")
    iso.save(new, out)
    names: list[str] = []
    for edit in edits_since(new, base):
        names += edit.names
    done = f"{iso.edits(new)[-1].rule} on {count_of(len(names), 'module')}"
    told = str(report)
    if not report.passed:
        told += "\n(with these options the outputs change: fine-tune the new model)"
    facts = {"recast": names, "out": str(out), "report": report.as_dict()}
    show(json_, facts, f"{done}\n{told}\nwrote {out}")
