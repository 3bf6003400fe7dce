"""The GLUE tasks: columns, labels and metrics, as published and as on the Hugging Face hub."""

from dataclasses import dataclass

Column = str | int
"""A column by its name in the header, or by its number in a file without header."""


@dataclass(frozen=True)
class GlueTask:
    """A task: its folder, the columns of its texts and label, the labels in the file, the files to test on, metrics.

    Without `classes` labels are numbers (a regression). The first metric decides which epoch is best. `tolerant`: lines
    with too few columns are left out, which the published file has. On the hub, the columns of the texts are
    `hub_texts`, or have the same names; labels are numbers of classes there.
    """

    folder: str
    texts: tuple[Column, ...]
    label: Column
    labels: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    test: str = "dev"
    metrics: tuple[str, ...] = ("accuracy",)
    tolerant: bool = False
    hub_texts: tuple[str, ...] = ()

    @property
    def hub_columns(self) -> tuple[str, ...]:
        """The columns of the texts and the label in the hub's parquet files."""
        return (*(self.hub_texts or map(str, self.texts)), "label")

    @property
    def hub_test(self) -> str:
        """The hub's name of the files to test on."""
        return self.test.replace("dev", "validation")

    @property
    def has_header(self) -> bool:
        """True if the first line of a file names its columns."""
        return isinstance(self.label, str)


_ENTAILMENT = ("entailment", "not_entailment")
_PARAPHRASE = ("different", "paraphrase")

GLUE: dict[str, GlueTask] = {
    "cola": GlueTask(
        "CoLA",
        (3,),
        1,
        ("0", "1"),
        ("unacceptable", "acceptable"),
        metrics=("matthews", "accuracy"),
        hub_texts=("sentence",),
    ),
    "sst2": GlueTask("SST-2", ("sentence",), "label", ("0", "1"), ("negative", "positive")),
    "mrpc": GlueTask(
        "MRPC",
        ("#1 String", "#2 String"),
        "Quality",
        ("0", "1"),
        _PARAPHRASE,
        metrics=("accuracy", "f1"),
        hub_texts=("sentence1", "sentence2"),
    ),
    "stsb": GlueTask(
        "STS-B", ("sentence1", "sentence2"), "score", classes=("similarity",), metrics=("spearman", "pearson")
    ),
    "qqp": GlueTask(
        "QQP",
        ("question1", "question2"),
        "is_duplicate",
        ("0", "1"),
        _PARAPHRASE,
        metrics=("accuracy", "f1"),
        tolerant=True,
    ),
    "mnli": GlueTask(
        "MNLI",
        ("sentence1", "sentence2"),
        "gold_label",
        ("entailment", "neutral", "contradiction"),
        ("entailment", "neutral", "contradiction"),
        "dev_matched",
        hub_texts=("premise", "hypothesis"),
    ),
    "qnli": GlueTask("QNLI", ("question", "sentence"), "label", _ENTAILMENT, _ENTAILMENT),
    "rte": GlueTask("RTE", ("sentence1", "sentence2"), "label", _ENTAILMENT, _ENTAILMENT),
}
"""The eight tasks of the paper's table, by name; WNLI is left out, as usual."""

Row = tuple[tuple[str, ...], float]
"""The texts of an example, and its label: the number of its class, or a score."""
