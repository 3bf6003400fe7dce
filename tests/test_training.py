"""Recipes, the loop and its checkpoints: what a user trusts a run with."""

import copy
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import timm
import torch
from timm.data import resolve_data_config
from torch import nn

import isomorph as iso
from isomorph.lab.distributed import Runtime
from isomorph.lab.training.objectives.distillation import build_distillation
from isomorph.lab.training.optim import (
    build_optimizer,
    build_scheduler,
    describe_groups,
    learning_rate_scales,
    scaled_groups,
)
from isomorph.lab.training.recipe.fields import DistillPart, OptimPart
from isomorph.lab.training.run import loop
from isomorph.lab.training.run.log import read_log
from isomorph.lab.training.run.loop import train_epoch, train_step
from isomorph.lab.training.run.snapshot import newest_snapshot, read_layout
from isomorph.lab.training.run.state import Run
from refusals import refused
from small_images import digit_images, write_parquet
from tiny_runs import TINY, same_snapshots, stopped_run, tiny


class TestOptim:
    def groups(self, **rates):
        model = iso.recast(timm.create_model("cifar_resnet20"), iso.ConvToGPSA(), "layer3.*")
        model.conv1.requires_grad_(False)
        groups = {
            group["name"]: group
            for group in scaled_groups(model, OptimPart(lr=1e-3, gate_lr=0.1, **rates))
        }
        names = {id(p): n for n, p in model.named_parameters()}
        return (
            model,
            groups,
            {key: {names[id(p)] for p in group["params"]} for key, group in groups.items()},
        )

    def test_every_trained_parameter_is_in_one_group_and_weights_decay(self):
        model, groups, names = self.groups()
        listed = []
        for group in groups.values():
            for p in group["params"]:
                listed.append(id(p))
        assert len(listed) == len(set(listed))
        assert set.union(*names.values()) == {
            n for n, p in model.named_parameters() if p.requires_grad
        }
        assert {n.rpartition(".")[2] for n in names["decayed"]} == {"weight"}
        for n in names["decayed"]:
            assert "bn" not in n
        assert {n.rpartition(".")[2] for n in names["gates"]} == {"gate"}
        assert {n.rpartition(".")[2] for n in names["positions"]} == {"centre", "raw_locality"}
        assert {n: group["weight_decay"] for n, group in groups.items()} == dict.fromkeys(
            groups, 0
        ) | {"decayed": 0.05}
        vit = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=32)
        vit = iso.recast(vit, iso.AttentionToRelative(), "blocks.*.attn")
        decayed, exempt = (group["params"] for group in scaled_groups(vit, OptimPart(lr=1e-3)))
        assert {id(vit.pos_embed), id(vit.cls_token), id(vit.blocks[0].attn.relative_bias)} <= set(
            map(id, exempt)
        )
        for parameter in decayed:
            assert parameter.ndim > 1

    def test_no_scheduler_and_no_optimiser_loses_a_group(self):
        """Every group keeps its share of the rate through the whole schedule, whatever moves the weights."""
        model, _, _ = self.groups()
        for name in ("adamw", "sgd", "lamb", "lion", "adafactor", "muon", "nadamw", "rmsproptf"):
            for schedule in ("cosine", "linear", "constant"):
                optim = OptimPart(
                    name=name,
                    lr=1e-3,
                    gate_lr=0.1,
                    position_lr=5e-3,
                    warmup_epochs=1,
                    schedule=schedule,
                )
                optimizer = build_optimizer(model, optim)
                scheduler = build_scheduler(optimizer, optim, epochs=4, steps_per_epoch=5)
                names = [group["name"] for group in optimizer.param_groups]
                assert names == ["decayed", "undecayed", "gates", "positions"]
                for step in range(20):
                    scheduler.step_update(step)
                    rates = [group["lr"] for group in optimizer.param_groups]
                    assert [rate / rates[0] for rate in rates] == pytest.approx([1, 1, 100, 5])
                decays = [group["weight_decay"] for group in optimizer.param_groups]
                assert decays[0] > 0
                assert decays[1:] == [0, 0, 0]

    @pytest.mark.parametrize(
        ("name", "fields", "gates", "positions"),
        [
            ("tcnn_resnetrs50", ["optim.gate_lr=10x", "optim.position_lr=20x"], 1e-3, 2e-3),
            ("tcnn_resnetrs50_lr_3e-4", [], 0.3, 3e-4),
            ("cifar_exact", ["optim.lr=2e-3"], 0.2, 0.04),
        ],
    )
    def test_rates_of_gates_and_positions_follow_lr(self, name, fields, gates, positions):
        optim = iso.load_recipe(name, fields).optim
        assert (optim.gate_lr, optim.position_lr) == pytest.approx((gates, positions))
        model = iso.recast(timm.create_model("cifar_resnet20"), iso.ConvToGPSA(), "layer3.0.*")
        scales = {group["name"]: group["lr_scale"] for group in scaled_groups(model, optim)}
        assert scales["gates"] * optim.lr == pytest.approx(gates)
        assert scales["positions"] * optim.lr == pytest.approx(positions)

    def test_layer_decay_follows_the_layer_and_not_the_form(self):
        """A recast layer has the rate of the layer that it was, in every part; frozen layers count."""
        vit = timm.create_model(
            "deit_tiny_patch16_224", depth=4, embed_dim=48, num_heads=3, img_size=32
        )
        plain = learning_rate_scales(vit, 0.5)
        wide = iso.recast(
            vit, iso.LinearToPyramid("P-W2S"), where=["blocks.*.attn.qkv", "blocks.*.mlp.fc?"]
        )
        gated = iso.recast(vit, iso.AttentionToGPSA(), where="blocks.[01].attn")
        names = [
            "head.weight",
            *(f"blocks.{i}.norm1.weight" for i in (3, 2, 1, 0)),
            "patch_embed.proj.weight",
        ]
        assert [plain[name] for name in names] == [1, 0.5, 0.25, 0.125, 0.0625, 0.03125]
        for model in (wide, gated):
            model.blocks[0].requires_grad_(False)
            for name, scale in learning_rate_scales(model, 0.5).items():
                block = name.split(".")[1] if name.startswith("blocks.") else None
                known = plain[f"blocks.{block}.norm1.weight"] if block else plain[name]
                assert scale == known, name
            for group in scaled_groups(model, OptimPart(lr=1e-3, gate_lr=0.1, layer_decay=0.5)):
                scale = float(group["name"].partition(" x")[2] or 1)
                own = 100 if group["name"].startswith("gates") else 1
                assert group["lr_scale"] == pytest.approx(scale * own, rel=1e-2)


FEW_BLOCKS = dict(name="cifar_resnet20", kwargs=dict(depth=8))
"""A ResNet of three blocks."""


class TestRun:
    def test_leaves_what_it_says(self, ended):
        folder, result = ended
        assert {path.name for path in folder.iterdir()} == {
            *(
                "model.safetensors",
                "best.safetensors",
                "epoch-2.safetensors",
                "recipe.json",
                "environment.jsonl",
            ),
            *("log.jsonl", "steps.jsonl", "step-00000004", "step-00000006", "tensorboard"),
        }
        rows = read_log(folder / "log.jsonl")
        assert [row["epoch"] for row in rows] == [0, 1, 2, 3]
        assert [row["epoch"] for row in rows if "top1" in row] == [0, 2, 3]
        assert rows[-1]["top1"] == result.metrics["top1"]
        assert iso.load(folder / "epoch-2.safetensors").training is False
        x = torch.randn(2, 3, 16, 16)
        rebuilt = iso.load(folder / "model.safetensors")
        assert torch.equal(rebuilt(x), result.model(x))
        assert iso.edits(rebuilt)[0].names == ("layer3.2.conv2",)

    def test_the_monitor_reads_images_as_they_are_with_mixup_too(self, tmp_path):
        images = []
        for name, alpha in (("plain", 0.0), ("mixed", 0.8)):
            augment = dict(crop_padding=2, hflip=0, mixup=alpha)
            images.append(train_step(Run(tiny(tmp_path / name, augment=augment)))[1])
        assert torch.equal(*images)

    @pytest.mark.parametrize(
        ("old", "new", "classifies", "said"),
        [
            ({"accuracy": 52.71, "examples": 277}, {"accuracy": 52.35}, False, ""),
            ({"accuracy": 72.71, "examples": 277}, {"accuracy": 52.35}, False, "or lower optim.lr"),
            ({"top1": 72.0, "images": 277}, {"top1": 52.0}, True, "augment.hflip"),
            ({"miou": 40.0}, {"miou": 20.0}, False, "or lower optim.lr"),
        ],
    )
    def test_a_run_that_ends_worse_gets_fitting_advice(self, old, new, classifies, said, tmp_path):
        (tmp_path / "log.jsonl").write_text(json.dumps({"epoch": 0} | old) + "\n")
        lines = []
        key = next(iter(new))
        run = SimpleNamespace(
            recipe=SimpleNamespace(folder=tmp_path),
            progress=SimpleNamespace(metrics=new),
            objective=SimpleNamespace(score=lambda metrics: metrics[key]),
            task=SimpleNamespace(classifies=classifies, printed={key: ".2f"}),
        )
        loop._say_if_worse(run, SimpleNamespace(say=lines.append))
        assert bool(lines) == bool(said)
        assert said in "".join(lines)
        assert classifies or "augment" not in "".join(lines)

    def test_each_step_has_its_rate_and_its_draws_and_averages_follow_it(
        self, tmp_path, monkeypatch
    ):
        """In a run of three steps: an epoch of two, and half of one, whose loss is the mean of its own steps."""
        optim = dict(lr=1e-3, gate_lr=0.1, schedule="linear", schedule_from="start")
        parts = dict(accumulate=2)
        run = Run(tiny(tmp_path, ema=0.5, optim=optim, scale=parts, iterations=3))
        draws = []
        backward = loop._train_part

        def draw(*args):
            draws.append(torch.rand(()).item())
            backward(*args)

        monkeypatch.setattr(loop, "_train_part", draw)
        for step in range(3):
            before = copy.deepcopy(run.averaged.conv1.weight.detach())
            train_step(run)
            assert run.optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 * (1 - step / 3))
            kept = 0.5 * (step > 0)  # timm's average begins with the weights after the first step
            wanted = before.lerp(run.trained.conv1.weight, 1 - kept)
            torch.testing.assert_close(run.averaged.conv1.weight, wanted, rtol=0, atol=1e-9)
            run.progress.step += 1
        assert len(set(draws)) == 6
        run.progress.step = 2
        run.progress.closed = 1
        run.total.zero_()
        assert train_epoch(run) == pytest.approx(run.total[0].item())

    def test_the_log_follows_attention_from_the_start(self, ended):
        """Gates, spans and centres of every head before training and after each epoch, in few bytes."""
        folder, result = ended
        lines = (folder / "log.jsonl").read_text().splitlines()
        for line in lines:
            assert len(line) < 1000
        rows = read_log(folder / "log.jsonl")
        layer = "layer3.2.conv2"
        assert rows[0]["epoch"] == 0
        assert rows[0]["loss"] is None
        assert rows[0]["gating"][layer]["gates"] == [0.998] * 9  # sigmoid(6)
        assert rows[0]["gating"][layer]["spans"] == [0.2] * 9
        for row in rows[1:]:
            assert 0 < row["train_top1"] < 100
        measured = iso.gates(result.model), iso.analysis.attention_spans(result.model)
        for found, values in zip(
            (rows[-1]["gating"][layer][key] for key in ("gates", "spans")), measured, strict=True
        ):
            assert found == pytest.approx(values[layer].tolist(), abs=6e-3)
        history = iso.training.gating_history(folder)
        assert history.epochs.tolist() == [0, 1, 2, 3]
        assert history.centres[layer].shape == (4, 9, 2)

    def test_tensorboard_has_the_curves(self, ended):
        from tensorboard.backend.event_processing import event_accumulator

        board = event_accumulator.EventAccumulator(str(ended[0] / "tensorboard")).Reload()
        assert {"train/loss", "train/lr", "epoch/top1"} <= set(board.Tags()["scalars"])
        assert [event.step for event in board.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]

    @pytest.mark.parametrize(
        "changes",
        [
            dict(
                augment=dict(
                    mixup=0.8,
                    cutmix=1.0,
                    smoothing=0.1,
                    auto_augment="rand-m9-mstd0.5-inc1",
                    erasing=0.25,
                )
            ),
            dict(
                anneal=dict(epochs=1),
                ema=0.99,
                optim=dict(lr=1e-3, gate_lr=0.1, clip_grad=1.0, schedule="constant"),
            ),
            dict(
                optim=dict(name="sgd", lr=0.1, gate_lr=0.1, momentum=0.0),
                augment=dict(scale=[0.5, 1.0], repeats=3),
            ),
        ],
        ids=["mixing", "annealing", "sgd, repeats"],
    )
    def test_options_run(self, tmp_path, changes):
        result = iso.train(tiny(tmp_path, epochs=1, **changes), show=False)
        assert result.metrics["nll"] > 0
        if "anneal" in changes:  # averaged weights too are where the schedule ends
            assert set(result.model.layer3[2].conv2.locality.tolist()) == {1.0}

    def test_a_stream_is_trained_on_and_taken_up(self, tmp_path, caches):
        """Parquet read in passing: stopped within an epoch, the run goes on with the images it had not seen."""
        images, labels = digit_images(300)
        for split, start, stop in (("train", 0, 100), ("train", 100, 240), ("test", 240, 300)):
            path = tmp_path / f"data/{split}-{start:05d}.parquet"
            write_parquet(images[start:stop], labels[start:stop], path)
        data = dict(
            source="huggingface-stream",
            root=str(tmp_path / "data"),
            size=[16, 16],
            batch_size=40,
            workers=2,
        )
        scale = dict(accumulate=2)
        values = dict(model=FEW_BLOCKS, data=data, log_every=1, scale=scale, epochs=1)
        iso.train(tiny(tmp_path / "whole", **values), show=False)
        stopped_run(tmp_path / "part", 4, {**TINY, **values})
        iso.train(tiny(tmp_path / "part", **values), show=False)
        same_snapshots(tmp_path / "whole", tmp_path / "part")

    def test_fine_tuning_names_the_score_before_and_says_if_it_gets_worse(self, tmp_path, capsys):
        """At a rate of .05 trained weights are lost; small digits are padded; what a killed run left does no harm."""
        first = iso.train(
            tiny(tmp_path / "first", model=dict(name="cifar_resnet20"), epochs=12), show=False
        )
        new = iso.insert(first.model, iso.layers.MapAttention, after="layer3.2")
        iso.save(new, weights := tmp_path / "new.safetensors")
        (tmp_path / "run").mkdir()
        (tmp_path / "run/.log.jsonl.1.partial").touch()
        (tmp_path / "run/.step-00000001.partial").mkdir()  # of a snapshot, which was being written
        data = [f"data.{key}={value}" for key, value in TINY["data"].items()]
        given = [
            f"model.weights={weights}",
            *data,
            "optim.lr=0.05",
            "epochs=1",
            f"out={tmp_path / 'run'}",
        ]
        iso.train(iso.load_recipe("finetune", given))
        before, after = read_log(tmp_path / "run/log.jsonl")
        said = capsys.readouterr().out
        assert before["epoch"] == 0
        assert before["loss"] is None
        assert before["gamma"] == {"layer3.2": 0.0}
        assert before["top1"] == pytest.approx(first.metrics["top1"])
        assert before["top1"] > after["top1"]
        assert f"before training  top1 {before['top1']:.2f}" in said
        assert f"worse than before training (top1 {before['top1']:.2f})" in said
        assert f"gamma up to {after['gamma']['layer3.2']:.2g}" in said
        assert "random crops of images padded by 2 px" in said
        assert not list((tmp_path / "run").glob(".*"))

    def test_frozen_parameters_stay(self, tmp_path):
        model = dict(
            name="convit_ti",
            kwargs=dict(embed_dim=16, num_heads=4, depth=2, local_up_to_layer=1, patch_size=8),
        )
        globs = ["blocks.0.attn.*", "patch_embed.*"]
        run = Run(tiny(tmp_path, model=model | dict(freeze=globs)))
        before = {name: p.clone() for name, p in run.eval_model.named_parameters()}
        train_epoch(run)
        moved = {
            name
            for name, p in run.eval_model.named_parameters()
            if not torch.equal(p, before[name])
        }
        for name in moved:
            assert not name.startswith(("blocks.0.attn.", "patch_embed."))
        frozen = [p.numel() for p in run.trained.parameters() if not p.requires_grad]
        said = f"  frozen: {len(frozen)} tensors, {sum(frozen):,} parameters"
        assert describe_groups(run.trained, run.optimizer, run.recipe.optim)[-1] == said
        assert {"blocks.0.mlp.fc1.weight", "blocks.1.attn.qkv.weight", "pos_embed"} <= moved

    @pytest.mark.parametrize("kind", ["hard", "soft"])
    def test_distillation(self, kind, tmp_path):
        """The loss is DeiT's, the teacher is frozen, normalised as it was trained, and not in the snapshots."""
        teacher = timm.create_model("cifar_resnet20")
        teacher.pretrained_cfg = {
            **teacher.pretrained_cfg,
            "mean": (0.1, 0.2, 0.3),
            "std": (0.5, 0.6, 0.7),
        }
        iso.save(teacher, tmp_path / "teacher.safetensors")
        distill = dict(
            teacher=str(tmp_path / "teacher.safetensors"), kind=kind, share=0.3, temperature=2.0
        )
        recipe = tiny(tmp_path / "run", distill=distill, ema=0.9)
        run = Run(recipe)
        run.loss_module.train()
        student = run.eval_model.train()
        loaded = iso.load(tmp_path / "teacher.safetensors")
        assert not run.loss_module.teacher.model.training
        assert not any(p.requires_grad for p in run.loss_module.teacher.parameters())
        x = torch.randn(8, 3, 16, 16)
        y = torch.randint(10, (8,))
        mean = torch.tensor(run.loss_module.trainable_module.pretrained_cfg["mean"])[:, None, None]
        std = torch.tensor(run.loss_module.trainable_module.pretrained_cfg["std"])[:, None, None]
        t_mean = torch.tensor((0.1, 0.2, 0.3))[:, None, None]
        t_std = torch.tensor((0.5, 0.6, 0.7))[:, None, None]
        seen = loaded((x * std + mean - t_mean) / t_std)
        result = run.loss_module(x, y)
        labels = nn.functional.cross_entropy(result["output"], y)
        if kind == "hard":
            second = nn.functional.cross_entropy(result["output"], seen.argmax(1))
        else:
            p = (seen / 2).softmax(1)
            q = (result["output"] / 2).log_softmax(1)
            second = 4 * (p * (p.log() - q)).sum(1).mean()
        torch.testing.assert_close(result["loss"], 0.7 * labels + 0.3 * second)
        assert student.training
        iso.train(recipe, show=False)
        for name in read_layout(newest_snapshot(tmp_path / "run").path):
            assert "teacher" not in name
        with pytest.raises(iso.UserError, match="has 10 classes, the model has 12"):
            Run(tiny(tmp_path, distill=distill, model=TINY["model"] | dict(num_classes=12)))

    @pytest.mark.parametrize("kind", ["hard", "soft"])
    def test_a_student_of_one_s_own_learns_from_a_teacher(self, kind, tmp_path):
        """It has neither timm's attributes nor a plain tensor as its output."""
        student = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 10))
        student.register_forward_hook(lambda model, inputs, output: {"logits": output})
        student.pretrained_cfg = dict(
            input_size=(3, 8, 8), mean=(0.5, 0.5, 0.5), std=(1.0, 1.0, 1.0)
        )
        # by its name alone its weights would be downloaded
        teacher = tmp_path / "teacher.safetensors"
        iso.save(timm.create_model("cifar_resnet20"), teacher)
        part = DistillPart(teacher=str(teacher), kind=kind)
        loss = build_distillation(student, part, nn.CrossEntropyLoss(), torch.device("cpu"))
        loss(torch.randn(4, 3, 8, 8), torch.arange(4))["loss"].backward()
        assert student[1].weight.grad.abs().min() > 0


@pytest.mark.parametrize(("seconds", "asked"), [(0.2, [1, 10]), (4, [*range(1, 12)])])
def test_processes_agree_on_stopping_within_seconds(seconds, asked, tmp_path, monkeypatch):
    """Every ten steps, and where steps are slow after each: torchrun kills 30 s after SIGTERM."""
    run = Run(tiny(tmp_path, log_every=50, epochs=20))
    times = []
    run.runtime = replace(run.runtime, world=2)
    run.order = SimpleNamespace(steps=50, batch=1)
    monkeypatch.setattr(loop.time, "perf_counter", lambda: seconds * run.progress.step)
    for name in ("_finite_total", "_check_unreadable"):
        monkeypatch.setattr(loop, name, lambda run: 0)
    monkeypatch.setattr(
        Runtime, "maximum", lambda self, *values: times.append(run.progress.step) or list(values)
    )
    monitor = loop.StepMonitor(run, None, SimpleNamespace(number=0))
    for run.progress.step in range(1, 12):
        monitor.after_step(0.0, None)
    assert times == asked


class TestCheckpoint:
    def test_the_images_a_model_expects_travel_with_it(self, tmp_path):
        model = timm.create_model("resnet18.tv_in1k")
        iso.save(model, tmp_path / "m.safetensors")
        for test in (False, True):
            config = resolve_data_config(
                model=iso.load(tmp_path / "m.safetensors"), use_test_size=test
            )
            assert config["crop_pct"] == 0.875
            assert config["interpolation"] == "bilinear"
        # tested on other images than trained on
        iso.save(timm.create_model("resnet50d"), tmp_path / "m.safetensors")
        config = resolve_data_config(model=iso.load(tmp_path / "m.safetensors"), use_test_size=True)
        assert config["input_size"] == (3, 288, 288)
        assert config["crop_pct"] == 0.95

    def test_plain_arguments_are_found_and_others_must_be_given(self, tmp_path):
        pooled = timm.create_model("resnet18", global_pool="max").eval()
        iso.save(pooled, tmp_path / "pooled.safetensors")
        x = torch.randn(1, 3, 64, 64)
        assert torch.equal(iso.load(tmp_path / "pooled.safetensors")(x), pooled(x))
        model = timm.create_model("resnet18", act_layer=nn.SiLU).eval()
        refused("give save\\(\\) base=", iso.save, model, tmp_path / "m.safetensors")
        assert not (tmp_path / "m.safetensors").exists()
        iso.save(model, tmp_path / "m.safetensors", base=dict(name="resnet18", act_layer="silu"))
        iso.save(iso.load(tmp_path / "m.safetensors"), tmp_path / "again.safetensors")
        assert torch.equal(iso.load(tmp_path / "again.safetensors")(x), model(x))


def test_a_compiled_model_has_the_same_groups():
    vit = timm.create_model(
        "vit_tiny_patch16_224", img_size=16, patch_size=4, embed_dim=24, depth=2, num_heads=4
    )
    rates = [
        [
            (group["name"], group["lr"])
            for group in iso.training.parameter_groups(model, lr=lr, layer_decay=0.5)
        ]
        for model, lr in ((vit, 1e-3), (torch.compile(vit), 1e-3), (vit, "1e-3"))
    ]
    assert len(set(rates[0])) > 4
    assert rates[0] == rates[1] == rates[2]


def test_a_batch_of_another_size_is_another_run(tmp_path):
    few = dict(TINY["data"], fraction=0.02, batch_size=128)
    stopped_run(tmp_path, 1, dict(TINY, data=few))
    again = tiny(tmp_path, data=few, scale=dict(accumulate=4))
    refused("other data .batch was .*, is now ", iso.train, again, show=False)


def test_a_task_with_its_own_objective_takes_no_field_of_another():
    class Own(iso.training.Classification):
        def objective(self, recipe, model, device):
            return None

    class Plain(iso.training.Classification):
        pass

    assert {"loss", "distill", "augment.mixup", "mask"} <= set(Own.unused)
    assert Plain.unused == ()
