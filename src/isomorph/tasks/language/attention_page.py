"""A page of a text network's attention: tokens along both sides of every map, head by head, padding in grey."""

import copy
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.report.figures import pyplot, style
from isomorph.report.html import ImageCard, Section, write_page
from isomorph.report.page_images import data_uri
from isomorph.tasks.language.sentences import PadBatch
from isomorph.terminal_tables import metric_table

EXAMPLES = 3
"""Examples on the page: of the shortest, a middle and the longest that fits."""
MAX_TOKENS = 32
"""Most tokens of an example on the page, so that they can be read."""
MAX_LAYERS = 6
"""Layers on the page; of deeper networks this many, evenly spread."""
_TILE = 4.2
"""Side of a map in inches, so that its tokens can be read."""
_COLUMNS = 2
"""Heads side by side: a phone shows no more."""
_PADDING = "#d0d0d0"


def write_attention(path: Path, model: nn.Module, examples: Any, tokenizer: Any, metrics: Mapping[str, float]) -> None:
    """Write a page with the metrics of a test and the attention maps of some of its examples.

    Raises: UserError when it cannot be written, or the network hands out no maps.
    """
    batch = choose_examples(examples, tokenizer.pad_token_id)
    maps = attention_of(model, batch)
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    tokens = [tokenizer.convert_ids_to_tokens(ids) for ids in batch["input_ids"].tolist()]
    shown = sorted(set(np.linspace(0, len(maps) - 1, min(MAX_LAYERS, len(maps))).round().astype(int).tolist()))
    text = (
        "Each row is a query, each column a key that it attends to. The examples are one batch: padding is grey. "
        "Blue is negative attention, which refined maps may have; a map without it is drawn from black to yellow."
    )
    sections = [Section("Metrics", "Over the whole test.", table=metric_table("test", metrics))]
    for number in shown:
        cards = [_card(maps[number][i], tokens[i], real[i], i) for i in range(len(tokens))]
        sections.append(Section(f"Layer {number + 1} of {len(maps)}", text, images=cards, wide=True))
    heads = maps[0].shape[1]
    lead = f"Attention of {len(maps)} layers with {heads} heads each, on {len(tokens)} examples of the test."
    write_page(path, "Attention on text", lead, sections)


def choose_examples(examples: Any, padding: int) -> dict[str, Tensor]:
    """Return a batch of some examples, from the shortest to the longest that fits the page; longer ones are cut."""
    lengths = np.array([len(examples[i][0]["input_ids"]) for i in range(min(len(examples), 2000))])
    order = np.argsort(lengths, kind="stable")
    fitting = order[lengths[order] <= MAX_TOKENS]
    pool = fitting if len(fitting) else order
    chosen = pool[np.unique(np.linspace(0, len(pool) - 1, min(EXAMPLES, len(pool))).round().astype(int))]
    cut = [({n: x[:MAX_TOKENS] for n, x in examples[int(i)][0].items() if n != "positions"}, Tensor()) for i in chosen]
    return PadBatch(padding)(cut)[0]


@torch.no_grad()
def attention_of(model: Any, batch: dict[str, Tensor]) -> Sequence[Tensor]:
    """Return the attention maps of every layer, as the network applies them. Shape: -> layers of (B, nh, N, N)

    Raises: UserError for a network that does not form maps.
    """
    body = copy.deepcopy(model.body).eval()
    body.set_attn_implementation("eager")  # the other implementations never form a map
    inputs = {name: x.to(model.table.device) for name, x in batch.items()}
    if getattr(body.config, "type_vocab_size", 0) <= 1:
        inputs.pop("token_type_ids", None)
    maps = getattr(body(**inputs, output_attentions=True), "attentions", None)
    if not maps or maps[0] is None:
        raise UserError(f"{type(body).__name__} does not return its attention maps, so it has no page")
    return [layer.float().cpu() for layer in maps]


def _card(maps: Tensor, tokens: Sequence[str], real: Tensor, number: int) -> ImageCard:
    """Return the maps of all heads for one example, two in a row. Shape: maps (nh, N, N), real (N,)"""
    plt = pyplot()
    low, high = maps[:, real][:, :, real].min().item(), maps[:, real][:, :, real].max().item()
    bound = max(-low, high)
    scale = dict(cmap="RdBu_r", vmin=-bound, vmax=bound) if low < 0 else dict(cmap="magma", vmin=0, vmax=high)
    hidden = ~(real[:, None] & real).numpy()
    with style():
        columns = min(_COLUMNS, len(maps))
        rows = -(-len(maps) // columns)
        figure, axes = plt.subplots(rows, columns, figsize=(_TILE * columns, _TILE * rows), squeeze=False)
        for axis in axes.flat[len(maps) :]:
            axis.set_visible(False)
        for head, axis in enumerate(axes.flat[: len(maps)]):
            values = np.ma.masked_array(maps[head].numpy(), hidden)
            colours = plt.get_cmap(scale["cmap"]).with_extremes(bad=_PADDING)
            axis.imshow(values, **{**scale, "cmap": colours}, interpolation="nearest")
            axis.set_title(f"head {head + 1}", fontsize=9)
            axis.set_xticks(range(len(tokens)), tokens, rotation=90, fontsize=6)
            axis.set_yticks(range(len(tokens)), tokens, fontsize=6)
            axis.tick_params(length=0)
        figure.tight_layout()
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=130)
        plt.close(figure)
    words = " ".join(token for token, counts in zip(tokens, real.tolist(), strict=True) if counts)
    return ImageCard(
        data_uri(file.getvalue(), "png"), f"example {number + 1}", [words, f"attention from {low:.2f} to {high:.2f}"]
    )
