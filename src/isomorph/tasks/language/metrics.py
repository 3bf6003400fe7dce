"""Metrics of GLUE, in percent, from predictions and labels."""

from collections.abc import Callable, Sequence

import numpy as np


def accuracy(predicted: np.ndarray, labels: np.ndarray) -> float:
    """Return the share of right predictions in percent."""
    return 100 * float((predicted == labels).mean())


def f1(predicted: np.ndarray, labels: np.ndarray) -> float:
    """Return F1 of the second class in percent: the harmonic mean of precision and recall."""
    from sklearn.metrics import f1_score

    return 100 * float(f1_score(labels, predicted, zero_division=0))


def matthews(predicted: np.ndarray, labels: np.ndarray) -> float:
    """Return Matthews' correlation of two classes in percent; 0 if all predictions are alike."""
    from sklearn.metrics import matthews_corrcoef

    return 100 * float(matthews_corrcoef(labels, predicted))


def spearman(predicted: np.ndarray, labels: np.ndarray) -> float:
    """Return the correlation of the ranks in percent; 0 if all predictions are alike."""
    from scipy.stats import spearmanr

    return 0.0 if _constant(predicted, labels) else 100 * float(spearmanr(predicted, labels).statistic)


def pearson(predicted: np.ndarray, labels: np.ndarray) -> float:
    """Return the linear correlation in percent; 0 if all predictions are alike."""
    return 0.0 if _constant(predicted, labels) else 100 * float(np.corrcoef(predicted, labels)[0, 1])


def _constant(*values: np.ndarray) -> bool:
    """True if one of the arrays has a single value."""
    return any(np.ptp(each) == 0 for each in values)


METRICS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "accuracy": accuracy,
    "f1": f1,
    "matthews": matthews,
    "spearman": spearman,
    "pearson": pearson,
}


def compute_metrics(names: Sequence[str], predicted: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Return the named metrics, and the number of examples."""
    return {name: METRICS[name](predicted, labels) for name in names} | {"examples": len(labels)}
