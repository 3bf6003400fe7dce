"""What all tasks on text share: tokenisers, padded batches, options, loaders."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from isomorph.errors import UserError, one_line, optional_module
from isomorph.lab.data.formats.naming import read_lines
from isomorph.lab.data.formats.registry import data_root
from isomorph.lab.data.loaders import ImageConfig, loader_of_share, train_loader
from isomorph.lab.data.sampler import TrainSampler
from isomorph.lab.data.sources import drawn_fraction, drawn_once
from isomorph.lab.distributed import Runtime, derive_seed, to_device
from isomorph.lab.training.recipe.fields import Part
from isomorph.lab.training.recipe.recipe import Recipe
from isomorph.lab.training.task import EvaluationOptions, Task
from isomorph.layers.modes import eval_mode, require_finite
from isomorph.spec import spec_of
from isomorph.terminal_tables import Rows

# Arguments of a network for text by name, such as input_ids and attention_mask.
Tokens = dict[str, Tensor]
# Most embeddings of a network that its tokeniser may leave unused: sizes are rounded up to multiples of 64 to 256.
UNUSED_EMBEDDINGS = 256
_NEEDED = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def read_texts(files: Iterable[Path]) -> list[str]:
    """Return the lines of text files, without empty ones. Raises: UserError for an empty file or one without text."""
    texts: list[str] = []
    for path in files:
        lines = read_lines(path)
        if not lines:
            raise UserError(
                f"{path} is empty; give a file with text, a sentence or paragraph a line"
            )
        texts += lines
    return texts


@cache
def open_tokenizer(source: str, lower_case: bool = True, fetch: bool = True) -> Any:
    """Return a tokeniser of transformers: a vocabulary of BERT (vocab.txt), a folder, or a name on the hub.

    `lower_case` is for vocabulary files alone. Without `fetch`, for names that a checkpoint gives, one on the hub must
    have been downloaded before. No code of a tokeniser is run.

    Raises: UserError if it cannot be opened, or lacks a special token that masked words need.
    """
    transformers = optional_module(
        "transformers", "tokenisers need the package transformers", "nlp"
    )
    title = f"task.tokenizer {source!r}"
    path = Path(source)
    if path.is_file():
        words = set(read_lines(path))
        lacking = [token for token in _NEEDED if token not in words]
        if lacking:
            raise UserError(
                f"{title} is not a vocabulary of BERT, one token a line: it has no {lacking[0]}"
            )
        return transformers.BertTokenizerFast(vocab=source, do_lower_case=lower_case)
    try:
        options = dict(trust_remote_code=False, local_files_only=not fetch)
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **options)
    except Exception as error:  # those of the hub, of json, and of transformers
        if not (fetch or path.exists()):
            raise UserError(
                f"the checkpoint names the tokenizer {source!r}, which is not on this machine; if "
                f"you trust it, run `hf download {source}` first"
            ) from None
        if source.startswith((".", "/", "~")):
            reason = ""
        else:
            reason = f" that answers: {one_line(error)[:160]}"
        raise UserError(
            f"{title} is not a vocabulary file, a folder or a name on the hub{reason}"
        ) from None
    missing = [
        name
        for name in ("pad", "cls", "sep", "mask")
        if getattr(tokenizer, f"{name}_token_id") is None
    ]
    if missing:
        raise UserError(
            f"{title} has no {missing[0]} token, so it is not that of an encoder of text"
        )
    return tokenizer


def check_tokenizer(tokenizer: Any, source: str, model: Any, length: int) -> None:
    """Raises: UserError if a tokeniser does not belong to a network, or sequences are too long for it."""
    if not hasattr(model, "max_length"):
        given = type(model).__name__
        raise UserError(
            f"{given} is not a network for text; give model.name bert_small or text_transformer"
        )
    if length > model.max_length:
        what = f"task.length {length} is longer than the network's {model.max_length} positions"
        raise UserError(f"{what}; lower it, or give model.kwargs.max_position_embeddings")
    words = len(tokenizer)
    rows = model.table.shape[0]
    padding = getattr(model.body.config, "pad_token_id", None)
    own = tokenizer.pad_token_id
    if not rows - UNUSED_EMBEDDINGS <= words <= rows:
        what = f"it has {words:,} tokens, and the network {rows:,} word embeddings"
        instead = f"vocab_size {words}"
    elif padding not in (None, own):
        what = f"its padding is token {own}, the network's {padding}"
        instead = "pad_token_id"
    else:
        return
    raise UserError(
        f"task.tokenizer {source} does not belong to this network: {what}; give the network's own "
        f"tokenizer, or model.kwargs.{instead}"
    )


def pad_batch(padding: int, examples: Sequence[Any]) -> tuple[Tokens, Tensor, list[str]]:
    """Collate examples, padded to the longest, with a mask. Shape: -> inputs of (B, N), targets (B, ...), messages"""
    inputs, targets, *problems = zip(*examples, strict=True)
    batch = {}
    for name in inputs[0]:
        rows = [example[name] for example in inputs]
        fill = padding if name == "input_ids" else 0
        batch[name] = pad_sequence(rows, batch_first=True, padding_value=fill)
    lengths = torch.tensor([len(x["input_ids"]) for x in inputs])
    if (lengths < lengths.max()).any():  # without padding there is nothing to mask
        batch["attention_mask"] = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    return batch, torch.stack(targets), list(chain.from_iterable(problems[0])) if problems else []


def divide(examples: Any, part: float) -> tuple[Any, Any]:
    """Return the examples without a part of them, and this part, the same ones at every call."""
    order = np.random.default_rng(derive_seed("test part")).permutation(len(examples))
    count = max(1, round(part * len(examples)))
    return examples.subset(np.sort(order[count:])), examples.subset(np.sort(order[:count]))


class LanguagePart(Part):
    """Options that all tasks on text have."""

    tokenizer: str = "google-bert/bert-base-uncased"
    """A vocabulary of BERT (vocab.txt), a folder with a tokenizer of transformers, or its name on the hub."""
    lower_case: bool = True
    """Convert texts to lower case, with a vocabulary file; a folder or hub name says itself what it does."""
    length: Annotated[int, Field(ge=8, le=2**14)] = 128
    """Most tokens of a sequence, special tokens included."""


class LanguageTask(Task):
    """Base of the tasks on text; its `open_test` returns the examples to test on, and `measure` their metrics."""

    fields: ClassVar[type[Part]] = LanguagePart
    unused: ClassVar[tuple[str, ...]] = (
        *Task.unused,
        "monitor_every",
        "drop_path",
        "data.classes",
        "data.size",
        "data.test_crop",
        "data.crop_pct",
    )

    @property
    def tokenizer(self) -> Any:
        return open_tokenizer(
            self.options.tokenizer, self.options.lower_case, fetch=not self.recorded
        )

    def split(
        self, recipe: Recipe, examples: Any, test: Any | None, default: float | None = None
    ) -> tuple[Any, Any]:
        """Return the examples to train on and to test on, with the fractions and numbers that the recipe asks for.

        Without a test file, or with data.split, a part of the training examples is tested on, the same for every seed.
        """
        data = recipe.data
        part = data.split
        if not part and test is None:
            part = default
        split = None
        if part:
            split = (part, len(examples))
            examples, test = divide(examples, part)
        examples = drawn_fraction(examples, data.fraction, recipe.draw_seed)
        examples.split = split  # recorded with the model
        return examples, drawn_once(test, data.test_images)

    def data_config(self, recipe: Recipe, model: nn.Module) -> ImageConfig:
        if self.rehearses:  # sequences of one length, without a tokeniser
            return {"padding": 0}
        return {"padding": self.tokenizer.pad_token_id}

    def random_words(self, model: nn.Module, samples: int, device: torch.device) -> Tensor:
        """Return full sequences of random words, for a dry run. Shape: -> (samples, N)"""
        table: Any = model.table
        words = table.shape[0]
        return torch.randint(words, (samples, self.options.length), device=device)

    def check_model(self, recipe: Recipe, model: nn.Module, config: ImageConfig) -> None:
        if self.rehearses:
            return
        check_tokenizer(self.tokenizer, self.options.tokenizer, model, self.options.length)

    def train_loader(
        self, recipe: Recipe, config: ImageConfig, train: Any, sampler: TrainSampler
    ) -> Any:
        collate = partial(pad_batch, config["padding"])
        return train_loader(train, sampler, recipe.data.workers, recipe.data.unreadable, collate)

    def test_loader(
        self, recipe: Recipe, config: ImageConfig, test: Any, runtime: Runtime
    ) -> Iterable[Any]:
        batch = max(1, recipe.data.batch_size // runtime.world)
        return self.share_loader(test, batch, recipe.data.workers, runtime)

    def share_loader(
        self, test: Any, batch_size: int, workers: int, runtime: Runtime
    ) -> DataLoader[Any]:
        collate = partial(pad_batch, self.tokenizer.pad_token_id)
        return loader_of_share(test, batch_size, workers, runtime, collate)

    @torch.no_grad()
    def outputs(
        self, model: nn.Module, loader: Iterable[Any], runtime: Runtime
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield a model's outputs in eval mode, in float32, and the targets of every batch. Raises: NotFinite."""
        device = next(model.parameters()).device
        with eval_mode(model):
            for inputs, targets, *_ in runtime.pad_batches(loader):
                with runtime.autocast():
                    output = model(**to_device(inputs, device)).float()
                require_finite(output)
                yield output, targets.to(device)

    open_test: Any
    measure: Any

    def evaluate(self, model: nn.Module, options: EvaluationOptions, runtime: Runtime) -> Rows:
        if options.size:
            raise UserError("`size` is for images; leave it out for this model")
        source = spec_of(model).config.get("source") or self.sources[0]
        folder: Any = options.root
        if options.data in self.sources:
            source = options.data
        else:
            folder = folder or options.data
        check_tokenizer(self.tokenizer, self.options.tokenizer, model, self.options.length)
        test = self.open_test(model, source, data_root(folder))
        test = drawn_once(test, options.max_images)
        loader = self.share_loader(test, options.batch_size, options.workers, runtime)
        return [self.measure(model, loader, runtime)]
