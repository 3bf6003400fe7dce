"""Recipe fields of objectives: token labels, map similarity, distillation and masked pre-training."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from isomorph.training.recipe.fields import Count, File, Fraction, NotNegative, Part, Positive, Size


class TokenLabelPart(Part):
    """Token labelling, for models with a dense head: a label for every patch, from label maps or the image."""

    weight: NotNegative = 0.5
    """Weight of the patches' loss; the image's loss has weight 1."""
    mix: bool = True
    """MixToken: replace a box of patches, and their labels, by those of another image."""
    beta: Positive = 1.0
    """MixToken draws the fraction of the image that stays from Beta(beta, beta)."""
    maps: File | None = None
    """Folder of label maps, class/image.pt for each training image class/image.jpg; by default the image's label."""
    class_token: Literal["label", "map"] = "label"
    """Label of the class token with maps: the image's (as in the paper), or the map's mean over the crop (the code)."""

    @model_validator(mode="after")
    def check_fields(self) -> "TokenLabelPart":
        if self.class_token == "map" and self.maps is None:
            raise ValueError("class_token map needs token_labels.maps, the folder of label maps")
        return self


class MapSimilarityPart(Part):
    """Penalty on similar attention maps in neighbouring blocks (Refiner's code), for refined_vit_*."""

    weight: Positive = 0.1
    """Weight of the similarity, the mean over block pairs, queries and keys of the cosine over heads."""
    pairs: Count | None = None
    """Number of pairs of neighbouring blocks, from the first; by default all."""


class DistillPart(Part):
    """Distillation from a teacher on the same images (DeiT), with or without a distillation token."""

    teacher: str
    """A timm model with pretrained weights, or a checkpoint written by isomorph."""
    weights: File | None = None
    """File with the weights of a teacher that is given as a timm model."""
    kwargs: dict[str, Any] = {}
    """More arguments of timm.create_model for the teacher, e.g. {global_pool: avg} for MAE's fine-tuned ViT-B."""
    kind: Literal["hard", "soft"] = "hard"
    """hard: the teacher's top class is a second label; soft: its probabilities are."""
    share: Fraction = 0.5
    """Weight of the teacher's term; that of the labels is 1 - share."""
    temperature: Positive = 1.0
    """Temperature of the soft probabilities."""
    token: bool = False
    """Train the head of a distillation token on the teacher's term; evaluate the mean of both heads."""


class MaskPart(Part):
    """Pre-training without labels: reconstruct hidden patches (MAE), or match a teacher's features (G2SD)."""

    ratio: Annotated[float, Field(gt=0, lt=1)] = 0.75
    """Fraction of the patches to hide."""
    depth: Size | None = None
    """Blocks of the decoder; by default 8, or 4 with a teacher."""
    width: Size | None = None
    """Channels of the decoder; by default 512, or 128 with a teacher."""
    heads: Size | None = None
    """Heads of the decoder; by default 16, or 4 with a teacher (from G2SD; TDRL does not specify it)."""
    normalise: bool = True
    """Normalise the target pixels of each patch by their mean and standard deviation."""
    teacher: File | None = None
    """Teacher with its decoder: an autoencoder.safetensors of isomorph, or MAE's full checkpoint."""
    teacher_model: str | None = None
    """timm name of the teacher's encoder, e.g. vit_base_patch16_224; only for MAE's checkpoints."""
    teacher_heads: Size = 16
    """Heads of the teacher's decoder; only for MAE's checkpoints, which do not store it."""
    block: Size = 4
    """Block of the teacher's decoder whose features the student learns, from 1."""

    @property
    def decoder(self) -> tuple[int, int, int]:
        """Depth, width and heads of the decoder, with their defaults."""
        depth, width, heads = (4, 128, 4) if self.teacher else (8, 512, 16)
        return self.depth or depth, self.width or width, self.heads or heads
