"""What content attention could add to the convolutions of a trained CNN, by least squares on CIFAR-10.

    python benchmarks/content_worth.py [--noise 0.1] [--fit 300] [--held 200] [--layers layer1.0.conv1 ...]

Needs ISOMORPH_DATA with cifar10 and weights. For a convolution of the public ResNet-20, a linear map of its taps (the
3 x 3 patch that it reads) is fitted to a target at every position, and then one of the taps and what attention in a
7 x 7 window would add. The share of the target's variance that is explained on other images says what the addition is
worth: gates open if it is worth something. Two targets:

- "training": the negative gradient of the loss with respect to the layer's output, the change that training asks for;
- "denoising": the layer's output for the clean image, where the layer reads one with noise (standard deviation
  `--noise`, of pixels in 0 to 1).

All images are training images; the strength of the ridge penalty is chosen on a third of those of the fit. Results are
in results/content_worth.json.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from interleave import show, write
from tcnn_opens import images_of, pixel_noise

WINDOW, POSITIONS, PENALTIES = 7, 96, (1e-4, 1e-2, 1.0, 100.0)
LAYERS = (
    "layer1.0.conv1", "layer1.2.conv1", "layer2.1.conv1", "layer2.2.conv2", "layer3.1.conv1", "layer3.2.conv2",
)  # fmt: skip
Content = Callable[[Tensor], Tensor]


def patches(x: Tensor, size: int) -> Tensor:
    """Return the patch around every position. Shape: (B, C, H, W) -> (B, C, size^2, H W)"""
    return F.unfold(x, size, padding=size // 2).unflatten(1, (x.shape[1], size**2))


def window_average(scores: Tensor, x: Tensor) -> Tensor:
    """Return the average over the window by softmax(scores), clipped at the border. Shape: (B, 49, N) -> (B, C, N)"""
    inside = patches(torch.ones_like(x[:1, :1]), WINDOW)[:, 0]
    return torch.einsum("bkn,bckn->bcn", (scores + inside.log()).softmax(1), patches(x, WINDOW))


def mean_of_window(x: Tensor) -> Tensor:
    """Attention with equal weights: the mean of the window, with which content attention starts."""
    return window_average(x.new_zeros(len(x), WINDOW**2, x[0, 0].numel()), x)


def attention(x: Tensor, basis: Tensor, distance: bool) -> Tensor:
    """Return attention by the product of principal components, or by their distance (non-local means)."""
    z = torch.einsum("bchw,cd->bdhw", x, basis)
    query, keys = z.flatten(2).unsqueeze(2), patches(z, WINDOW)  # (B, d, 1, N), (B, d, 49, N)
    scores = -(query - keys).square().sum(1) / 2 if distance else (query * keys).sum(1)
    return window_average(scores, x)


def principal_basis(x: Tensor, components: int, temperature: float) -> Tensor:
    """Return directions whose components of x have a variance of temperature / components. Shape: -> (C, d)"""
    values, directions = torch.linalg.eigh(torch.cov(x.transpose(0, 1).flatten(1)))  # ascending
    scale = (temperature / components / values[-components:].clamp(min=1e-6)).sqrt()
    return directions[:, -components:] * scale


def additions(x: Tensor) -> dict[str, list[Content]]:
    """Return what is added to the taps, by name; of several, the best one counts."""
    bases = [principal_basis(x, min(d, x.shape[1]), t) for d in (4, 12) for t in (4.0, 16.0)]
    return {
        "taps": [lambda x: x[:, :0].flatten(2)],
        "mean of the window": [mean_of_window],
        "attention by product": [partial(attention, basis=basis, distance=False) for basis in bases],
        "attention by distance": [partial(attention, basis=basis, distance=True) for basis in bases],
        "5 x 5 taps": [lambda x: patches(x, 5).flatten(1, 2)],
    }


def samples(x: Tensor, add: Content, keep: Tensor) -> Tensor:
    """Return a constant, the taps and an addition at some positions. Shape: -> (images x positions, features)"""
    rows = []
    for part in x.split(50):
        features = torch.cat([patches(part, 3).flatten(1, 2), add(part)], 1)[..., keep]
        rows.append(F.pad(features.transpose(1, 2).flatten(0, 1), (0, 1), value=1.0))
    return torch.cat(rows).double()


def ridge(features: Tensor, target: Tensor, penalties: Sequence[float]) -> list[Tensor]:
    """Return the linear map with the least squared error plus penalty, for each penalty."""
    square, product = features.T @ features, features.T @ target
    scale = square.diag().mean() * torch.eye(len(square))
    return [torch.linalg.solve(square + penalty * scale, product) for penalty in penalties]


def explained(features: Tensor, target: Tensor, weights: Tensor) -> float:
    """Return the share of the target's squares that a map explains, in percent."""
    return 100 * (1 - ((target - features @ weights).square().sum() / target.square().sum()).item())


def worth(fit: tuple[Tensor, Tensor], held: tuple[Tensor, Tensor], add: Content, keep: Tensor) -> float:
    """Return the share of the held-out target that the taps and an addition explain, in percent."""
    (f, y), (f_held, y_held) = ((samples(x, add, keep), rows(y, keep)) for x, y in (fit, held))
    third = len(f) // 3
    tried = [explained(f[:third], y[:third], weights) for weights in ridge(f[third:], y[third:], PENALTIES)]
    return explained(f_held, y_held, ridge(f, y, [PENALTIES[tried.index(max(tried))]])[0])


def rows(y: Tensor, keep: Tensor) -> Tensor:
    """Return a target at some positions, around its mean. Shape: (B, C, H, W) -> (images x positions, C)"""
    found = y.flatten(2)[..., keep].transpose(1, 2).flatten(0, 1).double()
    return found - found.mean(0)


def input_and_output(model: nn.Module, name: str, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a layer reads and gives."""
    seen: list[tuple[Tensor, Tensor]] = []
    hook = model.get_submodule(name).register_forward_hook(lambda _, x, y: seen.append((x[0], y)))
    model(images)
    hook.remove()
    return seen[0]


def training_target(model: nn.Module, name: str, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return a layer's input, and the negative gradient of the loss with respect to its output."""
    found = []
    for part, answer in zip(images.split(200), labels.split(200), strict=True):
        with torch.enable_grad():
            kept: list[Tensor] = []
            hook = model.get_submodule(name).register_forward_hook(lambda _, x, y, kept=kept: kept.extend((x[0], y)))
            loss = F.cross_entropy(model(part.clone().requires_grad_()), answer, reduction="sum")
            hook.remove()
            found.append((kept[0].detach(), -torch.autograd.grad(loss, kept[1])[0]))
    x, gradient = (torch.cat(each) for each in zip(*found, strict=True))
    return x, gradient


def denoising_target(
    model: nn.Module, name: str, images: Tensor, labels: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor]:
    """Return a layer's input for images with noise, and its output for the clean ones."""
    noisy = images + noise * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    return input_and_output(model, name, noisy)[0], input_and_output(model, name, images)[1]


def table(model: nn.Module, targets: Callable[..., tuple[Tensor, Tensor]], data: list, layers: list[str]) -> list[dict]:
    """Return a row for each layer: what its taps explain, and how many points each addition adds."""
    found = []
    for name in layers:
        fit, held = (targets(model, name, *part) for part in data)
        keep = torch.randperm(fit[1][0, 0].numel(), generator=torch.Generator().manual_seed(0))[:POSITIONS]
        best = {title: max(worth(fit, held, add, keep) for add in adds) for title, adds in additions(fit[0]).items()}
        row = {"layer": name, "taps": f"{best['taps']:.2f}"}
        row |= {title: f"{best[title] - best['taps']:+.2f}" for title in best if title != "taps"}
        print(row, flush=True)
        found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--noise", type=float, default=0.1)
    parser.add_argument("--fit", type=int, default=300, help="images to fit on")
    parser.add_argument("--held", type=int, default=200, help="other images, to measure on")
    parser.add_argument("--layers", nargs="+", default=list(LAYERS), help="of stride 1")
    given = parser.parse_args()
    images = images_of(given.fit)
    data = [images["train"], tuple(part[: given.held] for part in images["val"])]
    model = timm.create_model("cifar_resnet20", pretrained=True).eval().requires_grad_(False)
    targets = {"training": training_target, "denoising": partial(denoising_target, noise=pixel_noise(given.noise))}
    tables = {}
    with torch.no_grad():
        for title, target in targets.items():
            tables[title] = table(model, target, data, given.layers)
    for title, found in tables.items():
        show(title, found)
    print(f"\nwrote {write('content_worth', tables | {'settings': [vars(given)]})}")


if __name__ == "__main__":
    main()
