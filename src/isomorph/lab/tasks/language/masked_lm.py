"""Pre-training by masked language modelling, on text files or the sentences of GLUE in sequences of one length."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from isomorph.errors import UserError
from isomorph.lab.data.formats.registry import data_root
from isomorph.lab.data.loaders import ImageConfig
from isomorph.lab.data.sources import with_changes
from isomorph.lab.distributed import REPEATED, Runtime, derive_seed
from isomorph.lab.evaluation.model_data import training_root
from isomorph.lab.tasks.language.glue import open_root, training_sentences
from isomorph.lab.tasks.language.text import LanguagePart, LanguageTask, Tokens, divide, read_texts
from isomorph.lab.training.dry_run.synthetic import SyntheticData, synthetic_data
from isomorph.lab.training.objectives.masked import LossModule
from isomorph.lab.training.recipe.fields import Rate
from isomorph.lab.training.recipe.recipe import Recipe
from isomorph.lab.training.task import Losses, Objective
from isomorph.spec import spec_of
from isomorph.terminal_tables import Metrics

# Target of a position that does not count.
IGNORED = -100
_TEXTS_AT_A_TIME = 10_000
_TEST_NAMES = ("dev", "test", "val", "valid", "validation")
# Part of the sequences to test on, where there is no text file for it.
TEST_PART = 0.01


def find_text_files(root: Path) -> tuple[list[Path], list[Path]]:
    """Return the files to train on and those to test on: a file, or *.txt of a folder, dev.txt or test.txt apart.

    Raises: UserError if there are none.
    """
    if root.is_file():
        return [root], []
    files = sorted(root.glob("*.txt")) if root.is_dir() else []
    if not files:
        raise UserError(
            f"there are no text files (*.txt) in {root}; give data.root, a text file or a folder of them"
        )
    train = [path for path in files if path.stem not in _TEST_NAMES]
    test = [path for path in files if path.stem in _TEST_NAMES]
    return train, test


def pack(texts: Sequence[str], tokenizer: Any, length: int) -> np.ndarray:
    """Return texts one after another, as sequences [CLS] ... [SEP] of one length; a [SEP] ends every text.

    Shape: -> (sequences, length), int32
    """
    parts: list[np.ndarray] = []
    for start in range(0, len(texts), _TEXTS_AT_A_TIME):
        some = list(texts[start : start + _TEXTS_AT_A_TIME])
        encoded = tokenizer(
            some, add_special_tokens=False, return_attention_mask=False, verbose=False
        )
        tokens: list[int] = []
        for ids in encoded["input_ids"]:
            tokens += ids
            tokens.append(tokenizer.sep_token_id)
        parts.append(np.array(tokens, dtype=np.int32))
    stream = np.concatenate([np.empty(0, np.int32), *parts])
    inside = length - 2  # without [CLS] and [SEP]
    count = len(stream) // inside
    rows = stream[: count * inside].reshape(count, inside)
    ends = (tokenizer.cls_token_id, tokenizer.sep_token_id)
    return np.pad(rows, ((0, 0), (1, 1)), constant_values=((0, 0), ends))


class PackedTexts(Dataset[Any]):
    """Packed sequences, whose words are masked anew whenever one is asked for, or always alike for `fixed` masks.

    An item is (inputs, targets): input_ids (N,) and the positions (K,) of the words to predict, and these words (K,).
    A share of `masked` positions is chosen; 80% of them become [MASK], 10% another token, and 10% stay.

    Source: BERT (Devlin et al., 2018), section 3.1; ELECTRA for the share of 15%
    """

    classes: tuple[str, ...] = ()

    def __init__(self, rows: np.ndarray, tokenizer: Any, masked: float = 0.15) -> None:
        self.rows = rows
        self.masked = masked
        self.fixed = False
        self.mask_token = tokenizer.mask_token_id
        self.vocabulary = len(tokenizer)
        self.special = torch.tensor(sorted(tokenizer.all_special_ids))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tokens, Tensor]:
        ids = torch.from_numpy(self.rows[index]).long()
        generator = torch.default_generator
        if self.fixed:
            generator = torch.Generator().manual_seed(derive_seed("masked words", index))
        positions, targets, masked = self._mask(ids, generator)
        return {"input_ids": masked, "positions": positions}, targets

    def _mask(self, ids: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Return the positions to predict, their words, and the tokens with masks. Shape: (N,) -> (K,), (K,), (N,)"""
        count = max(1, round(self.masked * len(ids)))
        words = (~torch.isin(ids, self.special)).nonzero().flatten()
        order = torch.randperm(len(words), generator=generator)
        chosen = words[order[:count]].sort().values
        draw = torch.rand(len(chosen), generator=generator)
        other = torch.randint(self.vocabulary, (len(chosen),), generator=generator)
        not_masked = torch.where(draw < 0.9, other, ids[chosen])
        shown = torch.where(draw < 0.8, self.mask_token, not_masked)
        lacking = (0, count - len(chosen))  # in a sequence of almost nothing but special tokens
        positions = F.pad(chosen, lacking)
        targets = F.pad(ids[chosen], lacking, value=IGNORED)
        return positions, targets, ids.index_copy(0, chosen, shown)

    def subset(self, indices: np.ndarray) -> "PackedTexts":
        return with_changes(self, rows=self.rows[indices])


class MaskedLMPart(LanguagePart):
    """Options of the task masked_lm: predict the words at masked positions of packed sequences."""

    masked: Rate = 0.15
    """Share of the positions whose words are predicted: 80% of them are masked, 10% replaced, 10% shown."""


class MaskedWordsLoss(LossModule):
    """Cross-entropy of the words at masked positions (BERT, section 3.1)."""

    def forward(self, input: Tokens, target: Tensor) -> Losses:
        logits = self.trainable_module(**input)  # (B, K, V)
        words = logits.flatten(0, 1).float()
        return {"loss": F.cross_entropy(words, target.flatten(), ignore_index=IGNORED)}


class MaskedLM(LanguageTask):
    """Pre-training of a text transformer on masked words, in packed sequences of one length."""

    fields = MaskedLMPart
    sources = ("text", "glue")
    unused = (*LanguageTask.unused, "model.num_classes")
    printed = {"masked_loss": ".4f", "masked_accuracy": ".2f"}

    def open_data(self, recipe: Recipe) -> tuple[Any, Any]:
        root = data_root(recipe.data.root)
        if recipe.data.source == "glue":
            train = training_sentences(open_root(root))
            test = []
        else:
            files, test_files = find_text_files(root)
            train = read_texts(files)
            test = read_texts(test_files)
        packed = self._pack(train, root)
        packed_test = self._pack(test, root) if test else None
        train_set, test_set = self.split(recipe, packed, packed_test, TEST_PART)
        test_set.fixed = True
        return train_set, test_set

    def _pack(self, texts: list[str], root: Path) -> PackedTexts:
        rows = pack(texts, self.tokenizer, self.options.length)
        if len(rows) < 2:
            raise UserError(
                f"the text in {root} fills {len(rows)} sequences of task.length "
                f"{self.options.length}; give more text"
            )
        return PackedTexts(rows, self.tokenizer, self.options.masked)

    def synthetic_data(self, recipe: Recipe) -> SyntheticData:
        return synthetic_data(recipe, labelled=False)

    def synthetic_batch(
        self,
        recipe: Recipe,
        model: nn.Module,
        config: ImageConfig,
        samples: int,
        device: torch.device,
    ) -> tuple[Tokens, Tensor]:
        words = self.random_words(model, samples, device)
        chosen = max(1, round(self.options.masked * words.shape[1]))
        positions = torch.randint(words.shape[1], (samples, chosen), device=device)
        return {"input_ids": words, "positions": positions}, words.gather(1, positions)

    def check_model(self, recipe: Recipe, model: nn.Module, config: ImageConfig) -> None:
        super().check_model(recipe, model, config)
        if model.num_classes:
            raise UserError(
                f"the network has {model.num_classes} classes, and masked_lm needs one that predicts words"
            )
        if getattr(model.body.config, "is_decoder", False):  # type: ignore[union-attr]
            raise UserError(
                "the network is causal, and masked words are read from both sides; leave out is_decoder"
            )

    def objective(self, recipe: Recipe, model: nn.Module, device: torch.device) -> Objective:
        return Objective(
            MaskedWordsLoss(model, device), self.measure, lambda metrics: -metrics["masked_loss"]
        )

    def measure(self, model: nn.Module, loader: Iterable[Any], runtime: Runtime) -> Metrics:
        """Return loss and accuracy on masked words, which are masked alike at every call."""
        sums = torch.zeros(4, dtype=torch.float64)
        for logits, targets in self.outputs(model, loader, runtime):
            sums += _masked_sums(logits, targets).cpu()
        loss, right, words, sequences = torch.stack(runtime.gather(sums)).sum(0).tolist()
        mean = loss / max(words, 1)
        accuracy = 100 * right / max(words, 1)
        perplexity = math.exp(min(mean, 700))
        return {
            "masked_loss": mean,
            "masked_accuracy": accuracy,
            "perplexity": perplexity,
            "sequences": sequences,
        }

    def open_test(self, model: nn.Module, source: str, root: Path) -> PackedTexts:
        part, sequences = spec_of(model).split
        test_files: Sequence[Path] = ()
        is_test_text = False
        # a text file also after a pre-training on GLUE's sentences
        if source == "glue" and not root.is_file():
            texts = training_sentences(open_root(root))
        else:
            files, test_files = find_text_files(root)
            is_test_text = bool(test_files) and not (part and files)
            texts = read_texts(test_files if is_test_text else files)
        packed = self._pack(texts, root)
        if part and not is_test_text:
            if len(packed) == sequences:  # the part of this text that training left out
                packed = divide(packed, part)[1]
            elif test_files:
                packed = self._pack(read_texts(test_files), root)
            elif _is_training_text(model, root):
                raise UserError(
                    f"{root} has {len(packed)} sequences, and had {sequences} in training, so the part that training "
                    "left out is not known; give the text as it was, or another one"
                )
        packed.fixed = True
        return packed


def _is_training_text(model: nn.Module, root: Path) -> bool:
    own = training_root(model, None, None)
    return own is not None and own.resolve() == root.resolve()


def _masked_sums(logits: Tensor, targets: Tensor) -> Tensor:
    """Return sums: loss, right predictions, words, sequences. Shape: logits (B, K, V), targets (B, K) -> (4,)"""
    counted = targets >= 0
    sequences = (targets != REPEATED).any(1).sum()
    words = targets.masked_fill(~counted, IGNORED).flatten()
    loss = F.cross_entropy(logits.flatten(0, 1), words, ignore_index=IGNORED, reduction="sum")
    right = ((logits.argmax(-1) == targets) & counted).sum()
    return torch.stack([loss.double(), right.double(), counted.sum().double(), sequences.double()])
