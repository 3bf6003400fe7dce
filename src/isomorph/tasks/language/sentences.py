"""Labelled sentences and sentence pairs as token sequences, and batches of them with padding."""

import copy
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from isomorph.tasks.language.glue import Row

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
