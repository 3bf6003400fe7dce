"""What timm checks of each of its own models, checked of each of isomorph's: configs, heads, states, tracing."""

import copy

import pytest
import timm
import torch
from timm.models._features_fx import create_feature_extractor, get_graph_node_names

import isomorph as iso

VIT = dict(img_size=32, patch_size=8, embed_dim=36, depth=2, num_heads=4)
SMALL = {
    "cifar_resnet20": {},
    "t_cifar_resnet20": {},
    "coatnet_0": dict(img_size=64, depths=(2, 1, 1, 1, 1), widths=(8, 8, 16, 32, 32), head_dim=16),
    "convit_ti": VIT | dict(local_up_to_layer=1),
    "refined_vit_b": VIT,
    "refined_vit_s": VIT | dict(img_size=64),
    "refined_vit_s_released": VIT | dict(img_size=64),
    "tdrl_vit_ti": VIT,
    "tdrl_vit_ti_distilled": VIT,
}


def small(name, **kwargs):
    torch.manual_seed(0)
    return timm.create_model(name, **SMALL[name] | kwargs).eval()


def image(name):
    return torch.randn(2, 3, *(2 * (SMALL[name].get("img_size", 32),)))


@pytest.mark.parametrize("name", iso.models.names())
class TestConfig:
    def test_it_names_modules_that_are_there_and_may_be_overlaid(self, name):
        with torch.device("meta"):
            model = timm.create_model(name, pretrained_cfg_overlay=dict(crop_pct=0.5))
        config = model.pretrained_cfg
        assert config["crop_pct"] == 0.5
        assert config["architecture"] == name
        assert model.num_classes == config["num_classes"]
        assert [len(config[key]) for key in ("input_size", "mean", "std")] == [3, 3, 3]
        heads = config["classifier"]
        found = [model.get_submodule(head) for head in ((heads,) if isinstance(heads, str) else heads)]
        assert model.num_classes in [getattr(head, "out_features", None) for head in found]
        first = config["first_conv"]
        for conv in (first,) if isinstance(first, str) else first:
            weight = model.get_submodule(conv).weight
            assert weight.shape[1] == config["input_size"][0]


@pytest.mark.parametrize("name", SMALL)
class TestSmall:
    def test_heads(self, name):
        model, x = small(name), image(name)
        width = model.forward_head(model.forward_features(x), pre_logits=True).shape
        assert width == (2, model.head_hidden_size) == (2, model.num_features)
        bare = small(name, num_classes=0)
        assert bare(x).shape == (2, model.num_features)
        assert bare.num_classes == 0

    def test_its_state_loads_into_its_like(self, name):
        model, other, x = small(name), timm.create_model(name, **SMALL[name]).eval(), image(name)
        other.load_state_dict(model.state_dict(), strict=True)
        torch.testing.assert_close(other(x), model(x), atol=0, rtol=0)

    def test_a_copy_is_equal_and_apart(self, name):
        model, x = small(name), image(name)
        twin, before = copy.deepcopy(model), model(x)
        torch.testing.assert_close(twin(x), before, atol=0, rtol=0)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        torch.testing.assert_close(model(x), before, atol=0, rtol=0)

    def test_channels_last(self, name):
        model, x = small(name), image(name)
        last = x.contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(model(last), model(x), atol=1e-4, rtol=1e-4)

    def test_torch_fx_traces_it(self, name):
        if name.endswith("_distilled"):
            pytest.skip("timm's own distilled ViTs do not trace with dynamic_img_size either")
        model, x = small(name), image(name)
        last = get_graph_node_names(model)[1][-1]
        traced = create_feature_extractor(model, [last])
        torch.testing.assert_close(traced(x)[last], model(x), atol=1e-5, rtol=1e-5)

    def test_open_batch_export(self, name):
        model, x = small(name, **(dict(depth=1) if "tdrl" in name else {})), image(name)
        program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=64)},))
        other = torch.cat([x, x[:1]])
        torch.testing.assert_close(program.module()(other), model(other), atol=1e-4, rtol=1e-4)
