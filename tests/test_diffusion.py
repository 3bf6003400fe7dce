"""Denoising diffusion: noise schedule, loss, sampling, distances of images, runs that resume, and the commands."""

import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn

import isomorph as iso
from isomorph.cli.sample import fid
from isomorph.cli.sample import sample as sample_command
from isomorph.errors import NotFinite
from isomorph.lab.distributed import ALONE
from isomorph.lab.recipes import RECIPES
from isomorph.lab.tasks.diffusion import NoiseSchedule, sample
from isomorph.lab.tasks.diffusion.image_distance import (
    Extractor,
    compare_folder,
    image_distances,
    open_real_images,
)
from isomorph.lab.tasks.diffusion.sampling import denoise, next_images, spaced_times, write_folder
from isomorph.lab.tasks.diffusion.task import DenoisingLoss, denoising_errors
from isomorph.lab.training.task import task_of
from refusals import refused
from tiny_runs import same_snapshots, stopped_run

TINY = dict(channels=[8, 16], blocks=1, groups=4, attention=[1], time_steps=10, drop_rate=0.1)
RUN = [
    *(
        "epochs=2",
        "data.fraction=0.06",
        "data.test_images=20",
        "data.batch_size=32",
        "optim.warmup_epochs=0",
    ),
    *(f"model.kwargs.{name}={json.dumps(value)}" for name, value in TINY.items()),
]


class PixelNoise(nn.Module):
    """A network that knows the answer: the noise of x_t for the image c everywhere."""

    in_chans = 1

    def __init__(self, schedule, image=0.5):
        super().__init__()
        self.schedule = schedule
        self.time_steps = schedule.time_steps
        self.image = nn.Parameter(torch.tensor(image))

    def forward(self, x, t):
        signal = self.schedule.signal().to(x)[t][:, None, None, None]
        return (x - signal.sqrt() * self.image) / (1 - signal).sqrt()


def wide_recipe(folder):
    pyramids = RECIPES["ddpm_cifar10_tdrl"]["model"]["recast"]
    recast = [
        "model.recast.rule=LinearToPyramid",
        f"model.recast.where={json.dumps(pyramids['where'])}",
        "ema=0.5",
    ]
    return iso.load_recipe("ddpm_digits", [*RUN, *recast, f"out={folder}"])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run with pyramids and averaged weights."""
    folder = tmp_path_factory.mktemp("diffusion") / "run"
    return iso.train(wide_recipe(folder), show=False)


class TestLoss:
    def test_it_is_the_sum_over_a_batch_divided_by_1000_whichever_part_is_taken(self):
        net = PixelNoise(NoiseSchedule(10))
        images = torch.zeros(6, 1, 4, 4)
        torch.manual_seed(3)
        loss = DenoisingLoss(net, net.schedule, 1, torch.device("cpu"))(images)["loss"]
        torch.manual_seed(3)
        t = torch.randint(10, (6,))
        noise = torch.randn(6, 1, 4, 4)
        expected = (net(net.schedule.add_noise(images, noise, t), t) - noise).square().sum() / 1000
        torch.testing.assert_close(loss, expected)
        torch.manual_seed(3)
        half = DenoisingLoss(net, net.schedule, 2, torch.device("cpu"))(images)["loss"]
        # the mean of two such parts is the sum over twelve images
        torch.testing.assert_close(half, 2 * expected)

    def test_errors_on_test_images_depend_on_the_image_alone(self):
        net = PixelNoise(NoiseSchedule(10), 0.25)
        images = torch.rand(11, 1, 4, 4)
        labels = torch.zeros(11, dtype=torch.long)

        def errors(*sizes):
            return denoising_errors(
                net, zip(images.split(sizes), labels.split(sizes), strict=True), net.schedule, ALONE
            )

        torch.testing.assert_close(errors(4, 4, 3), errors(11))
        assert errors(11)[:, 1].sum() == 11
        assert errors(11)[0, 0] > errors(11)[-1, 0] > 0


class TestSampling:
    @pytest.mark.parametrize(
        ("sampler", "steps"), [("ancestral", 30), ("ancestral", 7), ("ddim", 30), ("ddim", 4)]
    )
    def test_a_network_that_knows_the_noise_gives_the_image(self, sampler, steps):
        net = PixelNoise(NoiseSchedule(30, 1e-3, 0.4))
        images = denoise(net, range(3), (1, 4, 4), sampler, net.schedule, steps, seed=0)
        torch.testing.assert_close(images, torch.full((3, 1, 4, 4), 0.5), atol=1e-4, rtol=0)

    @pytest.mark.parametrize(
        ("sampler", "steps"), [("ancestral", 12), ("ancestral", 5), ("ddim", 12)]
    )
    def test_steps_are_those_of_diffusers(self, sampler, steps):
        """DDIM where their steps meet our times: theirs have equal lengths."""
        from diffusers import DDIMScheduler, DDPMScheduler

        schedule = NoiseSchedule(12, 0.01, 0.3)
        x = torch.randn(2, 1, 4, 4)
        times = spaced_times(12, steps)
        if sampler == "ddim":
            theirs = DDIMScheduler(12, 0.01, 0.3, "linear", clip_sample=False)
            theirs.set_timesteps(steps)
            assert times == theirs.timesteps.tolist()
        else:
            theirs = DDPMScheduler(
                12, 0.01, 0.3, "linear", variance_type="fixed_large", clip_sample=False
            )
            theirs.set_timesteps(timesteps=times)
        ours, other = ([torch.Generator().manual_seed(seed) for seed in range(2)] for _ in range(2))
        signal = [*schedule.signal()[torch.tensor(times)].tolist(), 1.0]
        for number, t in enumerate(times):
            noise = torch.randn(2, 1, 4, 4)
            t_each = torch.tensor([t, t])
            torch.testing.assert_close(
                schedule.add_noise(x, noise, t_each), theirs.add_noise(x, noise, t_each)
            )
            expected = theirs.step(noise, t, x, generator=other).prev_sample
            found = next_images(x, noise, (signal[number], signal[number + 1]), sampler, ours)
            torch.testing.assert_close(found, expected)
            x = expected
        assert spaced_times(1000, 4) == [999, 666, 333, 0]

    def test_images_depend_on_seed_and_number_alone(self, run):
        calls = []
        all_at_once = sample(
            run.model, 5, "ddim", 3, seed=1, size=(8, 8), progress=lambda *done: calls.append(done)
        )
        assert calls == [(1, 3), (2, 3), (3, 3)]
        assert all_at_once.shape == (5, 3, 8, 8)
        in_batches = sample(run.model, 5, "ddim", 3, seed=1, size=(8, 8), batch_size=2)
        assert (all_at_once.int() - in_batches.int()).abs().max() <= 1
        assert not torch.equal(
            sample(run.model, 1, "ddim", 3, seed=2, size=(8, 8))[0], all_at_once[0]
        )


class TestRun:
    def test_it_trains_and_its_file_says_what_it_is_for(self, run):
        model = iso.load(run.folder / "model.safetensors")
        assert type(task_of(model)).__name__ == "Diffusion"
        assert model.pretrained_cfg["task"]["beta_end"] == 0.2
        assert 0.5 < run.metrics["denoising"] < 1.1
        assert run.metrics["images"] == 20
        assert iso.evaluate(model, "digits")["images"] == 450

    def test_it_resumes_bit_for_bit(self, tmp_path, run):
        recipe = wide_recipe(tmp_path)
        stopped_run(tmp_path, 3, recipe.model_dump(mode="json"))
        again = iso.train(recipe, show=False)
        assert again.metrics == run.metrics
        same_snapshots(tmp_path, run.folder)


def test_outputs_that_are_not_finite_have_neither_images_nor_metrics(run):
    model = iso.load(run.folder / "model.safetensors")
    with torch.no_grad():
        model.unet.conv_out.bias[0] = float("nan")
    with pytest.raises(NotFinite, match="not finite"):
        sample(model, 1, "ddim", 2, size=(8, 8))
    with pytest.raises(NotFinite, match="not finite"):
        iso.evaluate(model, "digits")


def write_images(folder, count, seed, size=(8, 8)):
    rng = np.random.default_rng(seed)
    folder.mkdir()
    for i in range(count):
        blocks = rng.integers(0, 256, (2, 2, 3)).repeat(size[0] // 2, 0).repeat(size[1] // 2, 1)
        noisy = blocks + rng.integers(-20, 20, (*size, 3))
        pixels = np.clip(noisy, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{i:03d}.png")
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
        one = write_images(tmp_path / "one", 30, 0)
        two = write_images(tmp_path / "two", 40, 1)
        theirs = calculate_metrics(
            **dict(
                input1=str(one),
                input2=str(two),
                feature_extractor="colours",
                fid=True,
                kid=True,
                prc=True,
            ),
            **dict(
                kid_subset_size=30,
                cuda=False,
                verbose=False,
                cache=False,
                save_cpu_ram=True,
                batch_size=16,
            ),
        )
        extractor = Extractor("inception", Colours())
        ours = compare_folder(one, open_real_images(str(two), "train"), extractor, batch_size=7)
        assert ours["fid"] == pytest.approx(theirs["frechet_inception_distance"], abs=1e-6)
        assert ours["kid"] == pytest.approx(theirs["kernel_inception_distance_mean"], abs=1e-6)
        assert ours["precision"] == theirs["precision"]
        assert ours["recall"] == theirs["recall"]
        assert ours["images"] == 30
        assert ours["real_images"] == 40

    def test_other_features_are_not_called_fid(self):
        features = torch.randn(20, 3)
        found = image_distances(features, features + 1, "cifar_resnet20")
        assert found["features"] == "cifar_resnet20"
        assert found["frechet_distance"] == pytest.approx(3, abs=1e-4)
        assert not {"fid", "kid"} & found.keys()


REFUSED = {
    "more steps than times": (lambda run: sample(run.model, 1, steps=11), "2 to 10"),
    "odd size": (lambda run: sample(run.model, 1, size=(9, 8)), "multiples of 2"),
    "a classifier": (
        lambda run: sample(timm.create_model("cifar_resnet20"), 1),
        "does not predict the noise",
    ),
    "few features": (
        lambda run: image_distances(torch.zeros(4, 3), torch.ones(20, 3)),
        "4 images are too few",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_refused(what, run):
    call, message = REFUSED[what]
    with pytest.raises(iso.UserError, match=message):
        call(run)


def test_a_grid_a_folder_and_their_distance(run, tmp_path, capsys):
    sample_command(str(run.folder), out=tmp_path / "grid.png", images=5, seed=3, json_=True)
    assert json.loads(capsys.readouterr().out)["images"] == 5
    with Image.open(tmp_path / "grid.png") as grid:
        assert grid.size == (3 * 10 + 2, 2 * 10 + 2)
    sample_command(
        str(run.folder), out=tmp_path / "images", images=6, sampler="ddim", steps=2, batch_size=4
    )
    assert sorted(path.name for path in (tmp_path / "images").iterdir())[5] == "000005.png"
    weights = tmp_path / "net.safetensors"
    iso.save(timm.create_model("cifar_resnet20"), weights)
    shared = dict(data="digits", features=str(weights), max_images=12)
    capsys.readouterr()
    fid(tmp_path / "images", **shared, json_=True)
    found = json.loads(capsys.readouterr().out)
    assert found["features"] == str(weights)
    assert found["images"] == 6
    assert found["real_images"] == 12


def test_crops_of_test_images_are_refused():
    given = ["data.test_crop=whole"]
    refused("data.test_crop does not apply to diffusion", iso.load_recipe, "ddpm_digits", given)


def test_a_link_and_the_working_folder_are_replaced(tmp_path, monkeypatch):
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    images = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    write_folder(images, tmp_path / "link")
    assert len(list(real.iterdir())) == 2
    monkeypatch.chdir(real)
    write_folder(images[:1], Path())
    assert len(list(real.iterdir())) == 1


def test_a_folder_without_splits_has_neither_a_root_nor_test_images(tmp_path):
    folder = str(write_images(tmp_path / "one", 6, 0))
    refused("leave the root", open_real_images, folder, "train", tmp_path)
    refused("leave `test` out", open_real_images, folder, "test")
