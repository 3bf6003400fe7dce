"""What content attention could add to the convolutions of a trained CNN, by least squares on real images.

    python benchmarks/content_worth.py [--noise 0.1] [--fit 300] [--held 200] [--positions 96] [--layers layer1.0.conv1]
    python benchmarks/content_worth.py --data imagenet/ --size 96 --fit 60 --held 40 --layers layer1.0.conv1 ...

Needs ISOMORPH_DATA with cifar10 and weights. For a convolution of the public CIFAR ResNet-20, a linear map of its taps
(the 3 x 3 patch that it reads) is fitted to a target at every position, and then one of the taps and what attention in
a 7 x 7 window would add; "at the taps" is attention of nine queries, one at each tap. The share of the target's
variance that is explained on other images says what the addition is worth: gates open if it is worth something. Two
targets:

- "training": the negative gradient of the loss with respect to the layer's output, the change that training asks for;
- "denoising": the layer's output for the clean image, where the layer reads one with noise (standard deviation
  `--noise`, of pixels in 0 to 1).

Without `--data` these are training images of CIFAR-10. With it, the target is denoising alone, on the middle of the
images of a folder: their shorter side is resized to 256 pixels, and squares of `--size` are cut out. The strength of
the ridge penalty is chosen on a third of the images of the fit. Results are added to results/content_worth.json.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import isomorph as iso
from interleave import show, update
from isomorph.data.sources import spaced_images
from tcnn_opens import images_of, pixel_noise, preprocessing

SHORT_SIDE = 256
WINDOW, PENALTIES = 7, (1e-4, 1e-2, 1.0, 100.0)
LAYERS = (
    "conv1", "layer1.0.conv1", "layer1.2.conv1", "layer2.1.conv1", "layer2.2.conv2", "layer3.1.conv1", "layer3.2.conv2",
)  # fmt: skip
Content = Callable[[Tensor], Tensor]


def patches(x: Tensor, size: int) -> Tensor:
    """Return the patch around every position. Shape: (B, C, H, W) -> (B, C, size^2, H W)"""
    return F.unfold(x, size, padding=size // 2).unflatten(1, (x.shape[1], size**2))


def window_average(scores: Tensor, x: Tensor) -> Tensor:
    """Return the average over the window by softmax(scores), clipped at the border. Shape: (B, 49, N) -> (B, C, N)"""
    inside = patches(torch.ones_like(x[:1, :1]), WINDOW)[:, 0]
    return torch.einsum("bkn,bckn->bcn", (scores + inside.log()).softmax(1), patches(x, WINDOW))


def attend_by_product(z: Tensor, x: Tensor) -> Tensor:
    """Return attention in the window by the product of features z. Shape: (B, d, H, W), (B, C, H, W) -> (B, C, N)"""
    return window_average((z.flatten(2).unsqueeze(2) * patches(z, WINDOW)).sum(1), x)


def mean_of_window(x: Tensor) -> Tensor:
    """Attention with equal weights: the mean of the window, with which content attention starts."""
    return window_average(x.new_zeros(len(x), WINDOW**2, x[0, 0].numel()), x)


@dataclass(frozen=True)
class Components:
    """Principal components of a layer's input, scaled so that their variances sum to the temperature."""

    mean: Tensor  # (C, 1, 1)
    basis: Tensor  # (C, d)
    temperature: float

    @classmethod
    def of(cls, x: Tensor, count: int, temperature: float) -> "Components":
        """Return the first components of tokens. Shape: x (B, C, H, W)"""
        tokens = x.transpose(0, 1).flatten(1)
        values, directions = torch.linalg.eigh(torch.cov(tokens))  # ascending
        scale = (temperature / count / values[-count:].clamp(min=1e-6)).sqrt()
        return cls(tokens.mean(1)[:, None, None], directions[:, -count:] * scale, temperature)

    def project(self, x: Tensor) -> Tensor:
        """Shape: (B, C, H, W) -> (B, d, H, W)"""
        return torch.einsum("bchw,cd->bdhw", x, self.basis)

    def by_product(self, x: Tensor) -> Tensor:
        """Return attention by the product of components, as attention compares."""
        return attend_by_product(self.project(x), x)

    def by_direction(self, x: Tensor) -> Tensor:
        """Return attention by the product of centred components of equal length (cosine attention)."""
        return attend_by_product(F.normalize(self.project(x - self.mean)) * self.temperature**0.5, x)

    def by_distance(self, x: Tensor) -> Tensor:
        """Return attention by the distance of components (non-local means)."""
        z = self.project(x)
        return window_average(-(z.flatten(2).unsqueeze(2) - patches(z, WINDOW)).square().sum(1) / 2, x)


def additions(x: Tensor, counts: Sequence[int]) -> dict[str, list[Content]]:
    """Return what is added to the taps, by name, with so many components; of several, the best one counts."""
    found = [Components.of(x, min(count, x.shape[1]), t) for count in counts for t in (4.0, 16.0)]
    return {
        "taps": [lambda x: x[:, :0].flatten(2)],
        "mean of the window": [mean_of_window],
        "attention by product": [each.by_product for each in found],
        "attention by direction": [each.by_direction for each in found],
        "attention by distance": [each.by_distance for each in found],
        "by distance, at the taps": [partial(at_taps, each.by_distance) for each in found],
        "5 x 5 taps": [wider_taps],
        "5 x 5 taps and distance": [partial(both, wider_taps, each.by_distance) for each in found],
    }


def wider_taps(x: Tensor) -> Tensor:
    """Return the patch of 5 x 5. Shape: (B, C, H, W) -> (B, 25 C, N)"""
    return patches(x, 5).flatten(1, 2)


def at_taps(add: Content, x: Tensor) -> Tensor:
    """Return what an addition gives at the position of every tap. Shape: (B, C, H, W) -> (B, 9 C, N)"""
    return patches(add(x).unflatten(-1, x.shape[-2:]), 3).flatten(1, 2)


def both(one: Content, other: Content, x: Tensor) -> Tensor:
    """Return two additions together."""
    return torch.cat([one(x), other(x)], 1)


def samples(x: Tensor, add: Content, keep: Tensor) -> Tensor:
    """Return a constant, the taps and an addition at some positions. Shape: -> (images x positions, features)"""
    rows = []
    for part in x.split(max(1, 50_000 // x[0, 0].numel())):
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


def images_of_folder(folder: str, size: int, count: int) -> Tensor:
    """Return squares from the middle of images that are spread over a folder, normalised."""
    config = preprocessing() | {"input_size": (3, size, size), "crop_pct": size / SHORT_SIDE}
    source = spaced_images(iso.data.open_source(folder, "test"), count)
    return torch.cat([images for images, _ in iso.data.eval_loader(source, config, 50)])


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


def table(
    model: nn.Module, targets: Callable[..., tuple[Tensor, Tensor]], data: list, given: argparse.Namespace
) -> list[dict]:
    """Return a row for each layer: what its taps explain, and how many points each addition adds."""
    found = []
    for name in given.layers:
        fit, held = (targets(model, name, *part) for part in data)
        keep = torch.randperm(fit[1][0, 0].numel(), generator=torch.Generator().manual_seed(0))[: given.positions]
        best = {
            title: max(worth(fit, held, add, keep) for add in adds)
            for title, adds in additions(fit[0], given.components).items()
        }
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
    parser.add_argument("--positions", type=int, default=512, help="of each image, at most")
    parser.add_argument("--components", type=int, nargs="+", default=[4, 12], help="of tokens, that attention compares")
    parser.add_argument("--layers", nargs="+", default=list(LAYERS), help="of stride 1")
    parser.add_argument("--data", help="images other than CIFAR-10")
    parser.add_argument("--size", type=int, default=96, help="of squares of these images")
    given = parser.parse_args()
    model = timm.create_model("cifar_resnet20", pretrained=True).eval().requires_grad_(False)
    targets = {"training": training_target, "denoising": partial(denoising_target, noise=pixel_noise(given.noise))}
    if given.data:
        images = images_of_folder(given.data, given.size, given.fit + given.held)
        data = [(part, None) for part in images.split([given.fit, given.held])]
        targets = {f"denoising, {given.size} px": targets["denoising"]}
    else:
        found = images_of(given.fit)
        data = [found["train"], tuple(part[: given.held] for part in found["val"])]
    of = f", components {given.components}" if given.components != [4, 12] else ""
    with torch.no_grad():
        tables = {title + of: table(model, target, data, given) for title, target in targets.items()}
    for title, found in tables.items():
        show(title, found)
    print(f"\nwrote {update('content_worth', tables)}")


if __name__ == "__main__":
    main()
