"""Fine-tuning on a GLUE task: classes of sentences or sentence pairs, or a score of two sentences."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isomorph.data.formats.registry import data_root
from isomorph.distributed import ALONE, REPEATED, Runtime, to_device
from isomorph.errors import UserError
from isomorph.layers.eval_mode import eval_mode, require_finite
from isomorph.tasks.language.glue import GLUE, GlueTask, Split, open_root, read_examples
from isomorph.tasks.language.sentences import Sentences
from isomorph.tasks.language.task import LanguagePart, LanguageTask, read_lines
from isomorph.training.objectives.masked import PretrainingTask
from isomorph.training.recipe.recipe import Recipe
from isomorph.training.task import EvaluationOptions, Objective, Prediction


class TextClassificationPart(LanguagePart):
    """Options of the task text_classification: fine-tune on one task of GLUE."""

    dataset: Literal["cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte"]
    """Task of GLUE: cola, sst2, mrpc, stsb, qqp, mnli, qnli or rte."""


class SentenceTask(PretrainingTask):
    """Fine-tuning on sentences: cross-entropy of the classes, or the squared error of a score."""

    def forward(self, input: dict[str, Tensor], target: Tensor) -> dict[str, Tensor]:
        output = self.trainable_module(**input).float()  # (B, num_classes)
        if target.is_floating_point():
            return {"loss": F.mse_loss(output[:, 0], target), "output": output}
        return {"loss": F.cross_entropy(output, target), "output": output}


def compute_metrics(names: Sequence[str], predicted: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Return the named metrics of GLUE in percent, and the number of examples.

    F1 is that of the second class. Correlations are 0 if all predictions, or all labels, are alike.
    """
    from scipy import stats
    from sklearn import metrics

    def correlation(found: Any) -> float:
        return 0.0 if np.ptp(predicted) == 0 or np.ptp(labels) == 0 else found(predicted, labels).statistic

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
    def glue(self) -> GlueTask:
        """The columns, labels and metrics of the task of GLUE."""
        return GLUE[self.options.dataset]

    def open_data(self, recipe: Recipe) -> tuple[Any, Any]:
        root = open_root(data_root(recipe.data.root), [self.options.dataset])
        train = self._read(root, "train")
        return self.split(recipe, train, None if recipe.data.split else self._read(root, "test"))

    def _read(self, root: Path, split: Split) -> Sentences:
        """Return the examples of a split as tokens."""
        rows = read_examples(root, self.options.dataset, split)
        return Sentences(rows, self.glue.classes, self.tokenizer, self.options.length)

    def check_model(self, recipe: Recipe, model: nn.Module, config: dict[str, Any]) -> None:
        super().check_model(recipe, model, config)
        if model.num_classes != len(self.glue.classes):
            raise UserError(
                f"the network has {model.num_classes} classes, and {self.options.dataset} has "
                f"{len(self.glue.classes)}; leave model.num_classes out"
            )

    def objective(self, recipe: Recipe, model: nn.Module, device: torch.device) -> Objective:
        best = self.glue.metrics[0]
        return Objective(SentenceTask(model, device), self.measure, lambda metrics: metrics[best])

    def measure(self, model: nn.Module, loader: Iterable[Any], runtime: Runtime) -> dict[str, float]:
        """Return the metrics of the task over the examples of all processes."""
        outputs, labels = _predict(model, loader, runtime)
        gathered = runtime.gather((outputs, labels))
        outputs, labels = (np.concatenate(each) for each in zip(*gathered, strict=True))
        predicted = outputs[:, 0] if len(self.glue.classes) == 1 else outputs.argmax(1)
        return compute_metrics(self.glue.metrics, predicted, labels)

    def open_test(self, model: nn.Module, options: EvaluationOptions, source: str, root: Path) -> Sentences:
        return self._read(open_root(root, [self.options.dataset]), "test")

    def predict(self, model: nn.Module, path: Path) -> Prediction:
        """Return the prediction for every line of a text file; the two texts of a pair are separated by a tab."""
        columns = len(self.glue.texts)
        texts = [tuple(line.split("\t")) for line in read_lines([path])]
        for number, row in enumerate(texts, start=1):
            if len(row) != columns:
                raise UserError(
                    f"{path}, text {number}: {len(row)} columns, and {self.options.dataset} takes {columns}"
                )
        examples = Sentences([(row, 0.0) for row in texts], self.glue.classes, self.tokenizer, self.options.length)
        loader = self.share_loader(examples, 32, 0, ALONE)
        outputs = torch.from_numpy(_predict(model, loader, ALONE)[0])
        rows = [self._describe(row, output) for row, output in zip(texts, outputs, strict=True)]
        return Prediction(rows, {".json": rows})

    def _describe(self, texts: tuple[str, ...], output: Tensor) -> dict[str, Any]:
        """Return a prediction in plain values: texts, and the most probable class or the score."""
        text = " | ".join(texts)
        if len(self.glue.classes) == 1:
            return {"text": text, self.glue.classes[0]: output[0].item()}
        share = output.softmax(-1)
        best = int(share.argmax())
        return {"text": text, "class": self.glue.classes[best], "probability": 100 * share[best].item()}


@torch.no_grad()
def _predict(model: nn.Module, loader: Iterable[Any], runtime: Runtime) -> tuple[np.ndarray, np.ndarray]:
    """Return outputs and labels of a process's share of the examples. Raises: NotFinite for outputs that are not.

    Shape: -> (examples, num_classes), (examples,)
    """
    device, outputs, labels = next(model.parameters()).device, [], []
    with eval_mode(model):
        for inputs, targets, *_ in runtime.pad_batches(loader):
            with runtime.autocast():
                output = model(**to_device(inputs, device))
            require_finite(output)
            own = targets != REPEATED
            outputs.append(output.float().cpu()[own].numpy())
            labels.append(targets[own].numpy())
    return np.concatenate(outputs), np.concatenate(labels)
