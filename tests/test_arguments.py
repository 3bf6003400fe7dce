"""What every function does alike with its arguments: the mode of a model, and batches as a loader gives them."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import isomorph as iso
from isomorph.errors import unknown_model
from refusals import refused

X = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.zeros(16, dtype=torch.long)


@pytest.fixture
def model():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Conv2d(4, 4, 3, padding=1, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 5),
    )
    nn.init.uniform_(net[1].running_mean)
    nn.init.uniform_(net[1].running_var, 0.5, 2)
    return net


def block(channels):
    return nn.Conv2d(channels, channels, 1)


EXACT = iso.ConvToGPSA(init="exact")
MAKERS = {
    "fuse": lambda net: iso.fuse(net, X),
    "fuse a recast network": lambda net: iso.fuse(iso.recast(net, iso.LinearToPyramid(), "7"), X),
    "insert": lambda net: iso.insert(net, block, "4", X),
    "revert": lambda net: iso.revert(iso.insert(net, block, "4", X)),
    "recast": lambda net: iso.recast(net, EXACT, "4"),
    "prune": lambda net: iso.prune(iso.recast(net, EXACT, "4")),
    "absorb": lambda net: iso.absorb(net, (0.5,) * 3, (0.25,) * 3, images=X),
    "recalibrate": lambda net: iso.recalibrate(net, [X]),
    "port_weights": lambda net: iso.port_weights(net, copy.deepcopy(net), X).model,
}
READERS = {
    "verify": lambda net: iso.verify(net, net, X),
    "cka": lambda net: iso.cka(net, net, X, where="4"),
    "cost_table": lambda net: iso.cost_table({"net": net}, (3, 8, 8)),
    "export": lambda net: iso.export(net, "net.pt2", size=8),
    "save": lambda net: iso.save(net, "net.safetensors"),
}


def modes_of(net):
    return {name: module.training for name, module in net.named_modules()}


@pytest.mark.parametrize("name", MAKERS)
def test_a_model_in_train_mode_is_changed_as_in_eval_mode_and_stays_in_train_mode(name, model):
    model.train()
    model[1].eval()  # a frozen norm
    modes = modes_of(model)
    state = copy.deepcopy(model.state_dict())
    new = MAKERS[name](model)
    assert modes_of(model) == modes
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    common = modes_of(new).keys() & modes.keys()
    assert {key: modes_of(new)[key] for key in common} == {key: modes[key] for key in common}
    torch.manual_seed(0)
    expected = MAKERS[name](copy.deepcopy(model).eval())
    assert not expected.training
    torch.testing.assert_close(new.eval()(X), expected(X))


@pytest.mark.parametrize("name", READERS)
def test_what_only_reads_a_model_leaves_its_mode(name, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model.train()
    state = copy.deepcopy(model.state_dict())
    READERS[name](model)
    assert set(modes_of(model).values()) == {True}
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())


ONE_BATCH = {
    "insert": lambda net, batch: iso.insert(net, block, "4", batch),
    "port_weights": lambda net, batch: iso.port_weights(net, net, batch),
}
SEVERAL = {
    "fuse": iso.fuse,
    "verify": lambda net, batch: iso.verify(net, net, batch),
}
LOADERS = {
    "recalibrate": iso.recalibrate,
    "cka": lambda net, data: iso.cka(net, net, data, where="4"),
    "quantize": lambda net, data: iso.quantize(net, data, "net.onnx", size=8),
}


@pytest.mark.parametrize("pair", [(X, LABELS), [X, LABELS], [X, torch.zeros(16, 5)]])
@pytest.mark.parametrize("name", [*ONE_BATCH, *SEVERAL, *LOADERS])
def test_images_and_labels_are_no_batch(name, pair, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call = (ONE_BATCH | SEVERAL | LOADERS)[name]
    refused("of a loader, give the images of one batch", call, model.eval(), pair)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [*ONE_BATCH, *SEVERAL])
def test_a_loader_is_no_example(name, model):
    call = (ONE_BATCH | SEVERAL)[name]
    refused("of a loader, give the images of one batch", call, model.eval(), [(X, LABELS)])


@pytest.mark.parametrize("name", LOADERS)
def test_loaders_may_have_labels(name, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    LOADERS[name](model.eval(), [(X, LABELS), [X, LABELS], X])


NO_MODELS = {
    "text": ("SmallNet", r"'SmallNet' is not a model; open it with iso\.load"),
    "a path": (Path("net.pth"), r"PosixPath\('net.pth'\) is not a model; open it with iso\.load"),
    "a class": (nn.Sequential, r"Sequential is a class, not a model; give Sequential\(\)"),
    "a state dict": (nn.Linear(9, 9).state_dict(), "OrderedDict is not a model; create it first"),
}
MODEL_TAKERS = {
    **MAKERS,
    **{name: call for name, call in READERS.items() if name != "cost_table"},
    "attention_maps": lambda net: iso.attention_maps(net, X),
    "gates": iso.gates,
    "nonlocality": lambda net: iso.nonlocality(net, X),
    "feature_evolution": lambda net: iso.analysis.feature_evolution(net, X),
    "evaluate": lambda net: iso.evaluate(net, "digits"),
    "robustness": lambda net: iso.robustness(net, "digits"),
    "load_weights": lambda net: iso.load_weights(net, "net.pth"),
    "quantize": lambda net: iso.quantize(net, [X], "net.onnx"),
    "save_for_hub": lambda net: iso.save_for_hub(net, "folder"),
    "targets": lambda net: iso.targets(net, EXACT),
    "edits": iso.edits,
    "unstride": lambda net: iso.unstride(net, "layer4"),
    "resize_patches": lambda net: iso.resize_patches(net, 8),
}


@pytest.mark.parametrize("kind", NO_MODELS)
@pytest.mark.parametrize("name", MODEL_TAKERS)
def test_what_is_no_model_is_said_with_the_way_to_one(name, kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given, said = NO_MODELS[kind]
    refused(said, MODEL_TAKERS[name], given)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", SEVERAL)
def test_every_batch_that_is_given_has_to_run(name, model):
    wrong = torch.randn(1, 5, 8, 8)
    refused("the model does not run on an input of shape 1x5x8x8", SEVERAL[name], model, [X, wrong])


@pytest.mark.parametrize("name", [*SEVERAL, *LOADERS])
def test_no_batch_is_an_error(name, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused("there is no batch", (SEVERAL | LOADERS)[name], model, [])


def test_a_misspelt_model_is_not_taken_for_a_class():
    assert unknown_model("resnet5O", ["resnet50"]).endswith("did you mean resnet50?")
    assert "package.module:SmallNet" in unknown_model("SmallNet", ["resnet50"])
