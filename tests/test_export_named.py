"""Export of networks with several inputs by name: text networks with masks, and the U-Net of diffusion."""

import pytest
import timm
import torch

import isomorph as iso
from command_line import isomorph
from isomorph.cli.open_models import open_classifier
from isomorph.cli.options import OpenOptions
from isomorph.deployment.shapes import plan_shapes

pytest.importorskip("transformers")
pytest.importorskip("diffusers")
onnxruntime = pytest.importorskip("onnxruntime")

WIDTHS = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=60, max_position_embeddings=32)


@pytest.fixture(scope="module")
def text():
    """A text classifier with refiners away from where they change nothing."""
    torch.manual_seed(0)
    plain = timm.create_model("text_transformer", family="bert", intermediate_size=32, num_classes=3, **WIDTHS).eval()
    refined = iso.recast(plain, iso.AttentionToRefined(ratio=2), where="*.attention.self")
    for parameter in refined.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return refined


@pytest.fixture(scope="module")
def unet():
    torch.manual_seed(0)
    net = timm.create_model("ddpm_unet", channels=(4, 4), blocks=1, attention=(), groups=2).eval()
    for parameter in net.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.2)
    return iso.recast(net, iso.LinearToPyramid("P-W2S"), where=["unet.*.to_[qkv]", "unet.*.to_out.0"])


def sequences(lengths):
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return dict(input_ids=torch.randint(1, 60, mask.shape) * mask, attention_mask=mask, token_type_ids=mask // 2)


@pytest.mark.slow
def test_a_text_network_in_onnx_takes_any_batch_and_length(text, tmp_path):
    report = iso.export(text, tmp_path / "text.onnx", dynamic="batch,size")
    assert report.deviation.passed
    assert report.axes == ("batch", "length")
    assert [row.shape for row in report.deviation.inputs] == ["1x16", "2x10", "5x31"]
    session = onnxruntime.InferenceSession(tmp_path / "text.onnx")
    given = {put.name: put.shape for put in session.get_inputs()}
    assert given == {key: ["batch", "length"] for key in ("input_ids", "attention_mask", "token_type_ids")}
    artefact = iso.deployment.open_artefact(tmp_path / "text.onnx")
    inputs = sequences([7, 3, 1, 7])
    with torch.no_grad():
        torch.testing.assert_close(artefact(**inputs), text(**inputs), atol=1e-5, rtol=1e-5)
    with pytest.raises(iso.UserError, match="the inputs are x; give input_ids, attention_mask, token_type_ids by name"):
        artefact(x=inputs["input_ids"])
    with pytest.raises(iso.UserError, match="unequal batches: input_ids 4, attention_mask 2"):
        artefact(**{**inputs, "attention_mask": inputs["attention_mask"][:2]})
    with pytest.raises(
        iso.UserError, match="takes input_ids and attention_mask and token_type_ids, and this is for mod"
    ):
        open_classifier(str(tmp_path / "text.onnx"), OpenOptions())


def test_the_unet_as_a_program_takes_images_and_times(unet, tmp_path):
    report = iso.export(unet, tmp_path / "net.pt2", dynamic="batch,size", size=(8, 8))
    assert report.deviation.passed
    assert (report.axes, report.size_multiple, report.fused > 0) == (("batch", "height", "width"), 2, True)
    artefact = iso.deployment.open_artefact(tmp_path / "net.pt2")
    assert artefact.metadata["inputs"] == ["x", "t"]
    x, t = torch.randn(3, 3, 10, 14), torch.tensor([0, 500, 999])
    with torch.no_grad():
        torch.testing.assert_close(artefact(x=x, t=t), unet(x, t), atol=1e-4, rtol=1e-4)
    with pytest.raises(iso.UserError, match="x has the size 3x9x8; sides differ from 3x8x8 by multiples of 2"):
        artefact(x=x[..., :9, :8], t=t)


def test_what_is_not_open_is_said(text, unet, tmp_path):
    """In the command line too."""
    assert {tuple(tensor.shape) for tensor in plan_shapes(text, "none").checks[1].values()} == {(1, 32)}
    report = iso.export(text, tmp_path / "text.pt2")
    assert (report.axes, report.deviation.passed) == (("batch",), True)
    artefact = iso.deployment.open_artefact(tmp_path / "text.pt2")
    with pytest.raises(
        iso.UserError, match="input_ids has the size 7, and the artefact takes 32; export it with dynamic"
    ):
        artefact(**sequences([7, 3]))
    with pytest.raises(iso.UserError, match="size is for images"):
        iso.export(text, tmp_path / "x.pt2", size=(8, 8))
    with pytest.raises(iso.UserError, match="takes no images of 9 x 8: sides must be multiples of 2"):
        iso.export(unet, tmp_path / "x.pt2", size=(9, 8))
    with pytest.raises(iso.UserError, match="takes input_ids and attention_mask and token_type_ids, not images"):
        iso.quantize(text, [torch.randn(1, 3, 8, 8)], tmp_path / "x.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["text.pt2"]
    refused = isomorph("evaluate", tmp_path / "text.pt2", "--data", "digits")
    assert refused.returncode == 2
    assert "this is for models of images alone; give the model's checkpoint" in refused.stderr
