"""The fields of masked pre-training."""

from pydantic import model_validator

from isomorph.training.recipe.fields import (
    File,
    Part,
    Rate,
    Side,
)


class MaskPart(Part):
    """Pre-training without labels: hidden patches are painted (MAE), or described as a teacher does (G2SD)."""

    ratio: Rate = 0.75
    """Share of the patches that is hidden."""
    depth: Side | None = None
    """Blocks of the decoder; by default 8, with a teacher 4."""
    width: Side | None = None
    """Channels of the decoder; by default 512, with a teacher 128."""
    heads: Side | None = None
    """Heads of the decoder; by default 16, with a teacher 4 (as published with G2SD; TDRL does not say)."""
    normalise: bool = True
    """Paint patches less their mean and over their deviation."""
    teacher: File | None = None
    """A masked autoencoder, its decoder included: an autoencoder.safetensors by isomorph, or MAE's full checkpoint."""
    teacher_model: str | None = None
    """The teacher's encoder in timm, e.g. vit_base_patch16_224; of MAE's checkpoint only."""
    teacher_heads: Side = 16
    """Heads of the teacher's decoder, which MAE's checkpoint does not tell."""
    block: Side = 4
    """The block of the teacher's decoder whose features are learnt."""

    @model_validator(mode="after")
    def coherent(self) -> "MaskPart":
        _, width, heads = self.decoder
        if width % 4:
            raise ValueError(f"width {width} is no multiple of 4, as sine-cosine positions need")
        if width % heads:
            raise ValueError(f"heads {heads} do not divide width {width}")
        if self.ratio == 0:
            raise ValueError("ratio 0 hides nothing; the published one is 0.75")
        if self.teacher_model and not self.teacher:
            raise ValueError("teacher_model is the encoder of a teacher: give `teacher`, its checkpoint")
        return self

    @property
    def decoder(self) -> tuple[int, int, int]:
        """Depth, width and heads of the decoder."""
        depth, width, heads = (4, 128, 4) if self.teacher else (8, 512, 16)
        return self.depth or depth, self.width or width, self.heads or heads
