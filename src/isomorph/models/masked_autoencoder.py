"""Masked autoencoder: a ViT reads the visible patches of an image, and a small decoder reconstructs the hidden ones."""

import math
from typing import Any, NamedTuple

import torch
from timm.layers import PatchEmbed
from timm.models import checkpoint, checkpoint_seq
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.layers.grid import GridSize, grid_positions
from isomorph.layers.pyramid.inits import init_as_mae
from isomorph.models.base import check_whole_patches
from isomorph.models.blockwise import BlockwiseViT
from isomorph.spec import ImageSize, spec_of
from isomorph.surgery.grid_hooks import GRID_LAYERS


class MaskSplit(NamedTuple):
    """A split of the patches into visible and hidden ones, with the same number visible in every image.

    Shape: visible (B, V) the indices of the visible patches; restore (B, N) the index of each patch in the order
    visible, then hidden; mask (B, N), 1 = hidden
    """

    visible: Tensor
    restore: Tensor
    mask: Tensor


def split_patches(noise: Tensor, ratio: float) -> MaskSplit:
    """The N (1 - ratio) patches with the least noise, rounded down, are visible (MAE section 3). Shape: noise (B, N)"""
    shuffled = noise.argsort(dim=1)  # (B, N)
    restore = shuffled.argsort(dim=1)  # (B, N)
    count = _visible_count(noise.shape[1], ratio)
    return MaskSplit(shuffled[:, :count], restore, (restore >= count).to(noise.dtype))


def _visible_count(patches: int, ratio: float) -> int:
    """Return N (1 - ratio), rounded down. Raises: UserError if no patch would be visible, or none hidden."""
    count = math.floor(patches * (1 - ratio) + 1e-9)
    if not 0 < count < patches:
        raise UserError(
            f"a mask ratio of {ratio:g} leaves {max(count, 0)} of {patches} patches visible; "
            f"give one that hides 1 to {patches - 1} of them, or use smaller patches"
        )
    return count


def gather_tokens(tokens: Tensor, indices: Tensor) -> Tensor:
    """Return the tokens at the given indices. Shape: tokens (B, N, C), indices (B, K) -> (B, K, C)"""
    channels = tokens.shape[2]
    return tokens.gather(1, indices[:, :, None].expand(-1, -1, channels))


def patchify(images: Tensor, patch_size: ImageSize) -> Tensor:
    """Cut images into patches, row by row; pixels within a patch also row by row, channels last.

    Shape: (B, C, H ph, W pw) -> (B, H W, ph pw C)
    """
    ph, pw = patch_size
    cut = images.unflatten(3, (-1, pw)).unflatten(2, (-1, ph))  # (B, C, H, ph, W, pw)
    return cut.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)  # (B, H W, ph pw C)


def reconstruction_error(prediction: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """Return the mean squared error on the hidden patches. Shape: (B, N, P), (B, N, P), (B, N) -> ()"""
    errors = (prediction - target).square().mean(dim=-1)  # (B, N)
    return (errors * mask).sum() / mask.sum()


def sincos_pos_embed(grid_size: GridSize, width: int) -> Tensor:
    """Return a fixed position embedding: sines of the column, its cosines, sines of the row, its cosines.

    Each is a quarter of the channels: sin(p w_k), cos(p w_k) with w_k = 10000^(-k / K), k < K = width / 4.

    Shape: -> (H W, width), the width a multiple of 4
    Source: Vaswani et al. (2017) section 3.5 on two axes, columns first as published with MAE
    """
    quarter = width // 4
    rates = 10000.0 ** (-torch.arange(quarter, dtype=torch.float64) / quarter)  # (K,)
    row, column = grid_positions(grid_size).double().unbind(1)  # (H W,) each
    quarters = []
    for axis in (column, row):
        angles = axis[:, None] * rates  # (H W, K)
        quarters += [angles.sin(), angles.cos()]
    return torch.cat(quarters, dim=1).float()  # (H W, width)


@torch.no_grad()
def _fix_positions(encoder: VisionTransformer) -> None:
    """Fix a ViT's positions at sine-cosine ones, zeros for prefix tokens, as published with MAE."""
    table = sincos_pos_embed(encoder.patch_embed.grid_size, encoder.embed_dim)
    encoder.pos_embed.zero_()[0, -len(table) :] = table.to(encoder.pos_embed)
    encoder.pos_embed.requires_grad_(False)


def _check_encoder(encoder: nn.Module) -> None:
    kind = type(encoder).__name__
    if not isinstance(encoder, VisionTransformer):
        raise UserError(
            f"masked pre-training needs a timm VisionTransformer (vit_*, deit_*, tdrl_vit_*), not a {kind}",
        )
    needing_grid = {
        type(module).__name__ for module in encoder.modules() if isinstance(module, GRID_LAYERS)
    }
    if not needing_grid and isinstance(encoder, BlockwiseViT):
        needing_grid = {f"a {kind}"}
    if needing_grid:
        raise UserError(
            f"masked pre-training hides patches, but {', '.join(needing_grid)} needs the whole grid; "
            "pre-train the plain ViT, then recast it"
        )
    if not isinstance(encoder.patch_drop, nn.Identity):
        raise UserError(
            "masked pre-training hides patches itself and ignores patch_drop_rate; leave it out, or change mask.ratio"
        )
    if encoder.pos_embed is None:
        raise UserError(
            f"masked pre-training needs a position embedding, which this {kind} does not have; set pos_embed"
        )
    if encoder.embed_dim % 4:
        raise UserError(
            f"masked pre-training has sine-cosine positions, and embed_dim {encoder.embed_dim} is not a multiple of 4; "
            "change it"
        )
    stem = encoder.patch_embed
    proj = getattr(stem, "proj", None)
    if not isinstance(stem, PatchEmbed) or getattr(proj, "kernel_size", None) != getattr(
        proj, "stride", 0
    ):
        raise UserError(
            f"masked pre-training needs plain patches, and a {type(stem).__name__} mixes them; use another ViT"
        )


class MaskedAutoencoder(nn.Module):
    """A ViT that encodes the visible patches of an image, and a decoder that reconstructs the hidden ones.

    The encoder is used unchanged, except that its positions become sine-cosine and fixed, and its unused head is
    frozen. `depth`, `width` and `heads` are those of the decoder; `mask` is the share of hidden patches. With
    `normalise` the target is every patch normalised by its own mean and standard deviation. If the encoder has its
    last norm after pooling, that norm is applied to the tokens here. BatchNorm inside a patch embedding does see all
    patches.

    Shape: images (B, C, h, w) -> prediction (B, N, ph pw C), mask (B, N), 1 = hidden; noise (B, N), by default drawn
    from torch's global generator
    Source: MAE (He et al., 2022) section 3
    Raises: UserError for an encoder that is not a plain ViT, a mask that leaves no patch visible or none hidden, or
        images that are not in whole patches.
    """

    decoder_pos_embed: Tensor

    def __init__(
        self,
        encoder: VisionTransformer,
        depth: int = 8,
        width: int = 512,
        heads: int = 16,
        mask: float = 0.75,
        normalise: bool = True,
    ) -> None:
        super().__init__()
        _check_encoder(encoder)
        _visible_count(encoder.patch_embed.num_patches, mask)
        if width % 4 or width % heads:
            raise UserError(
                f"the decoder's width {width} is not a multiple of 4 and of its {heads} heads; change one",
            )
        self.encoder = encoder
        self.ratio = mask
        self.normalise = normalise
        self.width = width
        self.heads = heads
        self.patch_size: ImageSize = encoder.patch_embed.patch_size
        self.grad_checkpointing = False
        _fix_positions(encoder)
        for name in ("head", "head_dist", "attn_pool"):
            module = getattr(encoder, name, None)
            if isinstance(module, nn.Module):
                module.requires_grad_(False)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, width))
        self.decoder_embed = nn.Linear(encoder.embed_dim, width)
        self.decoder_blocks = nn.ModuleList(
            Block(width, heads, qkv_bias=True) for _ in range(depth)
        )
        self.decoder_norm = nn.LayerNorm(width, eps=1e-6)
        self.decoder_pred = nn.Linear(width, math.prod(self.patch_size) * encoder.in_chans)
        table = sincos_pos_embed(encoder.patch_embed.grid_size, width)
        self.register_buffer("decoder_pos_embed", table, persistent=False)
        nn.init.normal_(self.mask_token, std=0.02)  # MAE appendix A.1, as all that follows
        for part in (self.decoder_embed, self.decoder_blocks, self.decoder_pred):
            init_as_mae(part)
        parameter = next(encoder.parameters())
        self.to(parameter.device, parameter.dtype)

    @property
    def pretrained_cfg(self) -> dict[str, Any]:
        """The encoder's, with the image size that it was built for."""
        images = {"input_size": (self.encoder.in_chans, *self.encoder.patch_embed.img_size)}
        return {**spec_of(self.encoder).config, **images}

    def grid_of(self, size: tuple[int, ...]) -> GridSize:
        """Return the grid of patches for images of a height and width. Raises: UserError if the size does not fit."""
        stem = self.encoder.patch_embed
        check_whole_patches(size, self.patch_size, padded=False)
        if stem.strict_img_size and size != tuple(stem.img_size):
            own_size = "x".join(map(str, stem.img_size))
            given_size = "x".join(map(str, size))
            raise UserError(
                f"the encoder takes images of {own_size}, not {given_size}; create it with dynamic_img_size=True",
            )
        return size[0] // self.patch_size[0], size[1] // self.patch_size[1]

    def draw_noise(self, images: Tensor) -> Tensor:
        """Draw the noise that decides on the mask from torch's global generator. Shape: (B, C, h, w) -> (B, N)"""
        H, W = self.grid_of(tuple(images.shape[-2:]))
        return torch.rand(len(images), H * W, device=images.device)

    def split_patches(self, images: Tensor, noise: Tensor | None) -> MaskSplit:
        """Return the visible and hidden patches of images, by noise (B, N) or newly drawn one."""
        if noise is None:
            noise = self.draw_noise(images)
        return split_patches(noise, self.ratio)

    def encode(self, images: Tensor, split: MaskSplit) -> Tensor:
        """Encode the visible patches. Shape: (B, C, h, w) -> (B, prefix + V, channels)"""
        vit = self.encoder
        # the steps of timm's forward_features, of which only its private _pos_embed adds positions
        # to all patches
        tokens = vit._pos_embed(vit.patch_embed(images))  # (B, prefix + N, channels)
        prefix = tokens[:, : vit.num_prefix_tokens]
        patches = tokens[:, vit.num_prefix_tokens :]
        tokens = torch.cat(
            [prefix, gather_tokens(patches, split.visible)], dim=1
        )  # (B, prefix + V, channels)
        tokens = vit.norm_pre(tokens)
        tokens = (
            checkpoint_seq(vit.blocks, tokens) if vit.grad_checkpointing else vit.blocks(tokens)
        )
        return vit.fc_norm(vit.norm(tokens))  # one of the two is the identity

    def decode(self, images: Tensor, noise: Tensor | None, blocks: int) -> tuple[Tensor, Tensor]:
        """Run encoder and first decoder blocks; return the patches' tokens, with mask tokens for hidden ones, and mask.

        Shape: images (B, C, h, w), noise (B, N) -> (B, N, width), (B, N)
        """
        split = self.split_patches(images, noise)
        positions = self.positions(self.grid_of(tuple(images.shape[-2:])))  # (N, width)
        x = self.decoder_embed(self.encode(images, split))  # (B, prefix + V, width)
        prefix = self.encoder.num_prefix_tokens
        B, N = split.restore.shape
        V = split.visible.shape[1]
        hidden = self.mask_token.to(x.dtype).expand(B, N - V, -1)  # (B, N - V, width)
        patches = torch.cat([x[:, prefix:], hidden], dim=1)
        patches = gather_tokens(patches, split.restore) + positions.to(x.dtype)  # (B, N, width)
        x = torch.cat([x[:, :prefix], patches], dim=1)  # (B, prefix + N, width)
        for block in self.decoder_blocks[:blocks]:
            x = checkpoint(block, x) if self.grad_checkpointing else block(x)
        return x[:, prefix:], split.mask

    def positions(self, grid_size: GridSize) -> Tensor:
        """Return the decoder's position embedding for a grid. Shape: -> (H W, width)"""
        if grid_size == tuple(self.encoder.patch_embed.grid_size):
            return self.decoder_pos_embed
        return sincos_pos_embed(grid_size, self.width).to(self.decoder_pos_embed)

    def decoder_features(
        self,
        images: Tensor,
        noise: Tensor | None = None,
        block: int | None = None,
    ) -> Tensor:
        """Return all patches' tokens after a decoder block (1 is the first, None the last), before the decoder's norm.

        Shape: images (B, C, h, w), noise (B, N) -> (B, N, width)
        Source: TDRL section 4.1; before the norm as published with G2SD (Huang et al., 2023)
        """
        last = len(self.decoder_blocks)
        if block is None:
            block = last
        if not 1 <= block <= last:
            raise UserError(f"the decoder has blocks 1 to {last}, not {block}")
        return self.decode(images, noise, block)[0]

    def forward(self, images: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
        features, mask = self.decode(images, noise, len(self.decoder_blocks))
        return self.decoder_pred(self.decoder_norm(features)), mask

    def target(self, images: Tensor) -> Tensor:
        """Return the target of the prediction. Shape: (B, C, h, w) -> (B, N, ph pw C)"""
        patches = patchify(images, self.patch_size)
        if not self.normalise:
            return patches
        variance, mean = torch.var_mean(patches, dim=-1, keepdim=True)  # unbiased, as published
        return (patches - mean) / (variance + 1e-6).sqrt()

    def loss(self, images: Tensor, noise: Tensor | None = None) -> Tensor:
        """Return the mean squared error on the hidden patches. Shape: (B, C, h, w), (B, N) -> ()"""
        prediction, mask = self(images, noise)
        return reconstruction_error(prediction, self.target(images), mask)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute blocks of both halves in the backward pass instead of storing their activations."""
        self.encoder.set_grad_checkpointing(enable)
        self.grad_checkpointing = enable

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters without weight decay: the mask token and the encoder's."""
        return {"mask_token", *(f"encoder.{name}" for name in self.encoder.no_weight_decay())}
