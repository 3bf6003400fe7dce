"""Fine-tuning on a task of GLUE: classes of sentences or sentence pairs, or a score of two sentences.

Examples are read from the published TSV files, or from parquet files as on the Hugging Face hub.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from isomorph.errors import UserError, one_line, optional_module
from isomorph.lab.data.formats.naming import read_text
from isomorph.lab.data.formats.parquet import parquet_reader
from isomorph.lab.data.formats.registry import data_root
from isomorph.lab.data.loaders import ImageConfig
from isomorph.lab.data.sources import with_changes
from isomorph.lab.distributed import REPEATED, Runtime
from isomorph.lab.tasks.language.text import LanguagePart, LanguageTask, Tokens, divide
from isomorph.lab.training.dry_run.synthetic import SyntheticData, random_labels, synthetic_data
from isomorph.lab.training.objectives.masked import LossModule
from isomorph.lab.training.recipe.recipe import Recipe
from isomorph.lab.training.task import Losses, Objective
from isomorph.layers.modes import require_finite
from isomorph.models.download import impatient_hub, is_connection_error
from isomorph.spec import spec_of
from isomorph.terminal_tables import Metrics

# A column by its name in the header, or by its number in a file without header.
Column = str | int
# The texts of an example, and its label: the number of its class, or a score.
Row = tuple[tuple[str, ...], float]
Split = Literal["train", "test"]
# GLUE on the hub; its tasks are folders, with files such as rte/train-00000-of-00001.parquet.
HUB_NAME = "nyu-mll/glue"
MAX_SCORE = 5  # of STS-B


@dataclass(frozen=True)
class GlueData:
    """A task: its folder, the columns of its texts and label, the labels in the file, metrics, the files to test on.

    Without `classes` labels are numbers (a regression). The first metric decides which epoch is best. `tolerant`: lines
    with too few columns are left out, which the published file has. On the hub, the columns of the texts are
    `hub_texts`, or have the same names; labels are numbers of classes there.
    """

    folder: str
    texts: tuple[Column, ...]
    label: Column
    labels: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ("accuracy",)
    hub_texts: tuple[str, ...] = ()
    test: str = "dev"
    tolerant: bool = False


_PAIR = ("sentence1", "sentence2")
_BINARY = ("0", "1")
_ENTAILMENT = ("entailment", "not_entailment")
_PARAPHRASE = ("different", "paraphrase")
_THREE = ("entailment", "neutral", "contradiction")
_TWO_SCORES = ("accuracy", "f1")

# The eight tasks of the paper's table, by name; WNLI is left out, as usual.
GLUE = {
    "cola": GlueData(
        folder="CoLA",
        texts=(3,),
        label=1,
        labels=_BINARY,
        classes=("unacceptable", "acceptable"),
        metrics=("matthews", "accuracy"),
        hub_texts=("sentence",),
    ),
    "sst2": GlueData(
        folder="SST-2",
        texts=("sentence",),
        label="label",
        labels=_BINARY,
        classes=("negative", "positive"),
    ),
    "mrpc": GlueData(
        folder="MRPC",
        texts=("#1 String", "#2 String"),
        label="Quality",
        labels=_BINARY,
        classes=_PARAPHRASE,
        metrics=_TWO_SCORES,
        hub_texts=_PAIR,
    ),
    "stsb": GlueData(
        folder="STS-B",
        texts=_PAIR,
        label="score",
        classes=("similarity",),
        metrics=("spearman", "pearson"),
    ),
    "qqp": GlueData(
        folder="QQP",
        texts=("question1", "question2"),
        label="is_duplicate",
        labels=_BINARY,
        classes=_PARAPHRASE,
        metrics=_TWO_SCORES,
        tolerant=True,
    ),
    "mnli": GlueData(
        folder="MNLI",
        texts=_PAIR,
        label="gold_label",
        labels=_THREE,
        classes=_THREE,
        hub_texts=("premise", "hypothesis"),
        test="dev_matched",
    ),
    "qnli": GlueData(
        folder="QNLI",
        texts=("question", "sentence"),
        label="label",
        labels=_ENTAILMENT,
        classes=_ENTAILMENT,
    ),
    "rte": GlueData(
        folder="RTE",
        texts=_PAIR,
        label="label",
        labels=_ENTAILMENT,
        classes=_ENTAILMENT,
    ),
}

# Training examples, for dry runs.
TRAINING_SENTENCES = {
    "cola": 8551,
    "sst2": 67_349,
    "mrpc": 3668,
    "stsb": 5749,
    "qqp": 363_846,
    "mnli": 392_702,
    "qnli": 104_743,
    "rte": 2490,
}


def read_file(path: Path, task: GlueData) -> list[Row]:
    """Return the examples of a TSV file, or of a parquet file of the hub.

    Raises: UserError, with file and line, for missing columns, unknown labels or an empty file, or without pyarrow.
    """
    cells = _tsv_cells if path.suffix == ".tsv" else _parquet_cells
    rows = []
    for where, (*texts, label) in cells(path, task):
        rows.append((tuple(map(str, texts)), _label_of(label, task, where)))
    if not rows:
        raise UserError(f"{path} is empty: it has no examples of {task.folder}")
    return rows


def _columns(
    path: Path, header: Sequence[str], wanted: Iterable[Column], task: GlueData
) -> list[int]:
    missing = [column for column in wanted if column not in header]
    if missing:
        raise UserError(
            f"{path} has the columns {', '.join(header)}, and {task.folder} needs the column "
            f"{missing[0]!r}; give the published file, or the hub's"
        )
    return [header.index(str(column)) for column in wanted]


def _tsv_cells(path: Path, task: GlueData) -> Iterator[tuple[str, Sequence[Any]]]:
    wanted: Any = (*task.texts, task.label)
    has_header = isinstance(task.label, str)
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        cells = line.rstrip("\r").split("\t")
        if has_header:
            header = [name.strip() for name in cells]
            wanted = _columns(path, header, wanted, task)
            has_header = False
        elif len(cells) > max(wanted):
            yield f"{path}, line {number}", [cells[column].strip() for column in wanted]
        elif not task.tolerant:
            raise UserError(
                f"{path}, line {number}: {len(cells)} columns, and {max(wanted) + 1} are needed"
            )


def _parquet_cells(path: Path, task: GlueData) -> Iterator[tuple[str, Sequence[Any]]]:
    with parquet_reader(path) as parquet:
        table = parquet.read_table(path)
    texts = task.hub_texts or tuple(map(str, task.texts))
    wanted = _columns(path, table.column_names, (*texts, "label"), task)
    columns = [table.column(number).to_pylist() for number in wanted]
    if any(None in column for column in columns):
        raise UserError(f"{path} has empty cells; give the hub's file")
    return ((str(path), row) for row in zip(*columns, strict=True))


def _label_of(label: Any, task: GlueData, where: str) -> float:
    """Return a class, given as published or by number, or a score. Raises: UserError for another label."""
    if not task.labels:
        with suppress(TypeError, ValueError):
            if 0 <= float(label) <= MAX_SCORE:  # NaN is not
                return float(label)
        raise UserError(
            f"{where}: label {label!r} is not a score; give a number from 0 to {MAX_SCORE}"
        )
    if label in task.labels:
        return task.labels.index(label)
    if not isinstance(label, str) and label in range(len(task.labels)):
        return label
    known = task.labels
    if not isinstance(label, str):
        known = tuple(f"{number} ({name})" for number, name in enumerate(task.classes))
    hidden = "; the hub's test files have no labels" if label == -1 else ""
    raise UserError(f"{where}: label {label!r} is unknown; use {', '.join(known)}{hidden}")


def open_root(root: Path, tasks: Sequence[str] = tuple(GLUE)) -> Path:
    """Return a folder, or that of a name on the hub, downloaded unless it is cached.

    Raises: UserError, which says how to get the files, if the hub does not answer or has no such data set.
    """
    name = root.as_posix()
    if root.exists() or not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name):
        return root
    import huggingface_hub

    wanted = [f"{task}/*.parquet" for task in tasks]
    try:
        with impatient_hub():
            return Path(
                huggingface_hub.snapshot_download(name, repo_type="dataset", allow_patterns=wanted)
            )
    except Exception as error:  # those of the hub's client and of the network
        what = one_line(error)[:160]
        if is_connection_error(error):
            what = "the hub does not answer"
        files = " ".join(map(repr, wanted))
        raise UserError(
            f"data.root {name} is not a folder, and cannot be downloaded: {what}; run `hf download "
            f"{name} --repo-type dataset --include {files} --local-dir glue` where the network is, "
            "and give that folder, or one with the published TSV files"
        ) from None


def _patterns(name: str, split: Split) -> dict[str, str]:
    """Return patterns of the published files and of the hub's, by their folders."""
    published = "train" if split == "train" else GLUE[name].test
    on_hub = published.replace("dev", "validation")
    return {GLUE[name].folder: f"{published}.tsv", name: f"{on_hub}-*.parquet"}


def find_files(root: Path, name: str, split: Split) -> list[Path]:
    """Return the files of a task's split, below a folder of all tasks or in its own folder; none if there are none."""
    for folder, pattern in _patterns(name, split).items():
        places = [root / folder, root / "glue" / folder]
        if root.name.lower() == folder.lower():
            places.append(root)
        for place in places:
            files = sorted(place.glob(pattern))
            if files:
                return files
    return []


def read_examples(root: Path, name: str, split: Split) -> list[Row]:
    """Return the examples of a task's split. Raises: UserError if there are none, or the files are damaged."""
    files = find_files(root, name, split)
    if files:
        return list(chain.from_iterable(read_file(path, GLUE[name]) for path in files))
    published, on_hub = (
        f"{folder}/{pattern}" for folder, pattern in _patterns(name, split).items()
    )
    other = (
        "" if split == "train" else "; or data.split, the part of the training examples to test on"
    )
    raise UserError(
        f"there is no {published} in {root}, nor {on_hub}; give data.root, the folder with GLUE's published files "
        f"or the hub's, or {HUB_NAME}, which downloads them{other}"
    )


def training_sentences(root: Path) -> list[str]:
    """Return the sentences of the training files of all tasks in a folder. Raises: UserError if there is none."""
    sentences: list[str] = []
    for name in GLUE:
        if find_files(root, name, "train"):
            for texts, _ in read_examples(root, name, "train"):
                sentences += texts
    if not sentences:
        raise UserError(
            f"there is no train.tsv or train-*.parquet of a GLUE task in {root}; give data.root, "
            f"or {HUB_NAME}"
        )
    return sentences


class Sentences(Dataset[tuple[Tokens, Tensor]]):
    """Examples as token sequences of their own lengths, cut at `length` tokens; of a pair, the longer text first.

    An item is (inputs, label): input_ids and token_type_ids (N,), and a class or a score.
    """

    def __init__(
        self, rows: Sequence[Row], classes: tuple[str, ...], tokenizer: Any, length: int
    ) -> None:
        texts = zip(*(texts for texts, _ in rows), strict=True)
        encoded = tokenizer(
            *map(list, texts), truncation=True, max_length=length, return_token_type_ids=True
        )
        self.ids = [np.array(ids, dtype=np.int32) for ids in encoded["input_ids"]]
        self.types = [np.array(types, dtype=np.int8) for types in encoded["token_type_ids"]]
        dtype = torch.float32 if len(classes) == 1 else torch.long
        self.labels = torch.tensor([label for _, label in rows], dtype=dtype)
        self.classes = classes

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> tuple[Tokens, Tensor]:
        ids = torch.from_numpy(self.ids[index]).long()
        types = torch.from_numpy(self.types[index]).long()
        return {"input_ids": ids, "token_type_ids": types}, self.labels[index]

    def subset(self, indices: np.ndarray) -> "Sentences":
        ids = [self.ids[i] for i in indices]
        types = [self.types[i] for i in indices]
        labels = self.labels[torch.from_numpy(np.asarray(indices))]
        return with_changes(self, ids=ids, types=types, labels=labels)


class TextClassificationPart(LanguagePart):
    """Options of the task text_classification: fine-tune on one task of GLUE."""

    dataset: Literal["cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte"]
    """Task of GLUE: cola, sst2, mrpc, stsb, qqp, mnli, qnli or rte."""


class SentenceLoss(LossModule):
    """Fine-tuning on sentences: cross-entropy of the classes, or the squared error of a score."""

    def forward(self, input: Tokens, target: Tensor) -> Losses:
        output = self.trainable_module(**input).float()  # (B, num_classes)
        if target.is_floating_point():
            loss = F.mse_loss(output[:, 0], target)
        else:
            loss = F.cross_entropy(output, target)
        return {"loss": loss, "output": output}


def compute_metrics(names: Sequence[str], predicted: np.ndarray, labels: np.ndarray) -> Metrics:
    """Return the named metrics of GLUE in percent, and the number of examples.

    F1 is that of the second class. Correlations are 0 if all predictions, or all labels, are alike.

    Raises: NotFinite for predictions that are NaN or infinite.
    """
    metrics = optional_module("sklearn.metrics", "the metrics of GLUE need scikit-learn", "nlp")
    stats = import_module("scipy.stats")  # installed with scikit-learn

    require_finite(torch.from_numpy(predicted))

    def correlation(function: Any) -> float:
        if np.ptp(predicted) == 0 or np.ptp(labels) == 0:
            return 0.0
        return function(predicted, labels).statistic

    known = {
        "accuracy": lambda: metrics.accuracy_score(labels, predicted),
        "f1": lambda: metrics.f1_score(labels, predicted, zero_division=0),
        "matthews": lambda: metrics.matthews_corrcoef(labels, predicted),
        "spearman": lambda: correlation(stats.spearmanr),
        "pearson": lambda: correlation(stats.pearsonr),
    }
    return {name: 100 * float(known[name]()) for name in names} | {"examples": len(labels)}


class TextClassification(LanguageTask):
    """Fine-tuning of a text transformer on one task of GLUE, from its published files or the hub's."""

    fields = TextClassificationPart
    sources = ("glue",)
    printed = dict.fromkeys(("accuracy", "f1", "matthews", "spearman"), ".2f")

    @property
    def glue(self) -> GlueData:
        return GLUE[self.options.dataset]

    def open_data(self, recipe: Recipe) -> tuple[Any, Any]:
        root = open_root(data_root(recipe.data.root), [self.options.dataset])
        train = self._read(root, "train")
        test = None if recipe.data.split else self._read(root, "test")
        return self.split(recipe, train, test)

    def _read(self, root: Path, split: Split) -> Sentences:
        rows = read_examples(root, self.options.dataset, split)
        return Sentences(rows, self.glue.classes, self.tokenizer, self.options.length)

    def synthetic_data(self, recipe: Recipe) -> SyntheticData:
        counts = (TRAINING_SENTENCES[self.options.dataset], len(self.glue.classes))
        return synthetic_data(recipe, counts)

    def synthetic_batch(
        self,
        recipe: Recipe,
        model: nn.Module,
        config: ImageConfig,
        samples: int,
        device: torch.device,
    ) -> tuple[Tokens, Tensor]:
        words = self.random_words(model, samples, device)
        labels = random_labels(len(self.glue.classes), samples, device)
        if len(self.glue.classes) == 1:  # a score
            labels = labels.float()
        return {"input_ids": words, "token_type_ids": torch.zeros_like(words)}, labels

    def check_model(self, recipe: Recipe, model: nn.Module, config: ImageConfig) -> None:
        super().check_model(recipe, model, config)
        if model.num_classes != len(self.glue.classes):
            raise UserError(
                f"the network has {model.num_classes} classes, and {self.options.dataset} "
                f"{len(self.glue.classes)}; leave model.num_classes out"
            )

    def objective(self, recipe: Recipe, model: nn.Module, device: torch.device) -> Objective:
        best = self.glue.metrics[0]
        return Objective(SentenceLoss(model, device), self.measure, lambda metrics: metrics[best])

    def measure(self, model: nn.Module, loader: Iterable[Any], runtime: Runtime) -> Metrics:
        parts = list[tuple[np.ndarray, np.ndarray]]()
        for output, targets in self.outputs(model, loader, runtime):
            own = targets != REPEATED
            parts.append((output[own].cpu().numpy(), targets[own].cpu().numpy()))
        everything = list(chain.from_iterable(runtime.gather(parts)))
        outputs = np.concatenate([part for part, _ in everything])
        labels = np.concatenate([part for _, part in everything])
        if len(self.glue.classes) == 1:
            predicted = outputs[:, 0]
        else:
            predicted = outputs.argmax(1)
        return compute_metrics(self.glue.metrics, predicted, labels)

    def open_test(self, model: nn.Module, source: str, root: Path) -> Sentences:
        root = open_root(root, [self.options.dataset])
        part, examples = spec_of(model).split
        if part and find_files(root, self.options.dataset, "train"):
            train = self._read(root, "train")
            if len(train) == examples:
                return divide(train, part)[1]  # what training left out
        return self._read(root, "test")
