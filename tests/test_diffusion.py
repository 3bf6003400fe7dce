"""Denoising diffusion: noise schedule, loss, sampling, distances of images, runs that resume, and the commands."""

import json
from urllib.error import URLError

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn

import isomorph as iso
from command_line import isomorph
from isomorph.cli.sample import fid
from isomorph.cli.sample import sample as sample_command
from isomorph.distributed import ALONE, derive_seed
from isomorph.errors import NotFinite
from isomorph.models.task_networks.ddpm_unet import ATTENTION_PROJECTIONS
from isomorph.recipes.diffusion import PYRAMIDS
from isomorph.tasks.diffusion import NoiseSchedule, image_distance, sample
from isomorph.tasks.diffusion.image_distance import (
    Extractor,
    compare_folder,
    image_distances,
    open_extractor,
    open_real_images,
)
from isomorph.tasks.diffusion.sampling import denoise, next_images, spaced_times, write_folder
from isomorph.tasks.diffusion.task import DenoisingLoss, denoising_errors
from isomorph.training.task import task_of
from tiny_runs import same_snapshots, stopped_run

TINY = dict(channels=[8, 16], blocks=1, groups=4, attention=[1], time_steps=10, drop_rate=0.1)
RUN = [
    *("epochs=2", "data.fraction=0.06", "data.test_images=20", "data.batch_size=32", "optim.warmup_epochs=0"),
    *(f"model.kwargs.{name}={json.dumps(value)}" for name, value in TINY.items()),
]


class PixelNoise(nn.Module):
    """A network that knows the answer: the noise of x_t for the image c everywhere."""

    in_chans = 1

    def __init__(self, schedule, image=0.5):
        super().__init__()
        self.schedule, self.time_steps = schedule, schedule.time_steps
        self.image = nn.Parameter(torch.tensor(image))

    def forward(self, x, t):
        signal = self.schedule.signal().to(x)[t][:, None, None, None]
        return (x - signal.sqrt() * self.image) / (1 - signal).sqrt()


class Filter(nn.Module):
    """A network that computes anything, another thing at every time step."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, x, t):
        return self.conv(x) * (1 + t[:, None, None, None])


def wide_recipe(folder):
    recast = ["model.recast.rule=LinearToPyramid", f"model.recast.where={json.dumps(PYRAMIDS['where'])}", "ema=0.5"]
    return iso.load_recipe("ddpm_digits", [*RUN, *recast, f"out={folder}"])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run with pyramids and averaged weights."""
    folder = tmp_path_factory.mktemp("diffusion") / "run"
    return iso.train(wide_recipe(folder), show=False)


class TestLoss:
    def test_it_is_the_sum_over_a_batch_divided_by_1000_whichever_part_is_taken(self):
        net, images = PixelNoise(NoiseSchedule(10)), torch.zeros(6, 1, 4, 4)
        torch.manual_seed(3)
        loss = DenoisingLoss(net, net.schedule, 6, torch.device("cpu"))(images)["loss"]
        torch.manual_seed(3)
        t, noise = torch.randint(10, (6,)), torch.randn(6, 1, 4, 4)
        expected = (net(net.schedule.add_noise(images, noise, t), t) - noise).square().sum() / 1000
        torch.testing.assert_close(loss, expected)
        torch.manual_seed(3)
        half = DenoisingLoss(net, net.schedule, 12, torch.device("cpu"))(images)["loss"]
        torch.testing.assert_close(half, 2 * expected)  # the mean of two such parts is the sum over twelve images

    def test_errors_on_test_images_depend_on_the_image_alone(self):
        net = PixelNoise(NoiseSchedule(10), 0.25)
        images, labels = torch.rand(11, 1, 4, 4), torch.zeros(11, dtype=torch.long)

        def errors(*sizes):
            return denoising_errors(
                net, zip(images.split(sizes), labels.split(sizes), strict=True), net.schedule, ALONE
            )

        torch.testing.assert_close(errors(4, 4, 3), errors(11))
        assert errors(11)[:, 1].sum() == 11
        assert errors(11)[0, 0] > errors(11)[-1, 0] > 0


class TestSampling:
    @pytest.mark.parametrize(("sampler", "steps"), [("ancestral", 30), ("ancestral", 7), ("ddim", 30), ("ddim", 4)])
    def test_a_network_that_knows_the_noise_gives_the_image(self, sampler, steps):
        net = PixelNoise(NoiseSchedule(30, 1e-3, 0.4))
        images = denoise(net, range(3), (1, 4, 4), sampler, net.schedule, steps, seed=0)
        torch.testing.assert_close(images, torch.full((3, 1, 4, 4), 0.5), atol=1e-4, rtol=0)

    @pytest.mark.parametrize(("sampler", "steps"), [("ancestral", 12), ("ancestral", 5), ("ddim", 12)])
    def test_steps_are_those_of_diffusers(self, sampler, steps):
        """DDIM where their steps meet our times: theirs have equal lengths."""
        from diffusers import DDIMScheduler, DDPMScheduler

        schedule, x = NoiseSchedule(12, 0.01, 0.3), torch.randn(2, 1, 4, 4)
        times = spaced_times(12, steps)
        if sampler == "ddim":
            theirs = DDIMScheduler(12, 0.01, 0.3, "linear", clip_sample=False)
            theirs.set_timesteps(steps)
            assert times == theirs.timesteps.tolist()
        else:
            theirs = DDPMScheduler(12, 0.01, 0.3, "linear", variance_type="fixed_large", clip_sample=False)
            theirs.set_timesteps(timesteps=times)
        ours, other = ([torch.Generator().manual_seed(seed) for seed in range(2)] for _ in range(2))
        signal = [*schedule.signal()[torch.tensor(times)].tolist(), 1.0]
        for number, t in enumerate(times):
            noise, t_each = torch.randn(2, 1, 4, 4), torch.tensor([t, t])
            torch.testing.assert_close(schedule.add_noise(x, noise, t_each), theirs.add_noise(x, noise, t_each))
            expected = theirs.step(noise, t, x, generator=other).prev_sample
            found = next_images(x, noise, (signal[number], signal[number + 1]), sampler, ours)
            torch.testing.assert_close(found, expected)
            x = expected
        assert spaced_times(1000, 4) == [999, 666, 333, 0]

    def test_ancestral_steps_are_the_published_ones(self):
        """Mean from the noise, variance beta, no noise in the last step: algorithm 2, written out."""
        torch.manual_seed(0)
        net, schedule = Filter(), NoiseSchedule(6, 0.05, 0.3)
        found = denoise(net, range(1), (1, 4, 4), "ancestral", schedule, 6, seed=5)
        generator = torch.Generator().manual_seed(derive_seed("sample", 5, 0))
        x, betas = torch.randn(1, 4, 4, generator=generator)[None], torch.linspace(0.05, 0.3, 6, dtype=torch.float64)
        for t in reversed(range(6)):
            a = schedule.signal()[t].item()
            x = (x - betas[t].item() / (1 - a) ** 0.5 * net(x, torch.tensor([t]))) / (1 - betas[t].item()) ** 0.5
            if t:
                x = x + betas[t].item() ** 0.5 * torch.randn(1, 1, 4, 4, generator=generator)
        torch.testing.assert_close(found, x.detach(), atol=1e-5, rtol=1e-5)

    def test_images_depend_on_seed_and_number_alone(self, run):
        calls = []
        all_at_once = sample(run.model, 5, "ddim", 3, seed=1, size=(8, 8), progress=lambda *done: calls.append(done))
        assert calls == [(1, 3), (2, 3), (3, 3)]
        assert all_at_once.shape == (5, 3, 8, 8)
        in_batches = sample(run.model, 5, "ddim", 3, seed=1, size=(8, 8), batch_size=2)
        assert (all_at_once.int() - in_batches.int()).abs().max() <= 1
        assert not torch.equal(sample(run.model, 1, "ddim", 3, seed=2, size=(8, 8))[0], all_at_once[0])


class TestRun:
    def test_it_trains_and_its_file_says_what_it_is_for(self, run):
        model = iso.load(run.folder / "model.safetensors")
        assert type(task_of(model)).__name__ == "Diffusion"
        assert model.pretrained_cfg["task"]["beta_end"] == 0.2
        assert 0.5 < run.metrics["denoising"] < 1.1
        assert run.metrics["images"] == 20
        assert iso.evaluate(model, "digits")["images"] == 450

    def test_a_folder_is_tested_on_the_part_left_out(self, tmp_path):
        for i in range(20):
            path = tmp_path / "photos" / f"class {i % 2}" / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((8, 8), 10 * i, np.uint8)).save(path)
        fields = ["data.source=imagefolder", f"data.root={tmp_path / 'photos'}", "data.split=0.3", "epochs=1"]
        fields += ["data.fraction=1", "data.test_images=null", "data.batch_size=4"]
        result = iso.train(iso.load_recipe("ddpm_digits", [*RUN, *fields, f"out={tmp_path / 'run'}"]), show=False)
        tested = iso.evaluate(iso.load(result.folder / "model.safetensors"), tmp_path / "photos")["images"]
        assert tested == result.metrics["images"] < 20

    def test_it_resumes_bit_for_bit(self, tmp_path, run):
        recipe = wide_recipe(tmp_path)
        stopped_run(tmp_path, 3, recipe.model_dump(mode="json"))
        again = iso.train(recipe, show=False)
        assert again.metrics == run.metrics
        same_snapshots(tmp_path, run.folder)


def test_outputs_that_are_not_finite_have_neither_images_nor_metrics(run, tmp_path):
    model = iso.load(run.folder / "model.safetensors")
    with torch.no_grad():
        model.unet.conv_out.bias[0] = float("nan")
    iso.save(model, tmp_path / "nan.safetensors")
    done = isomorph("sample", tmp_path / "nan.safetensors", "--images", 1, "--out", tmp_path / "x.png", "--size", "8")
    assert done.returncode == 1
    assert "unet.conv_out.bias is not finite" in done.stderr
    assert not (tmp_path / "x.png").exists()
    features = torch.full((6, 2), float("inf"))
    for call in (
        lambda: sample(model, 1, "ddim", 2, size=(8, 8)),
        lambda: iso.evaluate(model, "digits"),
        lambda: image_distances(torch.zeros(6, 2), features),
    ):
        with pytest.raises(NotFinite, match="not finite"):
            call()


def write_images(folder, count, seed, size=(8, 8)):
    rng = np.random.default_rng(seed)
    folder.mkdir()
    for i in range(count):
        blocks = rng.integers(0, 256, (2, 2, 3)).repeat(size[0] // 2, 0).repeat(size[1] // 2, 1)
        Image.fromarray(np.clip(blocks + rng.integers(-20, 20, (*size, 3)), 0, 255).astype(np.uint8)).save(
            folder / f"{i:03d}.png"
        )
    return folder


class Colours(nn.Module):
    """A stand-in for Inception: means and deviations of the colours. Shape: (B, 3, H, W) uint8 -> (B, 6)"""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1 / 255))

    def forward(self, x):
        x = x.float() * self.scale
        return torch.cat([x.mean((2, 3)), x.std((2, 3))], 1)


class TestDistance:
    def test_it_is_torch_fidelitys(self, tmp_path):
        from torch_fidelity import calculate_metrics, register_feature_extractor
        from torch_fidelity.feature_extractor_base import FeatureExtractorBase

        class Registered(FeatureExtractorBase):
            def __init__(self, name, features_list, **kwargs):
                super().__init__(name, features_list)
                self.colours = Colours()

            @staticmethod
            def get_provided_features_list():
                return ("colours",)

            @staticmethod
            def get_default_feature_layer_for_metric(metric):
                return "colours"

            @staticmethod
            def can_be_compiled():
                return False

            def forward(self, x):
                return (self.colours(x),)

        register_feature_extractor("colours", Registered)
        one, two = write_images(tmp_path / "one", 30, 0), write_images(tmp_path / "two", 40, 1)
        theirs = calculate_metrics(
            **dict(input1=str(one), input2=str(two), feature_extractor="colours", fid=True, kid=True, prc=True),
            **dict(kid_subset_size=30, cuda=False, verbose=False, cache=False, save_cpu_ram=True, batch_size=16),
        )
        extractor = Extractor("inception", Colours())
        ours = compare_folder(one, open_real_images(str(two), "train"), extractor, batch_size=7)
        assert ours["fid"] == pytest.approx(theirs["frechet_inception_distance"], abs=1e-6)
        assert ours["kid"] == pytest.approx(theirs["kernel_inception_distance_mean"], abs=1e-6)
        assert (ours["precision"], ours["recall"]) == (theirs["precision"], theirs["recall"])
        assert (ours["images"], ours["real_images"]) == (30, 40)

    def test_other_features_are_not_called_fid(self):
        features = torch.randn(20, 3)
        found = image_distances(features, features + 1, "cifar_resnet20")
        assert found["features"] == "cifar_resnet20"
        assert found["frechet_distance"] == pytest.approx(3, abs=1e-4)
        assert not {"fid", "kid"} & found.keys()

    def test_features_of_a_classifier_are_those_before_its_head(self, tmp_path):
        iso.save(timm.create_model("cifar_resnet20"), tmp_path / "net.safetensors")
        extractor = open_extractor(str(tmp_path / "net.safetensors"), None, torch.device("cpu"))
        assert extractor.extract([torch.zeros(2, 3, 32, 32, dtype=torch.uint8)]).shape == (2, 64)

    def test_images_of_several_sizes_and_folders_without_any(self, tmp_path):
        one = write_images(tmp_path / "one", 5, 0)
        Image.new("RGB", (4, 8)).save(one / "999.png")
        extractor = Extractor("other", Colours())
        with pytest.raises(iso.UserError, match=r"999.png is 8 x 4, and .*000.png is 8 x 8; give images of one size"):
            compare_folder(one, open_real_images(str(one), "train"), extractor, 3)
        (tmp_path / "empty").mkdir()
        with pytest.raises(iso.UserError, match="no images in"):
            open_real_images(str(tmp_path / "empty"), "train")


def sampled(**arguments):
    return lambda run, folder: sample(run.model, **{"images": 1, **arguments})


def commanded(out, **arguments):
    return lambda run, folder: sample_command("none.safetensors", out=folder / out, **arguments)


def loaded(override):
    return lambda run, folder: iso.load_recipe("ddpm_digits", [override])


def opened(name):
    return lambda run, folder: open_extractor("inception", name and folder / name, torch.device("cpu"))


BLACK = torch.zeros(1, 3, 4, 4, dtype=torch.uint8)
REFUSED = {
    "no images": (sampled(images=0), "at least 1"),
    "more steps than times": (sampled(steps=11), "2 to 10"),
    "one step": (sampled(steps=1), "2 to 10"),
    "sampler": (sampled(sampler="euler"), "choose ancestral or ddim"),
    "odd size": (sampled(size=(9, 8)), "multiples of 2"),
    "a classifier": (lambda *_: sample(timm.create_model("cifar_resnet20"), 1), "does not predict the noise"),
    "suffix": (commanded("grid.jpg"), "must be a file that ends in .png for a grid, or a folder"),
    "a file": (commanded("old.png"), "exists; give --overwrite"),
    "a folder as a file": (commanded("folder.png"), "must be a file that ends in .png"),
    "other files": (lambda run, folder: write_folder(BLACK, folder), r"holds other files, such as bad\.pth"),
    "mixup": (loaded("augment.mixup=0.2"), "augment.mixup does not apply to diffusion"),
    "betas": (loaded("task.beta_start=0.5"), "beta_start 0.5 must be at most beta_end"),
    "classes": (loaded("model.num_classes=3"), "model.num_classes does not apply"),
    "loss": (loaded("loss=sigmoid"), "loss does not apply"),
    "stream": (loaded("data.source=huggingface-stream"), "is not for diffusion"),
    "no network": (opened(None), "cannot be downloaded; give torch-fidelity's file weights-incep"),
    "no weights": (opened("bad.pth"), "is not a file of weights"),
    "other weights": (opened("other.pth"), "does not have the weights of torch-fidelity's Inception"),
    "few features": (lambda *_: image_distances(torch.zeros(4, 3), torch.ones(20, 3)), "4 images are too few"),
}


def unreachable(*arguments, **options):
    raise URLError("no network")


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_refused(what, run, tmp_path, monkeypatch):
    monkeypatch.setattr("torch_fidelity.feature_extractor_inceptionv3.load_state_dict_from_url", unreachable)
    monkeypatch.setattr(image_distance, "is_reachable", lambda url: True)
    (tmp_path / "bad.pth").write_bytes(b"nothing")
    torch.save({"weight": torch.zeros(1)}, tmp_path / "other.pth")
    (tmp_path / "old.png").write_bytes(b"")
    (tmp_path / "folder.png").mkdir()
    call, message = REFUSED[what]
    with pytest.raises(iso.UserError, match=message):
        call(run, tmp_path)
    assert (tmp_path / "bad.pth").read_bytes() == b"nothing"


def test_published_recipes_have_the_published_network():
    for name, where in (("ddpm_cifar10", None), ("ddpm_cifar10_tdrl", list(ATTENTION_PROJECTIONS))):
        recipe = iso.load_recipe(name)
        assert (recipe.model.recast and recipe.model.recast.where) == where
        assert (recipe.data.batch_size, recipe.epochs, recipe.optim.clip_grad) == (80, 200, 1.0)


class TestCommands:
    def test_a_grid_a_folder_and_their_distance(self, run, tmp_path, capsys):
        sample_command(str(run.folder), out=tmp_path / "grid.png", images=5, seed=3, json_=True)
        assert json.loads(capsys.readouterr().out)["images"] == 5
        with Image.open(tmp_path / "grid.png") as grid:
            assert grid.size == (3 * 10 + 2, 2 * 10 + 2)
        sample_command(str(run.folder), out=tmp_path / "images", images=6, sampler="ddim", steps=2, batch_size=4)
        assert sorted(path.name for path in (tmp_path / "images").iterdir())[5] == "000005.png"
        weights = tmp_path / "net.safetensors"
        iso.save(timm.create_model("cifar_resnet20"), weights)
        shared = dict(data="digits", features=str(weights), max_images=12)
        capsys.readouterr()
        fid(tmp_path / "images", **shared, json_=True)
        found = json.loads(capsys.readouterr().out)
        assert found["features"] == str(weights)
        assert (found["images"], found["real_images"]) == (6, 12)
        fid(tmp_path / "images", **shared)
        assert "Frechet distance" in capsys.readouterr().out
