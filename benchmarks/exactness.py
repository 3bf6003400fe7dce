"""What each step of the surgery does to the public CIFAR ResNets on the 10,000 JPEG test images.

    python benchmarks/exactness.py

Needs ISOMORPH_DATA with cifar10 and weights.
"""

import timm
import torch
from timm.data import resolve_data_config

import isomorph as iso
from interleave import show, write

LAYER3 = "layer3.*.conv?"


def steps(name):
    """The models in the order in which surgery makes them; each with the one it is compared with."""
    cnn = timm.create_model(name, pretrained=True).eval()
    exact = iso.recast(cnn, iso.ConvToGPSA("exact"), LAYER3)
    yield "CNN", cnn, cnn
    yield "recast exact (20, 15)", exact, cnn
    yield "reverted with to_conv", iso.revert(exact), cnn
    if name == "cifar_resnet20":
        yield from further_steps(cnn)


def further_steps(cnn):
    """Recasts that do not keep the function, and the change of stride."""
    flat = iso.unstride(cnn, "layer3")
    yield "recast (5, 6)", iso.recast(cnn, iso.ConvToGPSA(locality=5.0, gate=6.0), LAYER3), cnn
    yield "recast paper (1, 1)", iso.recast(cnn, iso.ConvToGPSA("paper"), LAYER3), cnn
    yield "unstride layer3", flat, cnn
    yield "unstride, then recast exact", iso.recast(flat, iso.ConvToGPSA("exact"), LAYER3), flat


@torch.no_grad()
def predictions(model, loader):
    """Return the predicted class of every image and the accuracy in percent."""
    found = [(model(images).argmax(-1), labels) for images, labels in loader]
    predicted, labels = (torch.cat(each) for each in zip(*found, strict=True))
    return predicted, 100 * (predicted == labels).double().mean().item()


def main():
    rows = []
    for name in ("cifar_resnet20", "cifar_resnet56"):
        earlier = {}
        for step, model, before in steps(name):
            loader = iso.data.eval_loader(
                iso.data.open_source("cifar10", "test"), resolve_data_config(model=model), 200
            )
            report = iso.surgery.compare_outputs(before, model, next(iter(loader))[0][:100])
            earlier[model], top1 = predictions(model, loader)
            changed = (earlier[model] != earlier[before]).sum().item()
            row = {
                "model": name,
                "step": step,
                "top-1": f"{top1:.2f}",
                "changed predictions": changed,
            }
            rows.append(
                row | {"max |diff| fp32": f"{report.fp32:.1e}", "fp64": f"{report.fp64:.1e}"}
            )
    show(
        "Each step against the model before it: logits of 100 real images, predictions of 10,000",
        rows,
    )
    print(f"\nwrote {write('exactness', {'steps': rows})}")


if __name__ == "__main__":
    main()
