"""Export of networks with several inputs by name: text networks with masks, and the U-Net of diffusion."""

import pytest
import timm
import torch

import isomorph as iso
from command_line import isomorph, refusal
from isomorph.deployment.shapes import DYNAMIC, plan_shapes
from refusals import refused
from requirements import optional

optional("transformers", "nlp")
optional("diffusers", "diffusion")
onnxruntime = optional("onnxruntime", "export")

WIDTHS = dict(
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    vocab_size=60,
    max_position_embeddings=32,
)
NAMES = ("input_ids", "attention_mask", "token_type_ids")


@pytest.fixture(scope="module")
def text():
    """A text classifier with refiners away from where they change nothing."""
    torch.manual_seed(0)
    plain = timm.create_model(
        "text_transformer", family="bert", intermediate_size=32, num_classes=3, **WIDTHS
    ).eval()
    refined = iso.recast(plain, iso.AttentionToRefined(ratio=2), where="*.attention.self")
    for parameter in refined.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return refined


def sequences(lengths):
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return dict(
        input_ids=torch.randint(1, 60, mask.shape) * mask,
        attention_mask=mask,
        token_type_ids=mask // 2,
    )


@pytest.mark.parametrize("dynamic", DYNAMIC)
def test_texts_are_compared_with_and_without_padding(text, dynamic):
    full = torch.cat(
        [inputs["attention_mask"].bool().all(1) for inputs in plan_shapes(text, dynamic).checks]
    )
    assert full.unique().tolist() == [False, True]


@pytest.mark.slow
def test_a_text_network_in_onnx_takes_any_batch_and_length(text, tmp_path):
    report = iso.export(text, tmp_path / "text.onnx", dynamic="batch,size")
    assert report.deviation.passed
    assert report.axes == ("batch", "length")
    assert [row.name.split(",")[0].split()[-1] for row in report.deviation.inputs] == [
        "1x16",
        "2x10",
        "5x31",
    ]
    session = onnxruntime.InferenceSession(tmp_path / "text.onnx")
    assert {put.name: put.shape for put in session.get_inputs()} == {
        key: ["batch", "length"] for key in NAMES
    }
    artefact = iso.deployment.open_artefact(tmp_path / "text.onnx")
    inputs = sequences([7, 3, 1, 7])
    # padding on the left, which no check has
    inputs = {name: values.flip(1) for name, values in inputs.items()}
    with torch.no_grad():
        torch.testing.assert_close(artefact(**inputs), text(**inputs), atol=1e-5, rtol=1e-5)
    refused(f"the inputs are x; give {', '.join(NAMES)} by name", artefact, x=inputs["input_ids"])


def test_the_unet_as_a_program_takes_images_and_times(tmp_path):
    torch.manual_seed(0)
    net = timm.create_model("ddpm_unet", channels=(4, 4), blocks=1, attention=(), groups=2).eval()
    for parameter in filter(lambda parameter: parameter.requires_grad, net.parameters()):
        torch.nn.init.normal_(parameter, std=0.2)
    unet = iso.recast(
        net, iso.LinearToPyramid("P-W2S"), where=["unet.*.to_[qkv]", "unet.*.to_out.0"]
    )
    report = iso.export(unet, tmp_path / "net.pt2", dynamic="batch,size", size=(8, 8))
    assert report.deviation.passed
    assert (report.axes, report.size_multiple, report.fused > 0) == (
        ("batch", "height", "width"),
        2,
        True,
    )
    artefact = iso.deployment.open_artefact(tmp_path / "net.pt2")
    assert artefact.metadata["inputs"] == ["x", "t"]
    x = torch.randn(3, 3, 10, 14)
    t = torch.tensor([0, 500, 999])
    with torch.no_grad():
        torch.testing.assert_close(artefact(x=x, t=t), unet(x, t), atol=1e-4, rtol=1e-4)
    refused(
        "x has the size 3x9x8; sides differ from 3x8x8 by multiples of 2",
        artefact,
        x=x[..., :9, :8],
        t=t,
    )
    refused(
        "9 x 8: sides must be multiples of 2", iso.export, unet, tmp_path / "x.pt2", size=(9, 8)
    )


def test_what_is_not_open_is_said(text, tmp_path):
    """In the command line too."""
    assert {tuple(tensor.shape) for tensor in plan_shapes(text, "none").checks[1].values()} == {
        (1, 32)
    }
    assert iso.export(text, tmp_path / "text.pt2").axes == ("batch",)
    artefact = iso.deployment.open_artefact(tmp_path / "text.pt2")
    refused("input_ids has the size 7, and the file takes 32: give", artefact, **sequences([7, 3]))
    refused(
        "a detector cannot",
        iso.export,
        timm.create_model("mask_rcnn", backbone="resnet18"),
        tmp_path / "x.pt2",
    )
    refused("`size` is for images", iso.export, text, tmp_path / "x.pt2", size=(8, 8))
    named = f"takes {' and '.join(NAMES)}, not images"
    refused(named, iso.quantize, text, [torch.randn(1, 3, 8, 8)], tmp_path / "x.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["text.pt2"]
    run = isomorph("evaluate", tmp_path / "text.pt2", "--data", "digits")
    assert "this is for models of images alone; give the model's checkpoint" in refusal(run)
