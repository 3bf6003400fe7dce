"""Cost against counting by hand: MACs are in test_evaluation; here memory, speed, sweeps and the command."""

import pytest
import timm
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import isomorph as iso
import references
from command_line import isomorph
from isomorph.analysis.cost import (
    count_branches,
    count_macs,
    count_once,
    count_pass,
    peak_bytes,
    pyramid_cost,
    saved_bytes,
)
from isomorph.analysis.speed import measure_speeds
from refusals import refused


def small_vit(**kwargs):
    return timm.create_model(
        "vit_tiny_patch16_224", depth=2, embed_dim=24, num_heads=3, img_size=32, **kwargs
    )


class TestMacs:
    """An image is charged with what grows with the batch, a step with the rest."""

    def test_the_row_of_tdrls_table_8(self):
        """9.72 and 1.26 GFLOPs there; its counter adds the norms (a LayerNorm 5, a BatchNorm 1 a number).

        Its 12 blocks are alike: what the second one costs is added 10 times to the cost of two.
        """

        def cost(depth):
            with torch.device("meta"):
                pyramids = timm.create_model("tdrl_vit_ti", depth=depth)
            macs = count_pass(pyramids, (3, 224, 224))
            norms = 197 * sum(
                m.num_features for m in pyramids.modules() if isinstance(m, nn.BatchNorm1d)
            )
            row = {
                "macs": macs.per_image,
                "step_macs": macs.per_pass,
                **pyramid_cost(pyramids, (3, 224, 224)),
            }
            return {**row, "batch_norms": norms}

        one = cost(1)
        two = cost(2)
        row = {name: two[name] + 10 * (two[name] - one[name]) for name in one}
        with torch.device("meta"):
            plain = timm.create_model("vit_tiny_patch16_224", num_heads=12)
        layer_norms = 25 * 197 * 192 * 5
        batch_norms = row.pop("batch_norms")
        assert row["macs"] == count_macs(plain, (3, 224, 224)) == 1_253_683_200
        assert row["branch_macs"] == 9_706_893_312
        assert f"{(row['macs'] + layer_norms) / 1e9:.2f}" == "1.26"
        assert f"{(row['branch_macs'] + layer_norms + batch_norms) / 1e9:.2f}" == "9.72"
        assert row["step_macs"] == 10_981_785_600
        assert row["training_macs"] == 2_168_721_408

    def test_a_pyramid_by_hand(self):
        # tokens, features in and out; P-W2S: branches of one and of two units, and a skip
        M = 5
        C = 8
        D = 12
        layer = iso.layers.PyramidLinear(C, D)
        first = C * C + C * D
        second = C * C + C * D + D * D
        assert count_branches(layer, (M, C)) == M * (first + second + C * D)
        assert count_pass(layer, (M, C)).per_image == M * C * D
        training = count_pass(layer, (M, C), training=True)
        assert training.per_image == M * C * D + M * C * C  # the covariance of the tokens
        assert training.per_pass > count_pass(layer, (M, C)).per_pass > 0
        assert count_pass(layer.eval().fuse(), (M, C)) == (M * C * D, 0)

    def test_branches_are_counted_as_they_run(self):
        layer = iso.layers.PyramidConv2d(4, 6, 3, padding=1, groups=2)
        with FlopCounterMode(display=False) as counter:
            references.pyramid(layer, torch.zeros(2, 4, 5, 5))
        assert count_branches(layer, (4, 5, 5)) == counter.get_total_flops() // 4
        joint = iso.layers.JointPyramid(
            [iso.layers.PyramidLinear(8, 8, "R-D1W1") for _ in range(3)]
        )
        assert count_branches(joint, (4, 8)) == 4 * 3 * 2 * 64
        mixed = iso.layers.JointPyramid([nn.Linear(8, 8), iso.layers.PyramidLinear(8, 8, "R-D1W1")])
        assert count_branches(mixed, (4, 8)) == 4 * (1 + 2) * 64
        assert count_pass(joint, (4, 8)).per_image == 4 * 3 * 64


def test_a_linear_layer_keeps_its_input_and_a_relu_its_output():
    assert saved_bytes(nn.Linear(10, 7), (5, 10), 3) == 4 * 5 * 10
    model = nn.Sequential(nn.Linear(10, 7), nn.ReLU(), nn.Linear(7, 2))
    # ReLU's output is the second layer's input: once
    assert saved_bytes(model, (5, 10), 3) == 4 * 5 * (10 + 7)


def test_the_peak_is_what_a_pass_really_takes():
    class Grows(nn.Linear):
        def forward(self, x):
            return super().forward(x) + torch.ones(64, 2**18).sum() * 0

    assert peak_bytes(Grows(8, 8), (8,)) / 2**20 == pytest.approx(64, abs=0.1)
    batch = 5
    hidden = nn.Sequential(nn.Linear(10, 7), nn.ReLU(), nn.Linear(7, 2))
    assert peak_bytes(hidden, (10,), batch) == 4 * batch * (7 + 7)  # before and after the ReLU
    assert peak_bytes(nn.Linear(3, 3, device="meta"), (3,)) is None


def test_speeds_take_turns_and_have_quartiles():
    order = []

    class Notes(nn.Linear):
        def forward(self, x):
            order.append(self.out_features)
            return super().forward(x)

    found = measure_speeds(
        {"a": Notes(4, 1), "b": Notes(4, 2)}, (4,), batch_size=3, seconds=0.0, least=4
    )
    assert order == [1, 2] + [1, 2] * 4  # one pass to warm up, as no time is given
    for speed in found.values():
        assert speed.runs == 4
        assert 0 < speed.low <= speed.median <= speed.high


def test_rows_scale_with_the_resolution():
    models = {"vit": small_vit(), "cnn": timm.create_model("cifar_resnet20")}
    rows = list(iso.cost_table(models, [(32, 32), (64, 64)], (1, 2), 0.0, peak=False))
    cnn = [row for row in rows if row["model"] == "cnn"]
    assert cnn[2]["macs"] == pytest.approx(4 * cnn[0]["macs"], rel=1e-3)
    assert cnn[2]["saved_bytes"] == pytest.approx(4 * cnn[0]["saved_bytes"], rel=0.01)
    for row in rows:
        if row["model"] == "vit":
            assert row["ratio"] == 1
    assert rows[0]["peak_bytes"] is None


def test_a_step_of_a_model_whose_outputs_have_names():
    named = nn.Conv2d(3, 2, 8)
    named.register_forward_hook(lambda *call: {"logits": call[-1].flatten(1)})
    row = next(iso.cost_table({"named": named}, [(8, 8)], [2], 0.0, timed="train"))
    assert row["images_per_second"] > 0
    assert row["training_peak_bytes"] > 0


@pytest.mark.parametrize("step", ["train", "pretrain"])
def test_steps_of_training_are_timed_and_change_nothing(step):
    """TDRL Table 8 times pre-training; weights, statistics and mode of the models stay."""
    vit = timm.create_model(
        "tdrl_vit_ti", img_size=32, patch_size=8, embed_dim=24, depth=1, num_heads=3
    ).eval()
    before = {name: tensor.clone() for name, tensor in vit.state_dict().items()}
    rows = list(iso.cost_table({"vit": vit}, [(32, 32)], [2], seconds=0, peak=True, timed=step))
    assert rows[0]["images_per_second"] > 0
    assert rows[0]["training_peak_bytes"] > rows[0]["peak_bytes"]
    assert not vit.training
    speeds = measure_speeds({"vit": vit}, (3, 32, 32), 2, seconds=0, training=True)
    assert speeds["vit"].runs == 5
    for name, tensor in vit.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_a_frozen_model_has_no_step_of_training_to_time():
    frozen = timm.create_model("cifar_resnet20").requires_grad_(False)
    with pytest.raises(iso.UserError, match="no parameter that is trained"):
        list(iso.cost_table({"m": frozen}, [(32, 32)], [2], seconds=0, peak=False, timed="train"))


def test_the_command_times_the_step_that_is_asked_for(tmp_path):
    (tmp_path / "nets.py").write_text(
        "from torch import nn\n"
        "def frozen(): return nn.Sequential(nn.Flatten(), nn.Linear(48, 2)).requires_grad_(False)\n"
        "def trained(): return frozen().requires_grad_()\n"
    )
    quick = "--size 4 --batch-size 2 --seconds 0 --no-peak --step"
    for model, step, said in (
        ("frozen", "inference", ""),
        ("frozen", "train", "nets:frozen has no parameter that is trained"),
        ("trained", "train", ""),
        ("trained", "pretrain", "masked"),
    ):
        run = isomorph("bench", f"nets:{model}", *quick.split(), step, folder=tmp_path)
        assert run.returncode == (2 if said else 0), run.stderr
        assert said in run.stderr
        assert ("images/s" in run.stdout) is not bool(said)


def test_the_operations_of_torchs_attention_are_counted_once_more():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    tokens = torch.randn(1, 10, 8)
    projections = 10 * 8 * (3 * 8 + 8 + 2 * 16)
    assert count_once(layer, tokens) == projections + 2 * 10 * 10 * 8
    assert torch.backends.mha.get_fastpath_enabled()


def test_operations_that_depend_on_values_are_said_to():
    small = dict(num_classes=3, channels=8, features=16, proposals=30, samples=16, img_size=64)
    model = timm.create_model("mask_rcnn", backbone="resnet18", **small)
    refused("cannot be counted from shapes alone", count_macs, model, (3, 64, 64))
