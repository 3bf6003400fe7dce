"""What changes in a model's predictions when some of its layers are recast."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.layers.eval_mode import eval_mode

Batch = tuple[Tensor, Tensor]
Tick = Callable[[float], None]
"""Takes the fraction of a pass that is done."""


def read_batches(loader: Iterable[Any], model: nn.Module) -> list[Batch]:
    """Return the images and labels of a loader, in memory, the images on the device and in the precision of a model.

    Raises: UserError when the loader yields no batch.
    """
    parameter = next(model.parameters())
    batches = [(images.to(parameter), labels) for images, labels in loader]
    if not batches:
        raise UserError("there is nothing to survey: the loader yields no batch")
    return batches


@torch.no_grad()
def predict(model: nn.Module, batches: Iterable[Batch]) -> Iterator[Tensor]:
    """Iterate over the logits of batches, in float32, with the model in eval mode."""
    with eval_mode(model):
        for images, _ in batches:
            yield model(images).float()


class Reference:
    """The predictions of the original model, to which those of recast ones are compared.

    Images labelled -1, or outside the model's classes, have no accuracy.
    """

    def __init__(self, model: nn.Module, batches: list[Batch]) -> None:
        self.batches = batches
        self.logits = list(predict(model, batches))
        self.labels = torch.cat([labels for _, labels in batches])
        self.correct = self._correct(self.logits)
        self.labelled = self.labels.ge(0)
        if not torch.cat(self.logits).isfinite().all():
            raise UserError("the model's outputs are not finite on these images; survey a model that works")

    @property
    def top1(self) -> float | None:
        """Accuracy in per cent of the labelled images, None without labels."""
        count = int(self.labelled.sum())
        return 100 * int((self.correct & self.labelled).sum()) / count if count else None

    def compare(self, model: nn.Module, tick: Tick) -> dict[str, float]:
        """Return how far a recast model's predictions are from the original's.

        - top1, top1_loss, top1_error: accuracy (%), points lost, and the standard error of that loss, which counts the
          images that became wrong or right; only with labels
        - changed: images with another prediction (%)
        - kl: mean Kullback-Leibler divergence of the new probabilities from the original ones (nats)
        - deviation: root mean square of the logits' change, relative to that of the logits around their mean
        """
        logits = []
        for step, batch in enumerate(predict(model, self.batches), 1):
            logits.append(batch)
            tick(step / len(self.batches))
        old, new = torch.cat(self.logits).double(), torch.cat(logits).double()
        log_old, log_new = old.log_softmax(1), new.log_softmax(1)
        spread = (old - old.mean(1, keepdim=True)).square().mean().sqrt()
        return {
            **self._accuracy(logits),
            "changed": 100 * float((old.argmax(1) != new.argmax(1)).double().mean()),
            "kl": float((log_old.exp() * (log_old - log_new)).sum(1).mean()),
            "deviation": float((new - old).square().mean().sqrt() / spread),
        }

    def _accuracy(self, logits: list[Tensor]) -> dict[str, float]:
        if self.top1 is None:
            return {}
        count = int(self.labelled.sum())
        correct = self._correct(logits)[self.labelled]
        before = self.correct[self.labelled]
        lost, won = int((before & ~correct).sum()), int((correct & ~before).sum())
        error = 100 * max(lost + won - (lost - won) ** 2 / count, 0) ** 0.5 / count
        return {
            "top1": 100 * int(correct.sum()) / count,
            "top1_loss": 100 * (lost - won) / count,
            "top1_error": error,
        }

    def _correct(self, logits: list[Tensor]) -> Tensor:
        return torch.cat([batch.argmax(1).cpu() for batch in logits]) == self.labels
