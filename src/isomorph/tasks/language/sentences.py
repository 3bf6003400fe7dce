"""Texts as token sequences: tokenisers of transformers, labelled sentences and sentence pairs, padded batches."""

import copy
from collections.abc import Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from isomorph.errors import UserError, optional_module
from isomorph.tasks.language.glue import Row

UNUSED_EMBEDDINGS = 256
"""Most embeddings of a network that its tokeniser may leave unused: sizes are rounded up to multiples of 64 to 256."""
_NEEDED = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@cache
def open_tokenizer(source: str, lower_case: bool = True, fetch: bool = True) -> Any:
    """Return a tokeniser of transformers: a vocabulary of BERT (vocab.txt), a folder, or a name on the hub.

    `lower_case` is for vocabulary files alone: a folder says itself what its tokeniser does. Without `fetch`, for names
    that a checkpoint gives, one on the hub must have been downloaded before. No code of a tokeniser is run.

    Raises: UserError if it cannot be opened, or lacks a special token that masked words need.
    """
    transformers = optional_module("transformers", "tokenisers need the package transformers", "nlp")
    if (path := Path(source)).is_file():
        try:
            words = set(path.read_text(encoding="utf-8").splitlines())
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"task.tokenizer {path} cannot be read: {error}") from None
        if lacking := [token for token in _NEEDED if token not in words]:
            what = f"is not a vocabulary of BERT, one token a line: it has no {lacking[0]}"
            raise UserError(f"task.tokenizer {path} {what}")
        return transformers.BertTokenizerFast(vocab=source, do_lower_case=lower_case)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            source, trust_remote_code=False, local_files_only=not fetch
        )
    except Exception as error:  # those of the hub, of json, and of transformers
        if not (fetch or Path(source).exists()):
            raise UserError(
                f"the checkpoint names the tokenizer {source!r}, which is not on this machine; if you trust it, run "
                f"`hf download {source}` first"
            ) from None
        reason = "" if source.startswith((".", "/", "~")) else f" that answers: {' '.join(str(error).split())[:160]}"
        raise UserError(
            f"task.tokenizer {source!r} is not a vocabulary file, a folder or a name on the hub{reason}"
        ) from None
    missing = [name for name in ("pad", "cls", "sep", "mask") if getattr(tokenizer, f"{name}_token_id") is None]
    if missing:
        raise UserError(f"task.tokenizer {source} has no {missing[0]} token, so it is not that of an encoder of text")
    return tokenizer


def check_tokenizer(tokenizer: Any, source: str, model: Any, length: int) -> None:
    """Check that a tokeniser belongs to a network, and that the network takes sequences of this length.

    Raises: UserError saying what to give instead.
    """
    if not hasattr(model, "max_length"):
        kind = type(model).__name__
        raise UserError(f"{kind} is not a network for text; give model.name bert_small or text_transformer")
    if length > model.max_length:
        raise UserError(
            f"task.length {length} is longer than the network's {model.max_length} positions; lower it, or give "
            "model.kwargs.max_position_embeddings"
        )
    words, rows = len(tokenizer), model.table.shape[0]
    if not rows - UNUSED_EMBEDDINGS <= words <= rows:
        raise UserError(
            f"task.tokenizer {source} does not belong to this network: it has {words:,} tokens, and the network "
            f"{rows:,} word embeddings; give the network's own tokenizer, or model.kwargs.vocab_size {words}"
        )
    padding = getattr(model.body.config, "pad_token_id", None)
    if padding is not None and padding != tokenizer.pad_token_id:
        raise UserError(
            f"task.tokenizer {source} does not belong to this network: its padding is token {tokenizer.pad_token_id}, "
            f"the network's {padding}; give the network's own tokenizer, or model.kwargs.pad_token_id"
        )


LabelledTokens = tuple[dict[str, Tensor], Tensor]


class Sentences(Dataset[LabelledTokens]):
    """Examples as token sequences of their own lengths, cut at `length` tokens; of a pair, the longer text first.

    An item is (inputs, label): input_ids and token_type_ids (N,), and a class or a score.
    """

    def __init__(self, rows: Sequence[Row], classes: tuple[str, ...], tokenizer: Any, length: int) -> None:
        texts = [list(column) for column in zip(*(row[0] for row in rows), strict=True)]
        encoded = tokenizer(*texts, truncation=True, max_length=length, return_token_type_ids=True)
        self.ids = [np.array(ids, dtype=np.int32) for ids in encoded["input_ids"]]
        self.types = [np.array(types, dtype=np.int8) for types in encoded["token_type_ids"]]
        regression = len(classes) == 1
        self.labels = torch.tensor([row[1] for row in rows], dtype=torch.float32 if regression else torch.long)
        self.classes = classes

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> LabelledTokens:
        ids, types = (torch.from_numpy(values[index]).long() for values in (self.ids, self.types))
        return {"input_ids": ids, "token_type_ids": types}, self.labels[index]

    def subset(self, indices: np.ndarray) -> "Sentences":
        """Return some of the examples."""
        part = copy.copy(self)
        part.ids, part.types = ([values[i] for i in indices] for values in (self.ids, self.types))
        part.labels = self.labels[torch.from_numpy(np.asarray(indices))]
        return part


class PadBatch:
    """Collate examples to a batch, padded to its longest sequence, with a mask of the real tokens.

    Shape: -> inputs of (B, N), targets (B, ...), messages
    """

    def __init__(self, padding: int) -> None:
        self.padding = padding

    def __call__(self, examples: Sequence[Any]) -> tuple[dict[str, Tensor], Tensor, list[str]]:
        inputs, targets, *problems = zip(*examples, strict=True)
        fill = {"input_ids": self.padding}
        batch = {
            name: torch.nn.utils.rnn.pad_sequence([x[name] for x in inputs], True, fill.get(name, 0))
            for name in inputs[0]
        }
        lengths = torch.tensor([len(x["input_ids"]) for x in inputs])
        if (lengths < lengths.max()).any():  # without padding there is nothing to mask
            batch["attention_mask"] = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
        return batch, torch.stack(targets), list(chain.from_iterable(problems[0])) if problems else []
