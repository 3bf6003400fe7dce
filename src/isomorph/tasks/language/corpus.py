"""Text files as packed sequences of one length, and the masks of their words."""

import copy
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from isomorph.distributed import derive_seed
from isomorph.errors import UserError

IGNORED = -100
"""Target of a position that does not count."""
_TEXTS_AT_A_TIME = 10_000
_TEST_NAMES = ("dev", "test", "val", "valid", "validation")


def find_text_files(root: Path) -> tuple[list[Path], list[Path]]:
    """Return the files to train on and those to test on: a file, or *.txt of a folder, dev.txt or test.txt apart.

    Raises: UserError if there are none.
    """
    if root.is_file():
        return [root], []
    files = sorted(root.glob("*.txt")) if root.is_dir() else []
    if not files:
        raise UserError(f"there are no text files (*.txt) in {root}; give data.root, a text file or a folder of them")
    test = [path for path in files if path.stem in _TEST_NAMES]
    return [path for path in files if path not in test], test


def read_lines(files: Iterable[Path]) -> list[str]:
    """Return the lines of text files, without empty ones. Raises: UserError for an empty file or one without text."""
    texts: list[str] = []
    for path in files:
        try:
            lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path} cannot be read: {error}") from None
        if not any(lines):
            raise UserError(f"{path} is empty; give a file with text, a sentence or paragraph a line")
        texts += filter(None, lines)
    return texts


def pack(texts: Sequence[str], tokenizer: Any, length: int) -> np.ndarray:
    """Return texts one after another, cut into sequences of one length, which begin with [CLS] and end with [SEP].

    A [SEP] ends every text. Tokens at the end that fill no sequence are left out.

    Shape: -> (sequences, length), int32
    """
    parts: list[list[int]] = []
    for start in range(0, len(texts), _TEXTS_AT_A_TIME):
        some = list(texts[start : start + _TEXTS_AT_A_TIME])
        encoded = tokenizer(some, add_special_tokens=False, return_attention_mask=False, verbose=False)
        parts.append([token for ids in encoded["input_ids"] for token in (*ids, tokenizer.sep_token_id)])
    stream = np.concatenate([np.array(part, dtype=np.int32) for part in parts]) if parts else np.empty(0, np.int32)
    count = len(stream) // (length - 2)
    rows = stream[: count * (length - 2)].reshape(count, length - 2)
    return np.pad(rows, ((0, 0), (1, 1)), constant_values=((0, 0), (tokenizer.cls_token_id, tokenizer.sep_token_id)))


class PackedTexts(Dataset[Any]):
    """Packed sequences, whose words are masked anew whenever one is asked for, or always alike for `fixed` masks.

    An item is (inputs, targets): input_ids (N,) and the positions (K,) of the words to predict, and these words (K,).
    A share of `masked` positions is chosen; 80% of them become [MASK], 10% another token, and 10% stay.

    Source: BERT (Devlin et al., 2018), section 3.1; ELECTRA for the share of 15%
    """

    classes: tuple[str, ...] = ()

    def __init__(self, rows: np.ndarray, tokenizer: Any, masked: float = 0.15, fixed: bool = False) -> None:
        self.rows, self.masked, self.fixed = rows, masked, fixed
        self.mask_token, self.vocabulary = tokenizer.mask_token_id, len(tokenizer)
        self.special = torch.tensor(sorted(tokenizer.all_special_ids))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        ids = torch.from_numpy(self.rows[index]).long()
        seed = derive_seed("masked words", index) if self.fixed else None
        generator = torch.Generator().manual_seed(seed) if seed is not None else torch.default_generator
        positions, targets, masked = self._mask(ids, generator)
        return {"input_ids": masked, "positions": positions}, targets

    def _mask(self, ids: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Return the positions to predict, their words, and the tokens with masks. Shape: (N,) -> (K,), (K,), (N,)"""
        count = max(1, round(self.masked * len(ids)))
        words = (~torch.isin(ids, self.special)).nonzero().flatten()
        chosen = words[torch.randperm(len(words), generator=generator)[:count]].sort().values
        kind = torch.rand(len(chosen), generator=generator)
        other = torch.randint(self.vocabulary, (len(chosen),), generator=generator)
        shown = torch.where(kind < 0.8, self.mask_token, torch.where(kind < 0.9, other, ids[chosen]))
        lacking = (0, count - len(chosen))  # in a sequence of almost nothing but special tokens
        positions = torch.nn.functional.pad(chosen, lacking)
        targets = torch.nn.functional.pad(ids[chosen], lacking, value=IGNORED)
        return positions, targets, ids.index_copy(0, chosen, shown)

    def subset(self, indices: np.ndarray) -> "PackedTexts":
        """Return some of the sequences."""
        part = copy.copy(self)
        part.rows = self.rows[indices]
        return part
