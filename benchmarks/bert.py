"""Refined attention in transformers' text models: equality, leaks across padding, exports, and cost next to plain.

    python benchmarks/bert.py [--tables verify leaks exports cost] [--rounds 5] [--forms plain refined] [--name bert]

Cost is of BERT-Small: times relative to the plain network with transformers' `sdpa`, all interleaved in one process;
MiB are kept for the backward pass, of one sequence. A step is a forward and a backward pass.
"""

import argparse
import copy
import tempfile
from pathlib import Path

import timm
import torch
from torch import nn

import isomorph as iso
from interleave import interleaved, kept_mib, show, update
from isomorph.layers.map_edit import RefinedMap

WIDTHS = dict(vocab_size=1000, hidden_size=64, num_hidden_layers=4, num_attention_heads=4)
FAMILIES = {
    "bert": dict(intermediate_size=256),
    "electra": dict(intermediate_size=256, embedding_size=32),
    "roberta": dict(intermediate_size=256, pad_token_id=0),
    "distilbert": dict(hidden_dim=256),
}
LENGTHS = (64, 50, 33, 7)
RULE = iso.AttentionToRefined(ratio=3)


def build(family, **changes):
    """A network of the family, and the same with refined attention."""
    torch.manual_seed(0)
    fields = WIDTHS | FAMILIES[family] | changes
    plain = timm.create_model("text_transformer", family=family, num_classes=4, **fields).eval()
    return plain, iso.recast(
        plain, RULE, where="*.attention" if family == "distilbert" else "*.attention.self"
    )


def padded_batch(lengths=LENGTHS, vocabulary=1000):
    """Sequences of unequal lengths, padded on the right."""
    generator = torch.Generator().manual_seed(0)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(1, vocabulary, mask.shape, generator=generator)
    return dict(input_ids=ids * mask, attention_mask=mask)


def verify_table():
    """Largest differences of refined from plain networks on a padded batch, and of pyramids from what they fuse to."""
    rows = []
    for family in FAMILIES:
        plain, refined = build(family)
        wide = iso.recast(
            plain, iso.LinearToPyramid("P-W2S"), where=lambda name, _: ".layer." in name
        )
        pairs = {
            "refined attention": (plain, refined),
            "pyramids": (plain, wide),
            "fused": (wide, iso.fuse(wide)),
        }
        for form, (one, other) in pairs.items():
            report = iso.surgery.compare_outputs(one, other, padded_batch(), atol=1e-4)
            layers = (
                len(iso.edits(other)[-1].names)
                if form != "fused"
                else len(iso.edits(wide)[0].names)
            )
            rows.append(
                dict(family=family, change=form, layers=layers, fp32=report.fp32, fp64=report.fp64)
            )
            assert report.passed
    return [{k: f"{v:.1e}" if isinstance(v, float) else v for k, v in row.items()} for row in rows]


def train_refiners(model):
    """Move the refiners away from where they change nothing."""
    for module in model.modules():
        if isinstance(module, RefinedMap):
            for parameter in module.parameters():
                nn.init.normal_(parameter, std=0.3)
    return model


def leak_table():
    """What real tokens compute in a padded batch against what they compute alone, with random refiners, in float64."""
    rows = []
    for family in FAMILIES:
        for implementation in ("sdpa", "eager"):
            model = train_refiners(build(family)[1]).double()
            model.body.set_attn_implementation(implementation)
            rows.append(dict(family=family, attention=implementation, **leak(model)))
    return rows


def leak(model):
    """The largest differences of the outputs of real tokens, and of all gradients, relative to the largest."""
    batch, parameters = (
        padded_batch(),
        [p for n, p in model.named_parameters() if not n.startswith("head")],
    )
    together = model.forward_features(**batch)
    weights = torch.randn(
        together.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    real = batch["attention_mask"][..., None]
    gradients = torch.autograd.grad((together * weights * real).sum(), parameters)
    outputs, total = 0.0, 0.0
    for i, n in enumerate(LENGTHS):
        alone = model.forward_features(batch["input_ids"][i : i + 1, :n])
        outputs = max(outputs, (alone[0] - together[i, :n]).abs().max().item())
        total = total + (alone[0] * weights[i, :n]).sum()
    alone_gradients = torch.autograd.grad(total, parameters)
    pairs = zip(gradients, alone_gradients, strict=True)
    worst = max(
        ((a - b).abs().max() / b.abs().max().clamp_min(1e-30)).item()
        for a, b in pairs
        if b.abs().max() > 1e-9
    )
    return {"outputs": f"{outputs:.1e}", "gradients, relative": f"{worst:.1e}"}


def export_table():
    """Largest differences of exported files, of any batch and length, from networks of one layer, random refiners."""
    rows = []
    for family in FAMILIES:
        model = train_refiners(build(family, num_hidden_layers=1)[1])
        for format in ("onnx", "pt2"):
            with tempfile.TemporaryDirectory() as folder:
                report = iso.export(model, Path(folder) / f"net.{format}", dynamic="batch,size")
            found = report.deviation
            shapes = ", ".join(row.shape for row in found.inputs)
            rows.append(
                dict(family=family, format=format, shapes=shapes, fp32=found.fp32, fp64=found.fp64)
            )
            assert found.passed
    return [{k: f"{v:.1e}" if isinstance(v, float) else v for k, v in row.items()} for row in rows]


def run_of(model, inputs, train):
    """A forward pass, or a forward and backward pass."""

    def run():
        model.zero_grad()
        with torch.set_grad_enabled(train):
            out = model(**inputs).float().sum()
        if train:
            out.backward()

    return run


def contenders(num_classes):
    """BERT-Small plain, with sdpa and eager attention, and refined, recomputed or not."""
    plain = timm.create_model("bert_small", num_classes=num_classes)
    eager = copy.deepcopy(plain)
    eager.body.set_attn_implementation("eager")
    recomputed = iso.AttentionToRefined(ratio=3, recompute=True)
    return {
        "plain": plain,
        "plain, eager": eager,
        "refined": iso.recast(plain, RULE, where="*.attention.self"),
        "refined, recomputed": iso.recast(plain, recomputed, where="*.attention.self"),
    }


def cost_table(rounds, forms):
    """BERT-Small as it is fine-tuned, at 128 and 512 tokens and on a padded batch, and as it is pre-trained."""
    rows = []
    padded = padded_batch((128, 110, 90, 77, 60, 51, 40, 23), 30522)
    shapes = [
        ("classes", 128, 8),
        ("classes", 512, 2),
        ("classes", "23 to 128", 8),
        ("words", 128, 8),
    ]
    for head, tokens, batch in shapes:
        networks = {
            name: net
            for name, net in contenders(2 if head == "classes" else 0).items()
            if name in forms
        }
        inputs = (
            padded
            if isinstance(tokens, str)
            else dict(input_ids=torch.randint(1000, 30000, (batch, tokens)))
        )
        if head == "words":
            inputs |= dict(
                positions=torch.stack([torch.randperm(tokens)[:19] for _ in range(batch)])
            )
        fast = interleaved(
            {n: run_of(m.eval(), inputs, False) for n, m in networks.items()},
            torch.device("cpu"),
            rounds,
        )
        slow = interleaved(
            {n: run_of(m.train(), inputs, True) for n, m in networks.items()},
            torch.device("cpu"),
            rounds,
        )
        rows += [
            {
                "head": head,
                "tokens": tokens,
                "batch": batch,
                "form": name,
                "forward ms": fast[name],
                "forward, times plain": fast[name] / fast["plain"],
                "step ms": slow[name],
                "step, times plain": slow[name] / slow["plain"],
                "MiB a sequence": kept_mib(network, lambda m=network, i=inputs: m(**i))
                / len(inputs["input_ids"]),
            }
            for name, network in networks.items()
        ]
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", nargs="+", default=["verify", "leaks", "exports", "cost"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--forms", nargs="+", default=["plain", "plain, eager", "refined", "refined, recomputed"]
    )
    parser.add_argument("--name", default="bert")
    arguments = parser.parse_args()
    makers = {
        "verify": verify_table,
        "leaks": leak_table,
        "exports": export_table,
        "cost": lambda: cost_table(arguments.rounds, arguments.forms),
    }
    for title in arguments.tables:
        rows = makers[title]()
        show(title, rows)
        update(arguments.name, {title: rows})


if __name__ == "__main__":
    main()
