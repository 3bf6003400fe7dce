"""The groups of fields of a recipe that say what a run minimises."""

from typing import Any, Literal

from pydantic import model_validator

from isomorph.training.recipe.fields import (
    Count,
    File,
    NotNegative,
    Part,
    Positive,
    Share,
)


class TokenLabelPart(Part):
    """Labels for every patch too, of models with a dense head: those of label maps, else the image's own."""

    weight: NotNegative = 0.5
    """Of the patches' loss beside that of the image, which has 1."""
    mix: bool = True
    """MixToken: a box of every image's patches comes from another image, and so do their labels."""
    beta: Positive = 1.0
    """The share of the image that stays is drawn from Beta(beta, beta)."""
    maps: File | None = None
    """Folder of label maps, class/image.pt for every training image class/image.jpg; none: the image's label."""
    class_token: Literal["label", "map"] = "label"
    """With maps: the class token learns the image's label (as the paper has it) or the map's mean over the crop (as the
    code does)."""

    @model_validator(mode="after")
    def coherent(self) -> "TokenLabelPart":
        if self.class_token == "map" and self.maps is None:
            raise ValueError("token_labels.class_token map needs token_labels.maps, the folder of label maps")
        return self


class MapSimilarityPart(Part):
    """A penalty on how similar the attention maps of neighbouring blocks are (Refiner's code), of refined_vit_*."""

    weight: Positive = 0.1
    """Of the similarity: the mean over neighbours, queries and keys of the cosine between their heads."""
    pairs: Count | None = None
    """Only the first so many pairs of neighbouring blocks; by default all."""


class DistillPart(Part):
    """A teacher beside the labels, on the same images (DeiT's distillation, with or without a token)."""

    teacher: str
    """A timm model with public weights, or a checkpoint written by isomorph."""
    weights: File | None = None
    """Weights of the teacher, where they are in a file of their own."""
    kwargs: dict[str, Any] = {}
    """Further arguments of timm.create_model for the teacher: {global_pool: avg, num_classes: 1000} of MAE's
    fine-tuned vit_base_patch16_224.mae, which averages over tokens."""
    kind: Literal["hard", "soft"] = "hard"
    """hard: the teacher's best class is a second label; soft: its probabilities are."""
    share: Share = 0.5
    """Weight of the teacher's term; the labels have the rest."""
    temperature: Positive = 1.0
    """Of the soft probabilities."""
    token: bool = False
    """The teacher's term is for the head of a distillation token (deit_*_distilled_*, tdrl_vit_ti_distilled), and the
    mean of both heads is evaluated; else for the one head."""
