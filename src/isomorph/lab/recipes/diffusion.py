"""Denoising diffusion on CIFAR-10 with and without pyramids in the U-Net's attention (TDRL Table 3), and small runs.

P-W2S replaces the 1x1 convolutions of all self-attention blocks. What the paper leaves open: docs/guides/readings.md.
"""

from typing import Any

# P-W2S on queries, keys, values and outputs of all attention layers; the network's function at the start is kept.
PYRAMIDS: dict[str, Any] = dict(
    rule="LinearToPyramid", layout="P-W2S", where=["unet.*.to_[qkv]", "unet.*.to_out.0"]
)

# A U-Net of 1.7M parameters that a CPU trains.
SMALL_NETWORK: dict[str, Any] = dict(channels=[16, 32, 64, 96], blocks=1, groups=8, drop_rate=0.0)

DIGITS_NETWORK = dict(
    channels=[16, 32], blocks=1, groups=8, attention=[1], time_steps=100, drop_rate=0.0
)


def _cifar10(recast: dict[str, Any] | None, expected: str) -> dict[str, Any]:
    model: dict[str, Any] = dict(name="ddpm_unet")
    if recast:
        model["recast"] = recast
    return dict(
        task=dict(name="diffusion"),
        model=model,
        data=dict(source="cifar10", batch_size=80),
        optim=dict(lr=2e-4, weight_decay=1e-4, warmup_epochs=20, min_lr=4.9e-6, clip_grad=1.0),
        epochs=200,
        evaluate_every=10,
        source="TDRL Table 3, DDPM on CIFAR-10",
        expected=expected,
    )


def _small(recast: dict[str, Any] | None) -> dict[str, Any]:
    model: dict[str, Any] = dict(name="ddpm_unet", kwargs=SMALL_NETWORK)
    if recast:
        model["recast"] = recast
    return dict(
        task=dict(name="diffusion"),
        model=model,
        data=dict(source="cifar10", fraction=0.1, test_images=1000, batch_size=32),
        optim=dict(
            lr=1e-3, weight_decay=1e-4, warmup_epochs=0.2, clip_grad=1.0, schedule="constant"
        ),
        ema=0.99,
        epochs=40,
        source="TDRL Table 3 in small, docs/guides/diffusion.md",
    )


RECIPES: dict[str, dict[str, Any]] = {
    "ddpm_cifar10": _cifar10(None, "FID 10.4"),
    "ddpm_cifar10_tdrl": _cifar10(PYRAMIDS, "FID 9.2"),
    "ddpm_cifar10_small": _small(None),
    "ddpm_cifar10_small_tdrl": _small(PYRAMIDS),
    "ddpm_digits": dict(
        task=dict(name="diffusion", beta_end=0.2),
        model=dict(name="ddpm_unet", kwargs=DIGITS_NETWORK),
        data=dict(source="digits", size=[8, 8], batch_size=64),
        augment=dict(hflip=0.0),
        optim=dict(lr=1e-3, weight_decay=1e-4, warmup_epochs=1, clip_grad=1.0),
        epochs=20,
        source="docs/guides/diffusion.md",
    ),
}
