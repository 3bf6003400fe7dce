"""What pre-training and fine-tuning on text share: tokeniser, fields of a recipe that apply, loaders with padding."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field
from torch import nn
from torch.utils.data import DataLoader

from isomorph.checkpoints.model import record_base
from isomorph.data.formats.registry import data_root
from isomorph.data.loaders import loader_of_share, seeded_loader
from isomorph.data.sampler import TrainSampler
from isomorph.data.sources import drawn_fraction, drawn_once
from isomorph.distributed import Runtime, derive_seed
from isomorph.errors import UserError
from isomorph.tasks.language.attention_page import write_attention
from isomorph.tasks.language.sentences import PadBatch, check_tokenizer, open_tokenizer
from isomorph.training.recipe.fields import Part
from isomorph.training.recipe.recipe import Recipe
from isomorph.training.task import EvaluationOptions, Task


class LanguagePart(Part):
    """Options that all tasks on text have."""

    tokenizer: str = "google-bert/bert-base-uncased"
    """A vocabulary of BERT (vocab.txt), a folder with a tokenizer of transformers, or its name on the hub."""
    lower_case: bool = True
    """Convert texts to lower case, with a vocabulary file; a folder or hub name says itself what it does."""
    length: Annotated[int, Field(ge=8, le=2**14)] = 128
    """Most tokens of a sequence, special tokens included."""


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


def divide(examples: Any, part: float) -> tuple[Any, Any]:
    """Return the examples without a part of them, and this part, the same ones at every call."""
    order = np.random.default_rng(derive_seed("test part")).permutation(len(examples))
    count = max(1, round(part * len(examples)))
    return examples.subset(np.sort(order[count:])), examples.subset(np.sort(order[:count]))


class LanguageTask(Task):
    """Base of the tasks on text."""

    fields: ClassVar[type[Part]] = LanguagePart
    unused: ClassVar[tuple[str, ...]] = (
        *(*Task.unused, "monitor_every", "drop_path"),
        *(f"data.{name}" for name in ("images", "classes", "size", "test_crop", "crop_pct", "shuffle_shards")),
    )

    @property
    def tokenizer(self) -> Any:
        """The tokeniser of the options. Raises: UserError if it cannot be opened."""
        return open_tokenizer(self.options.tokenizer, self.options.lower_case, fetch=not self.recorded)

    def split(self, recipe: Recipe, examples: Any, test: Any | None, default: float | None = None) -> tuple[Any, Any]:
        """Return the examples to train on and to test on, with the fractions and numbers that the recipe asks for.

        With data.split, or a `default` where there is no test file, a part of the training examples is tested on, the
        same for every seed.
        """
        data = recipe.data
        part, split = data.split or (default if test is None else None), None
        if part:
            split = (part, len(examples))
            examples, test = divide(examples, part)
        examples = drawn_fraction(examples, data.fraction, recipe.seed if data.draw == "seeded" else None)
        examples.split = split  # recorded with the model
        return examples, drawn_once(test, data.test_images)

    def build_model(self, recipe: Recipe, train: Any, recast_now: bool) -> nn.Module:
        model: Any = super().build_model(recipe, train, recast_now)
        if "config" in recipe.model.kwargs and hasattr(model, "arguments"):
            record_base(model, {"name": recipe.model.name, **model.arguments})  # without the folder, which may move
        return model

    def data_config(self, recipe: Recipe, model: nn.Module) -> dict[str, Any]:
        return {"padding": self.tokenizer.pad_token_id}

    def check_model(self, recipe: Recipe, model: nn.Module, config: dict[str, Any]) -> None:
        check_tokenizer(self.tokenizer, self.options.tokenizer, model, self.options.length)

    def train_loader(
        self, recipe: Recipe, config: dict[str, Any], train: Any, sampler: TrainSampler
    ) -> DataLoader[Any]:
        collate = PadBatch(config["padding"])
        return seeded_loader(train, sampler, recipe.data.workers, recipe.data.unreadable, collate)

    def test_loader(self, recipe: Recipe, config: dict[str, Any], test: Any, runtime: Runtime) -> Iterable[Any]:
        return self.share_loader(test, max(1, recipe.data.batch_size // runtime.world), recipe.data.workers, runtime)

    def share_loader(self, test: Any, batch_size: int, workers: int, runtime: Runtime) -> DataLoader[Any]:
        """Return the loader of one process's share of the test examples. Raises: UserError if there are too few."""
        return loader_of_share(test, batch_size, workers, runtime, PadBatch(self.tokenizer.pad_token_id))

    def open_test(self, model: nn.Module, options: EvaluationOptions, source: str, root: Path) -> Any:
        """Return the examples to evaluate a trained model on."""
        raise NotImplementedError

    def measure(self, model: nn.Module, loader: Iterable[Any], runtime: Runtime) -> dict[str, float]:
        """Return the test metrics over all processes."""
        raise NotImplementedError

    def evaluate(self, model: nn.Module, options: EvaluationOptions, runtime: Runtime) -> list[dict[str, Any]]:
        if options.size:
            raise UserError("--size is for images; leave it out for this model")
        recorded = (getattr(model, "pretrained_cfg", None) or {}).get("source")
        source = options.data if options.data in self.sources else recorded or self.sources[0]
        folder = options.data if options.data not in self.sources else None
        check_tokenizer(self.tokenizer, self.options.tokenizer, model, self.options.length)
        test = self.open_test(model, options, source, data_root(options.root or folder))
        test = drawn_once(test, options.max_images)
        metrics = self.measure(model, self.share_loader(test, options.batch_size, options.workers, runtime), runtime)
        if options.page and runtime.is_main:
            write_attention(options.page, model, test, self.tokenizer, metrics)
        return [metrics]
