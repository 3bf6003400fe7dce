"""Maps, gates and spans by layer name."""

import pytest
import timm
import torch

import isomorph as iso


def test_maps_are_those_of_the_inputs_the_layers_really_see():
    model = timm.create_model("t_cifar_resnet20").train()
    batch = torch.randn(2, 3, 24, 20)
    maps = iso.attention_maps(model, batch)
    assert len(maps) == 6
    assert maps["layer3.0.conv1"].shape == (2, 9, 30, 14 * 12)
    assert maps["layer3.2.conv2"].shape == (2, 9, 30, 8 * 7)
    assert model.training
    model.eval()
    seen = {}
    model.layer3[1].conv1.register_forward_pre_hook(lambda layer, args: seen.update(x=args[0]))
    model(batch)
    torch.testing.assert_close(maps["layer3.1.conv1"], model.layer3[1].conv1.attention(seen["x"]))


def test_gates_and_spans_are_the_dials():
    model = timm.create_model("t_cifar_resnet20", locality=4.0, gate=0.0)
    assert all(torch.allclose(gate, torch.full((9,), 0.5)) for gate in iso.gates(model).values())
    assert all(torch.allclose(span, torch.full((9,), 0.25)) for span in iso.spans(model).values())


def test_token_layers_too():
    layer = torch.nn.Sequential(iso.GPSA(36, 9, (4, 5)))
    layer[0].set_dials(locality=2.0)
    torch.testing.assert_close(iso.spans(layer)["0"], torch.full((9,), 0.5))
    torch.testing.assert_close(iso.gates(layer)["0"], torch.full((9,), 0.7310586))
    assert iso.attention_maps(layer, torch.randn(1, 20, 36))["0"].shape == (1, 9, 20, 20)


def test_keyword_arguments_reach_the_map():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = iso.GPSA(36, 9, (4, 6))

        def forward(self, x):
            return self.layer(x, grid_size=(6, 4))

    model, x = Model(), torch.randn(1, 24, 36)
    torch.testing.assert_close(iso.attention_maps(model, x)["layer"], model.layer.attention(x, (6, 4)))


def test_looks_are_pictures_on_the_layers_own_map():
    model = timm.create_model("t_cifar_resnet20", init="exact")
    pictures = iso.looks(model, torch.randn(1, 3, 40, 24), (0.5, 0.5))
    assert pictures["layer3.0.conv1"].shape == (1, 9, 20, 12)
    assert pictures["layer3.2.conv2"].shape == (1, 9, 10, 6)
    peaks = pictures["layer3.2.conv2"][0].flatten(1).argmax(-1)
    assert [(int(p) // 6, int(p) % 6) for p in peaks] == [(r, c) for r in (4, 5, 6) for c in (2, 3, 4)]


def test_a_model_without_attention_is_said():
    with pytest.raises(iso.UserError, match="no attention layer"):
        iso.gates(timm.create_model("cifar_resnet20"))
