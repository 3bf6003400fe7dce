"""Small real images that come with scikit-learn, its photographs and digits, and weights trained on them in seconds."""

import io
import json

import numpy as np
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from sklearn.datasets import load_digits, load_sample_image
from torch import nn

PLACES = (("china.jpg", 20, 60), ("china.jpg", 250, 330), ("flower.jpg", 130, 260))
"""A photograph, and the rows and columns near which a class of crops begins: sky, a roof, petals."""


def digit_images(count, side=32):
    """Images of handwritten digits in colour, and their labels."""
    digits = load_digits()
    images = []
    for pixels in digits.images[:count]:
        grey = Image.fromarray((pixels * 255 / 16).astype(np.uint8))
        images.append(grey.resize((side, side), Image.Resampling.BILINEAR).convert("RGB"))
    return images, digits.target[:count].tolist()


def write_crops(folder, classes, each, side=64):
    """Write a folder of crops of photographs for each of three classes."""
    for name, (photograph, top, left) in zip(classes, PLACES, strict=True):
        pixels = load_sample_image(photograph)
        (folder / name).mkdir(parents=True)
        for number in range(1, each + 1):
            step = 7 * number
            crop = pixels[top + step : top + step + side, left + step : left + step + side]
            Image.fromarray(crop).save(folder / name / f"{number}.jpg")


def write_parquet(images, labels, path):
    """Write images and labels as Hugging Face's data sets hold them."""
    import pyarrow as pa
    from pyarrow.parquet import write_table

    rows = []
    for image in images:
        encoded = io.BytesIO()
        image.save(encoded, "PNG")
        rows.append({"bytes": encoded.getvalue(), "path": None})
    path.parent.mkdir(parents=True, exist_ok=True)
    names = [str(label) for label in range(max(labels) + 1)]
    features = {"img": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
    described = json.dumps({"info": {"features": features}})
    table = pa.table({"img": rows, "label": labels}).replace_schema_metadata(
        {"huggingface": described}
    )
    write_table(table, path)


def train_public_weights(folder):
    """Write what stands for the public weights of cifar_resnet20: a network after a few steps on digits."""
    torch.manual_seed(0)
    model = timm.create_model("cifar_resnet20").train()
    images, labels = digit_images(320)
    pixels = torch.from_numpy(np.stack([np.asarray(image) for image in images])).permute(0, 3, 1, 2)
    pixels = pixels.float() / 255
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for x, y in zip(pixels.split(32), torch.tensor(labels).split(32), strict=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    (folder / "weights").mkdir(parents=True)
    save_file(model.state_dict(), folder / "weights" / "cifar10_resnet20.safetensors")
    return folder
