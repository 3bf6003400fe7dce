"""Fine-tuning one's own model on one's own images."""

from typing import Any

RECIPES: dict[str, dict[str, Any]] = {
    "finetune": dict(
        model=dict(start="weights"),
        data=dict(source="imagefolder", batch_size=32),
        augment=dict(scale=(0.35, 1.0), crop_padding="auto"),
        optim=dict(lr=1e-4, gate_lr="100x", position_lr="20x", warmup_epochs=1, clip_grad=1.0),
        epochs=10,
        source="isomorph: a checkpoint (--model.weights) on a folder of images (--data)",
    )
}
