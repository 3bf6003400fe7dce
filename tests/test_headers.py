"""Headers of checkpoints that somebody else has written: every mistyped field is one line, whoever reads the file."""

import json

import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import isomorph as iso
from isomorph.checkpoints.autoencoder import load_autoencoder, save_autoencoder
from isomorph.checkpoints.model import record_data
from isomorph.lab.evaluation.model_data import default_data
from isomorph.lab.training.open import open_trained
from isomorph.lab.training.run.snapshot import digest_of
from isomorph.models.masked_autoencoder import MaskedAutoencoder
from refusals import refused
from requirements import optional

BASE = {"name": "cifar_resnet20", "num_classes": 10, "in_chans": 3}
EDIT = {
    "rule": "ConvToGPSA",
    "fields": {"init": "exact", "locality": None, "gate": None},
    "names": ["layer3.2.conv2"],
}
DATA = {
    "input_size": [3, 32, 32],
    "mean": [0.5, 0.5, 0.5],
    "std": [0.5, 0.5, 0.5],
    "label_names": list("abcdefghij"),
}


def forged(path, base=BASE, edits=(EDIT,), data=DATA, **more):
    """A checkpoint with a header of its own: values are written as JSON, texts as they are."""
    parts = {"base": base, "edits": edits, "data": data, **more}
    header = {
        key: part if isinstance(part, str) else json.dumps(part)
        for key, part in parts.items()
        if part != "none"
    }
    save_file({"weight": torch.zeros(2)}, path, {"format": "isomorph-1", **header})
    return path


def base(**more):
    return {"base": {**BASE, **more}}


def upernet(**more):
    return base(name="upernet", backbone="resnet18", backbone_kwargs=more)


def data(**more):
    return {"data": {**DATA, **more}}


def rule(name="ConvToGPSA", names=("layer3.2.conv2",), **fields):
    return {"edits": [{"rule": name, "fields": fields, "names": names}]}


FORGERIES = {
    "not JSON": ({"base": "{"}, "base is not JSON"),
    "huge argument": (
        base(img_size=[10**30, 3]),
        "base.img_size 10000000000000000000[.]{3} must be a number of at most 16,777,216",
    ),
    "huge block": (
        rule(
            "Insert",
            ("layer3.0.act1",),
            block="isomorph.layers.map_attention.MapAttention",
            channels=2**20,
        ),
        r"its header asks for [\d,]+ numbers",
    ),
    "many blocks": (base(depth=10**6), "base.depth 1000000 must be a number of at most 1,000"),
    "another file": (base(checkpoint_path="/etc/passwd"), "base.checkpoint_path is not allowed"),
    "another file within": (
        upernet(checkpoint_path="/etc/passwd"),
        "base.backbone_kwargs.checkpoint_path is not allo",
    ),
    "a download within": (
        upernet(pretrained=True),
        "base.backbone_kwargs.pretrained is not allowed",
    ),
    "a path as an option": (
        upernet(act_layer="../x"),
        r"base.backbone_kwargs.act_layer is '../x': a file may name no",
    ),
    "code of the hub": (
        base(name="bert_small", attn_implementation="me/kernels"),
        "base.attn_implementation is not",
    ),
    "field of another rule": (
        rule(kernel=3),
        "edits.0.fields.kernel is not a field of ConvToGPSA; it has init, ",
    ),
    "type of a field": (
        rule(locality="5"),
        "edits.0.fields.locality is '5' and should be a valid number",
    ),
    "fraction of a pixel": (
        data(input_size=[3, 32.5, 32]),
        "data.input_size.1 is 32.5 and should be a valid integer",
    ),
    "huge size": (
        data(input_size=[3, 10**6, 32]),
        "data.input_size.1 is 1000000 and should be less than",
    ),
}


@pytest.mark.parametrize("kind", FORGERIES)
def test_a_forged_header_is_one_line(kind, tmp_path):
    """It names the file, the field, what it holds and what is allowed."""
    parts, said = FORGERIES[kind]
    path = forged(tmp_path / "model.safetensors", **parts)
    line = refused(said, iso.load, path)
    if ".0" in said or "is " in said:
        assert str(path) in line


def test_a_model_larger_than_its_file_is_not_built(tmp_path):
    """Said before memory is taken: this one would have 200 TB."""
    path = forged(
        tmp_path / "model.safetensors",
        base={"name": "vit_tiny_patch16_224", "embed_dim": 3 * 2**18},
        edits=[],
    )
    refused(r"its header asks for [\d,]+ numbers, it holds 2", iso.load, path)


def test_an_autoencoder_is_read_so_too(tmp_path):
    small = dict(depth=1, embed_dim=12, num_heads=2, img_size=8, patch_size=4, num_classes=0)
    path = tmp_path / "autoencoder.safetensors"
    encoder = timm.create_model("vit_tiny_patch16_224", **small)
    save_autoencoder(MaskedAutoencoder(encoder, 1, 8, 2), path)
    assert load_autoencoder(path).width == 8
    with safe_open(path, "pt") as file:
        header = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for sizes, said in (
        ({"mask": 2}, "autoencoder.mask is 2 and should be less than 1"),
        ({"depth": 40, "width": 8192}, "its header asks for"),
    ):
        new = json.dumps({**json.loads(header["autoencoder"]), **sizes})
        save_file(tensors, path, {**header, "autoencoder": new})
        refused(said, load_autoencoder, path)


def test_a_forged_task_is_one_line():
    model = timm.create_model("cifar_resnet20")
    record_data(model, {"task": {"name": "text_classification", "length": "long"}})
    said = "names a task that isomorph cannot open.*length: input should be a valid integer"
    refused(said, iso.evaluate, model)


def test_the_tokenizer_of_a_checkpoint_is_not_fetched_and_runs_no_code(tmp_path):
    optional("transformers", "nlp")
    model = timm.create_model("bert_small", num_hidden_layers=1, num_classes=2)
    lure = tmp_path / "lure"
    code = {"auto_map": {"AutoTokenizer": ["evil.T", None], "AutoConfig": "evil.C"}}
    lure.mkdir()
    for name in ("config.json", "tokenizer_config.json"):
        (lure / name).write_text(json.dumps(code | {"model_type": "evil"}))
    (lure / "evil.py").write_text(f"open('{tmp_path / 'ran'}', 'w')")
    for source, said in (
        ("me/evil", "not on this machine; if you trust it, run `hf download me/evil`"),
        (str(lure), "is not a vocabulary file, a folder or a name on the hub"),
    ):
        record_data(
            model, {"task": {"name": "text_classification", "tokenizer": source, "dataset": "cola"}}
        )
        refused(said, iso.evaluate, model)
    assert not (tmp_path / "ran").exists()


def test_a_forged_snapshot_names_no_file_outside_and_asks_for_no_memory(tmp_path):
    folder = tmp_path / "run/step-00000001"
    folder.mkdir(parents=True)
    progress = {"step": 1, "closed": 1}
    values = {
        "step": 1,
        "optimizer": {"state": {}, "groups": {}},
        "recipe": {},
        "progress": progress,
        "lanes": 1,
    }
    values |= {"data": {"images": 1, "steps": 1, "classes": 1}, "model": {}}
    for files, said in (
        ({"../../secret": "0"}, "String should match pattern|files.*should match"),
        ({"/dev/zero": "0"}, "should match"),
        ({"shard-1": "0"}, "No such file"),
    ):
        state = values | {"files": files}
        (folder / "state.json").write_text(json.dumps(state | {"digest": digest_of(state)}))
        refused(f"is damaged.*({said})", open_trained, tmp_path / "run")


def test_settings_of_a_script_and_of_the_hub_name_no_file(tmp_path):
    within = {"backbone": "resnet18", "backbone_kwargs": {"checkpoint_path": "/etc/passwd"}}
    for number, arguments in enumerate((within, {"config": "me/evil"}, {"backbone": "../x"})):
        content = {"arch": "upernet", "args": {"model": "upernet", "model_kwargs": arguments}}
        torch.save(content | {"state_dict": {"weight": torch.zeros(2)}}, tmp_path / f"{number}.pth")
        refused(
            r"model_kwargs cannot be used: .*(not allowed|may name no)",
            iso.load,
            tmp_path / f"{number}.pth",
        )
        config = {"architecture": "upernet", "model_args": arguments, "pretrained_cfg": {}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        save_file({"weight": torch.zeros(2)}, tmp_path / "m.safetensors", {"format": "pt"})
        refused(
            r"model_kwargs cannot be used: .*(not allowed|may name no)",
            iso.load,
            tmp_path / "m.safetensors",
        )


def test_a_header_names_no_folder_of_images(tmp_path):
    model = timm.create_model("resnet18")
    for source, taken in (
        ("digits", "digits"),
        (str(tmp_path), "imagefolder"),
        ("/etc", "imagefolder"),
    ):
        record_data(model, {"source": source})
        assert default_data(model) == taken


def test_edits_of_a_base_are_checked_for_their_size(tmp_path):
    fields = {"form": "layer", "outputs": 2**50, "bias": False}
    edit = {"rule": "Merge", "fields": fields, "names": ["0"]}
    module = {"class": "torch.nn.Sequential"}
    path = forged(tmp_path / "m.safetensors", "none", [edit], {}, module=module)
    base = torch.nn.Sequential(torch.nn.Linear(4, 4))
    refused("its header asks for", iso.load, path, base=base)
