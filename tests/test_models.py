"""Every model of isomorph is a timm citizen of the published size: laws over the registry, on small variants."""

import copy

import pytest
import timm
import torch
from timm.layers import DropPath
from timm.models import group_parameters
from timm.models._features_fx import create_feature_extractor, get_graph_node_names
from torch.nn.modules.batchnorm import _BatchNorm

import isomorph as iso
from isomorph.lab.training.optim import learning_rate_scales, scaled_groups
from isomorph.lab.training.recipe.fields import OptimPart
from isomorph.layers import GPSA, GPSA2d
from isomorph.models.input_sizes import evaluation_config
from isomorph.models.tcnn import checkpoint_filter_fn
from refusals import refused

CIFAR = ((20, 269_722, 5), (56, 853_018, 17))
T_RESNETS = {  # parameters of the CNN, blocks of its last stage, millions in T-CNN Table 2
    "rs50": (35_691_912, 3, 38),
    "rs101": (63_618_696, 3, 66),
    "rs152": (86_621_576, 3, 89),
    "rs200": (93_209_992, 3, 96),
    "rs270": (129_861_448, 4, 133),
    "rs350": (163_956_168, 4, 167),
    "50d": (25_576_264, 3, None),
    "101d": (44_568_392, 3, None),
    "152d": (60_212_040, 3, None),
    "200d": (64_693_064, 3, None),
}
PARAMETERS = {
    "cifar_resnet20": 269_722,
    "cifar_resnet32": 464_154,
    "cifar_resnet44": 658_586,
    "cifar_resnet56": 853_018,
    "coatnet_0": 25_036_820,
    "coatnet_1": 42_225_776,
    "coatnet_2": 74_684_744,
    "coatnet_3": 166_966_264,
    "coatnet_4": 275_425_288,
    "coatnet_5": 687_052_952,
    "coatnet_6": 1_471_125_232,
    "coatnet_7": 2_441_972_728,
    # the published counts less the dead biases of pos_proj: one a head in each of 10 layers
    "convit_ti": 5_710_512 - 40,
    "convit_s": 27_777_322 - 90,
    "convit_b": 86_540_040 - 160,
    "convit_ti_plus": 9_972_912 - 40,
    "convit_s_plus": 48_979_882 - 90,
    "convit_b_plus": 153_134_856 - 160,
    "refined_vit_b": 86_581_912,
    "refined_vit_s": 25_015_976,
    "refined_vit_m": 55_013_420,
    "refined_vit_l": 80_616_712,
    "refined_vit_s_released": 25_408_656,
    "refined_vit_m_released": 55_450_932,
    "refined_vit_l_released": 81_150_192,
    "tdrl_vit_ti": 48_859_816,  # the paper's 48.86M
    "tdrl_vit_s": 194_154_856,
    "vanillanet_5": 22_328_800,
    "tdrl_vit_ti_distilled": 48_859_816 + 2 * 192 + 193_000,  # a token, its position, a second head
}
# base + layers * (3 C^2 + 9 heads * (2 centre + locality + gate))
for _depth, _base, _layers in CIFAR:
    _first = 3 * 32**2 + 36
    _others = _layers * (3 * 64**2 + 36)
    PARAMETERS[f"t_cifar_resnet{_depth}"] = _base + _first + _others
PAPER_MILLIONS = {
    "coatnet_0": 25,
    "coatnet_1": 42,
    "coatnet_2": 75,
    "coatnet_3": 168,
    "coatnet_4": 275,
    "coatnet_5": 688,
    "coatnet_6": 1470,
    "coatnet_7": 2440,
    "refined_vit_b": 86,
    "refined_vit_s": 25,
    "refined_vit_m": 55,
    "refined_vit_l": 81,
}
"""CoAtNet Tables 4 and 5, Refiner Table 10."""
for _name, (_base, _layers, _millions) in T_RESNETS.items():
    PARAMETERS[f"t_resnet{_name}"] = _base + _layers * (3 * 512**2 + 36)
    if _millions:
        PAPER_MILLIONS[f"t_resnet{_name}"] = _millions
VIT = dict(img_size=32, patch_size=8, embed_dim=36, depth=2, num_heads=4)
RESNET = dict(layers=(1, 1, 1, 1))
SMALL = {
    "cifar_resnet20": {},
    "t_cifar_resnet20": {},
    "t_resnet50d": RESNET,
    "t_resnetrs50": RESNET,
    "vanillanet_5": dict(dims=(8, 12, 16, 20)),
    "coatnet_0": dict(img_size=64, depths=(2, 1, 1, 1, 1), widths=(8, 8, 16, 32, 32), head_dim=16),
    "convit_ti": VIT | dict(local_up_to_layer=1),
    "refined_vit_b": VIT,
    "refined_vit_s": VIT,
    "refined_vit_s_released": VIT,
    "tdrl_vit_ti": VIT,
    "tdrl_vit_ti_distilled": VIT,
}


def create(name, **kwargs):
    torch.manual_seed(0)
    return timm.create_model(name, **SMALL[name] | kwargs)


def image(batch=2, channels=3):
    return torch.randn(batch, channels, 64, 64)


def number_of_parameters(model):
    return sum(p.numel() for p in model.parameters())


def one_output(y):
    """The sum of two heads, which a distilled network has in train mode."""
    return y if torch.is_tensor(y) else sum(y)


def as_tuple(names):
    return (names,) if isinstance(names, str) else names


BLOCKS = {
    "cifar_resnet20": 9,
    "t_cifar_resnet20": 9,
    "t_resnet50d": 4,
    "t_resnetrs50": 4,
    "coatnet_0": 4,
}
"""Blocks with a residual branch, where they are not the two of a ViT."""


@pytest.mark.parametrize("name", [name for name in SMALL if "vanilla" not in name])
def test_drop_path_grows_evenly_from_none_in_the_first_block(name):
    model = create(name, drop_path_rate=0.3)
    drops = [module.drop_prob for module in model.modules() if isinstance(module, DropPath)]
    assert drops == sorted(drops)
    steps = BLOCKS.get(name, 2) - 1
    even = [0.3 * step / steps for step in range(steps + 1)]
    assert sorted({0.0, *drops}) == pytest.approx(even)


def test_the_table_is_complete():
    assert set(iso.models.names()) == set(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_published_size_and_config(name):
    with torch.device("meta"):
        model = timm.create_model(name, pretrained_cfg_overlay=dict(crop_pct=0.5))
    count = number_of_parameters(model)
    assert count == PARAMETERS[name]
    if name in PAPER_MILLIONS:
        assert count / 1e6 == pytest.approx(PAPER_MILLIONS[name], rel=0.025)
    config = model.pretrained_cfg
    assert config["crop_pct"] == 0.5
    assert config["architecture"] == name
    assert config["num_classes"] == model.num_classes
    channels, _, _ = config["input_size"]
    assert len(config["mean"]) == channels == 3
    assert len(config["std"]) == 3
    heads = [model.get_submodule(head) for head in as_tuple(config["classifier"])]
    assert model.num_classes in [getattr(head, "out_features", None) for head in heads]
    first_convs = as_tuple(config["first_conv"])
    assert first_convs
    for conv in first_convs:
        assert model.get_submodule(conv).weight.shape[1] == channels


@pytest.mark.parametrize("name", SMALL)
class TestCitizen:
    def test_forward_backward_on_odd_rectangles(self, name):
        options = dict(dynamic_img_pad=True) if "vit" in name else {}
        model = create(name, num_classes=7, **options)
        logits = one_output(model(torch.randn(2, 3, 69, 61)))
        assert logits.shape == (2, 7)
        logits.square().sum().backward()
        for p in model.parameters():
            assert p.grad is not None
            assert p.grad.isfinite().all()
        grey = create(name, in_chans=1)
        assert grey(image(channels=1)) is not None

    def test_features_and_head_are_forward(self, name):
        model = create(name).eval()
        x = image()
        features = model.forward_features(x)
        torch.testing.assert_close(model.forward_head(features), model(x))
        width = model.forward_head(features, pre_logits=True).shape
        assert width == (2, model.num_features) == (2, model.head_hidden_size)
        last, taken = model.forward_intermediates(x, indices=2)
        torch.testing.assert_close(last, features)
        assert len(taken) == 2
        if features.ndim == 4:  # tokens are normed once more, and lead with the class
            torch.testing.assert_close(taken[-1], features)

    def test_features_only_reports_true_reductions(self, name):
        options = dict(out_indices=(0, 1)) if "vit" in name else {}
        model = create(name, features_only=True, **options)
        maps = model(torch.randn(1, 3, 96, 64))
        info = model.feature_info
        for y, channels, reduction in zip(maps, info.channels(), info.reduction(), strict=True):
            assert y.shape == (1, channels, 96 // reduction, 64 // reduction)

    def test_other_classes(self, name):
        model = create(name).eval()
        bare = create(name, num_classes=0).eval()
        model.reset_classifier(0)
        for each in (model, bare):
            assert each(image()).shape == (2, each.num_features)
            assert each.num_classes == 0
        model.reset_classifier(5)
        assert model(image()).shape == (2, 5)
        heads = model.get_classifier()
        if not isinstance(heads, tuple):
            heads = (heads,)
        for head in heads:
            assert head.out_features == 5

    def test_gradient_checkpointing_changes_nothing_and_counts_a_batch_once(self, name):
        options = dict(drop_rate=0.0) if "vanilla" in name else {}
        model = create(name, **options).train()
        x = image(4)
        twin = copy.deepcopy(model)
        twin.set_grad_checkpointing()
        outputs = []
        for net in (model, twin):
            y = one_output(net(x))
            y.square().sum().backward()
            outputs.append(y)
        torch.testing.assert_close(*outputs)
        if not name.startswith("t_resnet"):  # checkpointed by timm, which counts a batch twice
            for one, other in zip(model.buffers(), twin.buffers(), strict=True):
                torch.testing.assert_close(one, other)
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            largest = one.grad.abs().max().item()
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-3 * largest)

    def test_every_parameter_has_a_layer_group(self, name):
        model = create(name)
        grouped = group_parameters(model, model.group_matcher())
        assert sum(map(len, grouped.values())) == len(list(model.parameters()))

    def test_its_state_is_the_network(self, name, tmp_path):
        """Loaded into its like, copied and saved, it computes the same; a copy is apart."""
        model = create(name).eval()
        x = image()
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.running_mean.normal_(std=0.1)
        with torch.no_grad():
            expected = model(x)
            twin = copy.deepcopy(model)
            other = timm.create_model(name, **SMALL[name]).eval()
            other.load_state_dict(model.state_dict())
            iso.save(model, tmp_path / "model.safetensors")
            loaded = iso.load(tmp_path / "model.safetensors")
            for same in (other, twin, loaded):
                torch.testing.assert_close(same(x), expected, atol=0, rtol=0)
            last = model(x.contiguous(memory_format=torch.channels_last))
            torch.testing.assert_close(last, expected, atol=1e-4, rtol=1e-4)
            for parameter in twin.parameters():
                parameter.zero_()
            torch.testing.assert_close(model(x), expected, atol=0, rtol=0)

    def test_torch_fx_traces_it(self, name):
        model = create(name).eval()
        x = torch.randn(2, 3, 224, 224) if name == "vanillanet_5" else image()
        _, nodes_in_eval_mode = get_graph_node_names(model)
        last = nodes_in_eval_mode[-1]
        traced = create_feature_extractor(model, [last])
        torch.testing.assert_close(traced(x)[last], model(x), atol=1e-5, rtol=1e-5)

    def test_open_batch_export(self, name):
        if name in ("tdrl_vit_ti_distilled", "t_resnetrs50", "refined_vit_b"):
            return  # as tdrl_vit_ti, t_resnet50d and refined_vit_s
        options = dict(depth=1) if "tdrl" in name else {}
        model = create(name, **options).eval()
        x = image()
        any_batch = {0: torch.export.Dim("batch", min=1, max=64)}
        program = torch.export.export(model, (x,), dynamic_shapes=(any_batch,)).module()
        other = torch.cat([x, x[:1]])
        torch.testing.assert_close(program(other), model(other), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "dials"),
    [("t_cifar_resnet20", ("centre", "raw_locality", "gate")), ("convit_ti", ("position", "gate"))],
)
def test_attention_is_exempt_from_decay(name, dials):
    model = create(name)
    exempt = set()
    for layer, module in model.named_modules():
        if isinstance(module, GPSA2d | GPSA):
            exempt |= {f"{layer}.{dial}" for dial in dials}
    # tokens and positions besides
    assert exempt == {parameter for parameter in model.no_weight_decay() if "." in parameter}
    decayed = []
    for group in scaled_groups(model, OptimPart(weight_decay=0.1, gate_lr=1)):
        if group["weight_decay"]:
            decayed += group["params"]
    identities = {id(parameter) for parameter in decayed}
    for key in exempt:
        assert id(model.get_parameter(key)) not in identities


TEXT = dict(
    hidden_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=57, num_classes=2
)
WORDS = "body.embeddings.word_embeddings.weight"
BACKBONE = dict(embed_dim=12, num_heads=3, depth=2, layout="plain", relative_bias=True)
LAYERS = {
    "convit_ti": (
        SMALL["convit_ti"],
        {
            "pos_embed": 3,
            "blocks.0.attn.gate": 2,
            "blocks.0.attn.position": 2,
            "blocks.1.attn.qkv.weight": 1,
        },
    ),
    "mask_rcnn": (
        dict(backbone_kwargs=BACKBONE | dict(relative_bias=False), num_classes=3),
        {
            "backbone.patch_embed.proj.weight": 3,
            "backbone.pos_embed": 3,
            "backbone.blocks.0.norm1.weight": 2,
            "backbone.blocks.1.norm1.weight": 1,
            "rpn.head.cls_logits.bias": 0,
            "pyramid.levels.0.1.0.weight": 0,
        },
    ),
    "upernet": (
        dict(backbone="tdrl_vit_ti", backbone_kwargs=BACKBONE),
        {
            "backbone.pos_embed": 3,
            "backbone.blocks.0.attn.relative_bias": 2,
            "head.classifier.weight": 0,
            "neck.scales.1.weight": 0,
        },
    ),
    "text_transformer": (
        TEXT,
        {WORDS: 3, "body.encoder.layer.1.output.dense.weight": 1, "head.fc.weight": 0},
    ),
    "text_transformer, distilbert": (
        TEXT | dict(family="distilbert"),
        {WORDS: 3, "body.transformer.layer.1.ffn.lin1.weight": 1, "head.fc.weight": 0},
    ),
}
"""Networks with more than one part, and how many layers lie above a parameter."""


@pytest.mark.parametrize("name", LAYERS)
def test_layer_decay_counts_the_layers_above(name):
    arguments, above = LAYERS[name]
    model_name = name.partition(",")[0]
    with torch.device("meta"):
        model = timm.create_model(model_name, **arguments)
    scales = learning_rate_scales(model, 0.5)
    for parameter, layers in above.items():
        assert scales[parameter] == 0.5**layers


@pytest.mark.parametrize(
    ("name", "arguments", "count"),
    [
        # 27.7M and 70.8M in TDRL Table 2
        ("mask_rcnn", dict(backbone_kwargs=dict(layout="plain", num_heads=3)), 27_732_325),
        ("mask_rcnn", dict(backbone_kwargs=dict(layout="plain", num_heads=12)), 27_662_821),
        ("mask_rcnn", dict(backbone_kwargs=dict(num_heads=3)), 70_874_725),
        ("mask_rcnn", dict(backbone_kwargs=dict(num_heads=12)), 70_805_221),
        ("bert_small", dict(num_classes=2), 13_483_522),
    ],
)
def test_published_sizes_of_networks_for_tasks(name, arguments, count):
    with torch.device("meta"):
        model = timm.create_model(name, **arguments)
    assert number_of_parameters(model) == count


def test_a_tresnet_is_unstride_then_recast():
    """The named model from the backbone's weights is the surgery by hand on the backbone."""
    cnn = timm.create_model("resnet50d", num_classes=4, **RESNET).eval()
    for block in cnn.layer4:
        torch.nn.init.ones_(block.bn3.weight)  # zero at birth, which would hide the branch
    named = create("t_resnet50d", num_classes=4, init="exact").eval()
    named.load_state_dict(checkpoint_filter_fn(cnn.state_dict(), named))
    flat = iso.unstride(cnn, "layer4")
    x = torch.randn(1, 3, 64, 96)
    iso.verify(flat, named, x)
    by_hand = iso.recast(flat, iso.ConvToGPSA(), "layer4.*.conv2")
    torch.testing.assert_close(by_hand(x), named(x))
    assert (flat(x) - cnn(x)).abs().max() > 1e-3  # the stride does change the function


def test_pretrained_weights_load_strictly(public_weights):
    model = timm.create_model("cifar_resnet20", pretrained=True).eval()
    twin = timm.create_model("t_cifar_resnet20", pretrained=True, init="exact").eval()
    x = torch.randn(2, 3, 37, 45)
    iso.verify(model, twin, x)
    fine_tune = timm.create_model("cifar_resnet20", pretrained=True, num_classes=3, in_chans=1)
    assert fine_tune(torch.randn(2, 1, 32, 32)).shape == (2, 3)


@pytest.mark.parametrize("depth", [25, 2])
def test_depths_that_no_cifar_resnet_has(depth):
    refused(r"must be 6 n \+ 2", timm.create_model, "cifar_resnet20", depth=depth)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("refined_vit_s", {"attn_layer": "diff"}),
        ("refined_vit_s_released", {"attn_layer": "diff"}),
        ("convit_s", {"attn_layer": "diff"}),
        ("convit_s", {"proj_bias": False}),
    ],
)
def test_attention_that_its_blocks_do_not_have_is_refused(name, arguments):
    refused(f"{next(iter(arguments))}.* is not supported", timm.create_model, name, **arguments)


def test_a_coatnet_of_another_size_is_saved(tmp_path):
    shape = dict(img_size=64, widths=(8, 8, 32, 32, 32), depths=(2, 1, 1, 1, 1), num_classes=3)
    model = timm.create_model("coatnet_0", **shape).eval()
    model.set_input_size((96, 128))
    assert evaluation_config(model)["input_size"] == (3, 96, 128)
    iso.save(model, tmp_path / "x.safetensors")
    x = torch.randn(1, 3, 96, 128)
    assert torch.equal(iso.load(tmp_path / "x.safetensors")(x), model(x))


def test_tables_of_positions_are_not_decayed():
    kwargs = dict(img_size=32, patch_size=8, embed_dim=24, depth=1, num_heads=3)
    model = timm.create_model("tdrl_vit_ti", relative_bias=True, **kwargs)
    tables = [name for name, _ in model.named_parameters() if name.endswith("relative_bias")]
    assert tables
    assert model.no_weight_decay() >= {"pos_embed", *tables}


def test_tokens_have_one_of_two_forms():
    model = timm.create_model(
        "convit_ti", img_size=32, depth=2, embed_dim=24, num_heads=4, local_up_to_layer=1
    )
    x = torch.randn(1, 3, 32, 32)
    with pytest.raises(ValueError, match="NHWC"):
        model.forward_intermediates(x, output_fmt="NHWC")
    assert model.forward_intermediates(x, output_fmt="NLC", intermediates_only=True)[0].ndim == 3
