"""Recipe fields of masked pre-training."""

from pydantic import model_validator

from isomorph.training.recipe.part import File, Part, Rate, Size


class MaskPart(Part):
    """Pre-training without labels: reconstruct hidden patches (MAE), or match a teacher's features (G2SD)."""

    ratio: Rate = 0.75
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

    @model_validator(mode="after")
    def check_fields(self) -> "MaskPart":
        _, width, heads = self.decoder
        if width % 4:
            raise ValueError(f"width {width} must be a multiple of 4, for the sine-cosine position embedding")
        if width % heads:
            raise ValueError(f"heads {heads} must divide width {width}")
        if self.ratio == 0:
            raise ValueError("ratio 0 hides no patches; give a ratio above 0, e.g. 0.75 as in MAE")
        if self.teacher_model and not self.teacher:
            raise ValueError("teacher_model needs `teacher`; give the teacher's checkpoint")
        return self

    @property
    def decoder(self) -> tuple[int, int, int]:
        """Depth, width and heads of the decoder, with their defaults."""
        depth, width, heads = (4, 128, 4) if self.teacher else (8, 512, 16)
        return self.depth or depth, self.width or width, self.heads or heads
