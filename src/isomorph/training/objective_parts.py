"""The groups of fields of a recipe that say what a run minimises."""

from typing import Literal

from isomorph.training.parts import File, NotNegative, Part, Positive, Share


class TokenLabelPart(Part):
    """Labels for every patch too, of models with a dense head: each patch has the label of the image it comes from."""

    weight: NotNegative = 0.5
    """Of the patches' loss beside that of the image, which has 1."""
    mix: bool = True
    """MixToken: a box of every image's patches comes from another image, and so do their labels."""
    beta: Positive = 1.0
    """The share of the image that stays is drawn from Beta(beta, beta)."""


class DistillPart(Part):
    """A teacher beside the labels, on the same images (DeiT's distillation, with or without a token)."""

    teacher: str
    """A timm model with public weights, or a checkpoint written by isomorph."""
    weights: File | None = None
    """Weights of the teacher, where they are in a file of their own."""
    kind: Literal["hard", "soft"] = "hard"
    """hard: the teacher's best class is a second label; soft: its probabilities are."""
    share: Share = 0.5
    """Weight of the teacher's term; the labels have the rest."""
    temperature: Positive = 1.0
    """Of the soft probabilities."""
    token: bool = False
    """The teacher's term is for the head of a distillation token (deit_*_distilled_*), else for the one head."""
