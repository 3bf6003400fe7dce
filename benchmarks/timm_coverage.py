"""Which modules of every timm model each rule accepts, and one model of every family verified in float64.

    nice -n 10 python benchmarks/timm_coverage.py [--family NAME ...] [--runs runs/coverage]
    nice -n 10 python benchmarks/timm_coverage.py --norms [--speed]

Counts on the meta device, then verifies the smallest model of each family with random weights and statistics: every
rule that accepts a module, on an image of odd size where the model takes one. Both parts resume. Writes
benchmarks/results/coverage.json and the table of docs/reference/coverage.md. One thread. With --finished, writes what
is finished and stops.

With --norms, counts the BatchNorms that fuse merges in the model of each family that was verified, and in a few with
methods of their own; --speed times some before, fused, after timm's method, and two of them compiled, in turns, in one
process. Both write benchmarks/results/merged_norms.json.
"""

import argparse
import json
import time
import warnings
from collections import Counter
from pathlib import Path

import timm
import torch
from timm.utils import reparameterize_model

import isomorph as iso
from interleave import RESULTS, forward, interleaved, processor
from isomorph.lab.evaluation.coverage import (
    cover_models,
    family_of,
    merge_norms,
    summarise_coverage,
    timm_models,
)
from isomorph.surgery.attention_layers import FACTS
from isomorph.surgery.rule import RULES

ODD, MOST = (97, 129), 6
"""Height and width that models are tried on first, and most modules that ConvToGPSA and LinearToPyramid recast.

ConvToGPSA recasts the last ones: its cost grows with the square of the number of positions.
"""
PAGE = Path(__file__).parents[1] / "docs/reference/coverage.md"
MARKS = ("<!-- table: benchmarks/timm_coverage.py -->", "<!-- end of the table -->")
SAMPLE = [
    "resnet18",
    "swin_tiny_patch4_window7_224",
    "levit_128s",
    "xcit_nano_12_p16_224",
    "mobilevit_xxs",
]
SAMPLE += ["test_nfnet"]
"""Models whose rows the tests compare."""
OWN_METHODS = [
    "resnet50",
    "repvgg_a0",
    "repvit_m0_9",
    "regnety_002",
    "repghostnet_050",
    "lcnetv2_base",
]
OWN_METHODS += ["mobileone_s0", "ghostnetv3_050", "levit_128s", "efficientnet_b0"]
TIMED = ["resnet50", "repvgg_a0", "repvgg_a1", "fastvit_t8"]
LARGEST = 40e6
"""Models with more parameters are not verified: their smallest member would take a CPU minutes."""


def read_rows(path):
    """Rows of a file with one a line; a last line that was cut off is dropped."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def resume(path, names, make):
    """Append `make(name)` for every name that the file does not have yet, and return all rows by name."""
    rows = {row["model"]: row for row in read_rows(path)}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for name in names:
            if name not in rows:
                rows[name] = make(name)
                file.write(json.dumps(rows[name]) + "\n")
                file.flush()
    return {name: rows[name] for name in names}


def count(name):
    """Coverage of one model, and its number of parameters."""
    return next(cover_models([name], {rule: kind() for rule, kind in RULES.items()}))


def randomised(name):
    """A model with random weights and statistics, in float64."""
    torch.manual_seed(0)
    model = timm.create_model(name).eval().double().requires_grad_(False)
    for parameter in model.parameters():
        parameter += (
            0.05
            * torch.randn_like(parameter)
            * (parameter.std(correction=0) + 0.2 * (parameter.ndim < 2))
        )
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("running_mean"):
            buffer += 0.1 * torch.randn_like(buffer)
        elif buffer_name.endswith("running_var"):
            buffer *= 0.5 + torch.rand_like(buffer)
    return model


def run(model):
    """Output of a model on the odd size, or else on its own: (image, output)."""
    own = tuple(model.pretrained_cfg.get("input_size", (3, 224, 224))[-2:])
    for size in (ODD, own):
        x = torch.randn(
            1, 3, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
        )
        try:
            return x, first_tensor(model(x))
        except Exception as error:
            problem = error
    raise problem


def first_tensor(output):
    return output if isinstance(output, torch.Tensor) else output[0]


def chosen(names, most):
    """At most this many of the outermost names, evenly spaced."""
    outer = [n for n in names if not any(n != m and n.startswith(f"{m}.") for m in names)]
    return (
        outer
        if len(outer) <= most
        else [outer[int((i + 0.5) * len(outer) / most)] for i in range(most)]
    )


def verify_model(name):
    """Deviation of every rule that accepts a module, relative to the largest output (or 1), in float64."""
    start, row = time.perf_counter(), {"model": name, "family": family_of(name), "rules": {}}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = randomised(name)
            x, before = run(model)
            row["size"] = list(x.shape[-2:])
            for rule, kind in RULES.items():
                names = iso.surgery.acceptance(model, kind()).accepted
                if names:
                    if rule in ("ConvToGPSA", "LinearToPyramid"):
                        names = names[-MOST:] if rule == "ConvToGPSA" else chosen(names, MOST)
                    row["rules"][rule] = verify_rule(
                        model, kind(), chosen(names, len(names)), x, before
                    )
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    print(name, f"{time.perf_counter() - start:.0f} s", row, flush=True)
    return row


def verify_rule(model, rule, names, x, before):
    """The number of recast modules and the deviation, or an error."""
    try:
        new = iso.recast(model, rule, lambda name, _: name in names)
        after = first_tensor(new.double().eval()(x))
        scale = max(1.0, before.abs().max().item())
        return {"modules": len(names), "deviation": (after - before).abs().max().item() / scale}
    except Exception as error:
        return {
            "modules": len(names),
            "error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}",
        }


def merged(given):
    """What fuse merges, and how fast models are before, fused and after timm's method: milliseconds an image."""
    path = RESULTS / "merged_norms.json"
    result = json.loads(path.read_text()) if path.exists() else {}
    if given.norms:
        families = json.loads((RESULTS / "coverage.json").read_text())["verified"].values()
        names = sorted({row["model"] for row in families if "error" not in row} | {*OWN_METHODS})
        result["models"] = list(merge_norms(names))
    if given.speed:
        result["milliseconds"] = {}
        for name in TIMED:
            torch.manual_seed(0)
            model, x = timm.create_model(name).eval(), torch.randn(1, 3, 224, 224)
            contenders = {
                "before": model,
                "fused": iso.fuse(model),
                "timm": reparameterize_model(model),
            }
            contenders |= {
                f"{kind}, compiled": torch.compile(contenders[kind]) for kind in ("before", "fused")
            }
            runs = {kind: forward(net, x) for kind, net in contenders.items()}
            result["milliseconds"][name] = interleaved(runs, x.device)
            print(name, result["milliseconds"][name], flush=True)
    result["machine"] = processor()
    path.write_text(json.dumps(result, indent=1) + "\n")


def by_turns(names):
    """The first model of every family, then the second, and so on: a run that is cut off has seen all families."""
    seen = Counter()
    turns = []
    for name in names:
        turns.append((seen[family_of(name)], name))
        seen[family_of(name)] += 1
    return [name for _, name in sorted(turns)]


def smallest(rows):
    """The smallest model of every family, and how large it is."""
    found = {}
    for row in rows.values():
        if (
            "error" not in row
            and row["parameters"] < found.get(row["family"], row)["parameters"] + 1
        ):
            found[row["family"]] = row
    return {row["model"]: row["parameters"] for row in found.values()}


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", nargs="*")
    parser.add_argument("--runs", type=Path, default=Path("runs/coverage"))
    parser.add_argument("--count-only", action="store_true")
    parser.add_argument("--finished", action="store_true")
    parser.add_argument("--norms", action="store_true")
    parser.add_argument("--speed", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.norms or given.speed:
        return merged(given)
    names = by_turns(
        [name for name in timm_models() if not given.family or family_of(name) in given.family]
    )
    if given.finished:
        done = {
            row["model"]: row
            for path in given.runs.glob("*counted.jsonl")
            for row in read_rows(path)
        }
        return write(done, {row["model"]: row for row in read_rows(given.runs / "verified.jsonl")})
    counted = resume(given.runs / "counted.jsonl", names, count)
    few = sorted(name for name, size in smallest(counted).items() if size <= LARGEST)
    path = given.runs / "verified.jsonl"
    rows = (
        {row["model"]: row for row in read_rows(path)}
        if given.count_only
        else resume(path, few, verify_model)
    )
    verified = {name: row for name, row in rows.items() if name in few}
    if given.family:
        return None
    return write(counted, verified)


def write(counted, verified):
    """Write the result file: families with their rules and reasons, deviations, and a sample for the tests."""
    result = {
        "timm": timm.__version__,
        "models": len(counted),
        "of": len(timm_models()),
        "errors": {name: row["error"] for name, row in counted.items() if "error" in row},
        "goals": goals(counted.values()),
        "families": summarise_coverage(counted.values()),
        "verified": {
            row["family"]: {k: v for k, v in row.items() if k != "family"}
            for row in verified.values()
        },
        "sample": {name: counted[name] for name in SAMPLE if name in counted},
    }
    (RESULTS / "coverage.json").write_text(json.dumps(result, indent=1) + "\n")
    before, _, rest = PAGE.read_text().partition(MARKS[0])
    PAGE.write_text(
        f"{before}{MARKS[0]}\n\n{markdown(result)}\n\n{MARKS[1]}{rest.partition(MARKS[1])[2]}"
    )


def goals(rows):
    """How far the rules reach: CNNs with a layer for ConvToGPSA, families whose maps are all edited, linear layers."""
    rows = [row for row in rows if "error" not in row]
    families = summarise_coverage(rows)
    found = {"cnns": cnns_taken(rows)}
    for rule in ("AttentionToRefined", "AttentionToGPSA"):
        complete, forming = [], []
        for family, counts in families.items():
            total = counts["rules"][rule]
            maps = total["modules"] - sum(
                n for reason, n in total["reasons"].items() if has_no_map(reason)
            )
            forming += [family] * (maps > 0)
            complete += [family] * (0 < maps == total["accepted"])
        found[rule] = {
            "every": len(complete),
            "of": len(forming),
            "not": sorted(set(forming) - set(complete)),
        }
    for rule in ("ConvToGPSA", "LinearToPyramid"):
        totals = [counts["rules"][rule] for counts in families.values()]
        reasons = sum((Counter(total["reasons"]) for total in totals), Counter())
        found[rule] = {
            name: sum(total[name] for total in totals) for name in ("accepted", "modules")
        }
        found[rule]["reasons"] = dict(reasons.most_common())
    return found


def cnns_taken(rows):
    """Of the models with convolutions beyond a patch embedding and without attention: those with one that is taken."""
    cnns = [row["rules"] for row in rows if row["rules"]["AttentionToRefined"][1] == 0]
    taken = [rules["ConvToGPSA"][0] > 0 for rules in cnns if rules["ConvToGPSA"][1] > 1]
    return {"some": sum(taken), "of": len(taken)}


def has_no_map(reason):
    """True for the reason of a layer that is called attention but has no map from queries to keys."""
    texts = {facts.no_map for facts in FACTS.values() if facts and facts.no_map}
    return any(text in reason for text in (*texts, "with no queries and keys"))


def cell(total):
    """Accepted of all modules of the rule's kind in a family: "all", "12 of 20", or "-" where it has none."""
    if not total or not total["modules"]:
        return "-"
    return (
        "all"
        if total["accepted"] == total["modules"]
        else f"{total['accepted']:,} of {total['modules']:,}"
    )


def largest_deviation(result, family):
    """The largest deviation over the rules that were tried on a model of the family; None without any."""
    rules = result["verified"].get(family, {}).get("rules", {})
    return max((rule["deviation"] for rule in rules.values() if "deviation" in rule), default=None)


def markdown(result):
    """What the documentation says of families: lists of those that are alike, and a table of the others."""
    whole, tokens, rows = [], [], []
    for family, found in result["families"].items():
        rules = found["rules"]
        total = rules.get("ConvToGPSA")
        convolutions = cell(total)
        edits = " / ".join(
            dict.fromkeys(
                cell(rules.get(name)) for name in ("AttentionToRefined", "AttentionToGPSA")
            )
        )
        if convolutions in ("all", "-") and edits in ("all", "-"):
            whole.append(family)
        elif edits == "all" and total["accepted"] == 0:
            tokens.append(family)
        else:
            rows.append([family, str(found["models"]), convolutions, edits])
    deviations = {family: largest_deviation(result, family) for family in result["families"]}
    tried = [value for value in deviations.values() if value is not None]
    missing = [family for family, value in deviations.items() if value is None]
    table = [["family", "models", "`ConvToGPSA`", "edits of maps"], ["---"] * 4, *rows]
    return "\n\n".join(
        [
            f"**Everything is taken** (convolutions and attention, where there are any) in {', '.join(whole)}.",
            f"**All attention, but not the convolutions of the patch embedding**, in {', '.join(tokens)}.",
            f"**Verified** in {len(tried)} families, largest deviation {max(tried):.0e}; not tried: "
            f"{', '.join(missing)}.",
            "\n".join(
                f"| {' | '.join(text.replace('|', chr(92) + '|') for text in line)} |"
                for line in table
            ),
        ]
    )


if __name__ == "__main__":
    main()
