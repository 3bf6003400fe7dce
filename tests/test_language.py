"""Language: networks, packed and masked texts, pre-training and fine-tuning, and the files of GLUE."""

import math
from contextlib import nullcontext
from pathlib import Path

import huggingface_hub
import numpy as np
import pyarrow
import pytest
import timm
import torch
from pyarrow.parquet import write_table

import isomorph as iso
from isomorph.checkpoints.files import read_header
from isomorph.cli.evaluate import ClassifierOptions, evaluate_task
from isomorph.cli.open_models import open_given
from isomorph.cli.options import CheckpointOptions
from isomorph.errors import NotFinite
from isomorph.lab.distributed import ALONE, REPEATED, Runtime
from isomorph.lab.evaluation.model_data import record_root
from isomorph.lab.tasks.language import glue
from isomorph.lab.tasks.language.masked_lm import IGNORED, PackedTexts, _masked_sums, pack
from isomorph.lab.tasks.language.text import LanguageTask, open_tokenizer, pad_batch
from isomorph.lab.training.recipe.recipe import validate
from isomorph.lab.training.recipe.tasks import find_task
from isomorph.lab.training.task import EvaluationOptions, task_of
from refusals import refused
from requirements import optional
from tiny_runs import same_snapshots, stopped_run

transformers = optional("transformers", "nlp")

LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    *LETTERS,
    *(f"##{letter}" for letter in LETTERS),
]
NETWORK = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
NETWORK |= dict(vocab_size=len(WORDS), max_position_embeddings=32)
REFINED = dict(rule="AttentionToRefined", ratio=2, where="*.attention.self")
FILES = {
    "RTE": "index\tsentence1\tsentence2\tlabel\n0\ta b c\tb c\tentailment\n1\td e\tf g h i\tnot_entailment\n",
    "CoLA": 'gj04\t1\t\ta b c d\ngj04\t0\t*\tb "c\n',
    "STS-B": "index\tgenre\tsentence1\tsentence2\tscore\n0\tnews\ta b\tc d\t2.5\n1\tnews\ta\ta\t5.000\n",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with a vocabulary, a text file, and small files of GLUE tasks as published."""
    folder = tmp_path_factory.mktemp("language")
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    generator = np.random.default_rng(0)
    lines = [" ".join(generator.choice(list(LETTERS), 9)) for _ in range(60)]
    (folder / "text.txt").write_text("\n\n".join(lines))
    for name, content in FILES.items():
        (folder / name).mkdir()
        header, rows = ("", content) if name == "CoLA" else content.split("\n", 1)
        for split, times in (("train", 12), ("dev", 5)):
            (folder / name / f"{split}.tsv").write_text(
                (header + "\n") * bool(header) + rows * times
            )
    return folder


@pytest.fixture(scope="module")
def tokenizer(root):
    return open_tokenizer(str(root / "vocab.txt"))


def pretraining(root):
    return dict(name="pre", optim=dict(lr=1e-3), epochs=2, checkpoint_minutes=0) | dict(
        model=dict(name="text_transformer", kwargs=NETWORK),
        task=dict(name="masked_lm", tokenizer=str(root / "vocab.txt"), length=16),
        data=dict(source="text", root=str(root / "text.txt"), batch_size=8, split=0.2),
    )


def fine_tuning(root, dataset="rte"):
    return dict(name="fine", optim=dict(lr=1e-3, layer_decay=0.8), epochs=1) | dict(
        model=dict(name="text_transformer", kwargs=NETWORK),
        task=dict(
            name="text_classification",
            dataset=dataset,
            tokenizer=str(root / "vocab.txt"),
            length=16,
        ),
        data=dict(source="glue", root=str(root), batch_size=4),
    )


class TestNetworks:
    def test_heads_and_inputs(self):
        words = timm.create_model("text_transformer", **NETWORK).eval()
        inputs = words.example_inputs(3)
        assert inputs["attention_mask"].sum(1).tolist() == [32, 24, 16]
        logits = words(**inputs)
        assert logits.shape == (3, 32, len(WORDS))
        positions = torch.tensor([[1, 5]] * 3)
        torch.testing.assert_close(words(**inputs, positions=positions), logits[:, [1, 5]])
        for ids, length, found in zip(inputs["input_ids"], (32, 24, 16), logits, strict=True):
            # as without padding
            torch.testing.assert_close(words(ids[None, :length])[0], found[:length])
        assert not torch.allclose(words(**inputs, token_type_ids=torch.ones(3, 32).long()), logits)
        words.reset_classifier(4)
        assert words(**inputs).shape == (3, 4)

    def test_weights_of_transformers_and_of_another_head_load(self, tmp_path):
        config = transformers.RobertaConfig(**NETWORK, pad_token_id=1)
        theirs = transformers.RobertaForMaskedLM(config).eval()
        theirs.save_pretrained(tmp_path)
        net = timm.create_model(
            "text_transformer", family="roberta", **NETWORK, num_classes=2
        ).eval()
        new = iso.load_weights(net, tmp_path / "model.safetensors", fresh_head=True)
        assert new == ["head.fc.weight", "head.fc.bias"]
        ids = torch.randint(2, len(WORDS), (2, 9))
        torch.testing.assert_close(net.forward_features(ids), theirs.roberta(ids).last_hidden_state)
        assert net.max_length == 30


class TestTexts:
    def test_packed_sequences_hold_the_text_in_order(self, tokenizer):
        rows = pack(["a b c", "d", "e f g h"], tokenizer, 6)
        first = [tokenizer.convert_ids_to_tokens(row.tolist()) for row in rows]
        assert first == [
            ["[CLS]", "a", "b", "c", "[SEP]", "[SEP]"],
            ["[CLS]", "d", "[SEP]", "e", "f", "[SEP]"],
        ]

    def test_masks_hide_a_share_of_the_words(self, tokenizer):
        rows = np.tile(np.array([2, *range(5, 5 + 38), 3], dtype=np.int32), (400, 1))
        texts = PackedTexts(rows, tokenizer, masked=0.15)
        torch.manual_seed(0)
        shown = []
        kinds = {"mask": 0, "kept": 0, "other": 0}
        for i in range(len(texts)):
            inputs, targets = texts[i]
            assert len(targets) == 6
            assert torch.equal(torch.from_numpy(rows[i]).long()[inputs["positions"]], targets)
            assert inputs["input_ids"][0] == 2
            new = inputs["input_ids"][inputs["positions"]]
            shown.append(inputs["input_ids"])
            kinds["mask"] += int((new == 4).sum())
            kinds["kept"] += int((new == targets).sum())
        assert abs(kinds["mask"] / 2400 - 0.8) < 0.03
        assert abs(kinds["kept"] / 2400 - 0.1) < 0.03
        texts.fixed = True
        assert torch.equal(texts[3][0]["input_ids"], texts[3][0]["input_ids"])
        _, targets = PackedTexts(np.full((1, 20), 3, dtype=np.int32), tokenizer)[0]
        assert targets.tolist() == [IGNORED] * 3

    def test_batches_are_padded_to_their_longest(self, tokenizer):
        rows = [(("a b c d", "e"), 1.0), (("a", "b"), 0.0)]
        examples = glue.Sentences(rows, ("x", "y"), tokenizer, 16)
        batch, labels, messages = pad_batch(0, [(*examples[i], []) for i in range(2)])
        assert batch["input_ids"].shape == (2, 8)
        assert batch["attention_mask"].sum(1).tolist() == [8, 5]
        assert batch["token_type_ids"][0].tolist() == [0] * 6 + [1] * 2
        assert labels.tolist() == [1, 0]
        assert messages == []
        assert "attention_mask" not in pad_batch(0, [examples[1]])[0]

    def test_processes_have_equal_shares(self, tokenizer, monkeypatch):
        examples = glue.Sentences(
            [(("a",), float(i % 2)) for i in range(5)], ("x", "y"), tokenizer, 8
        )
        task = find_task("text_classification")(glue.TextClassificationPart(dataset="sst2"))
        monkeypatch.setattr(LanguageTask, "tokenizer", tokenizer)
        monkeypatch.setattr(Runtime, "maximum", lambda self, more: [next(steps)])

        def labels(rank):
            runtime = Runtime(torch.device("cpu"), False, rank, 2)
            batches = list(runtime.pad_batches(task.share_loader(examples, 1, 0, runtime)))
            for batch in batches:
                assert batch[0]["input_ids"].shape == (1, 3)
            return [batch[1].tolist() for batch in batches]

        steps = iter([1, 1, 1, 0] * 2)
        assert labels(0) == [[0], [0], [0]]
        assert labels(1) == [[1], [1], [REPEATED]]

    def test_repeated_sequences_do_not_count(self):
        logits = torch.randn(2, 3, 5)
        targets = torch.tensor([[4, 1, IGNORED], [REPEATED] * 3])
        sums = _masked_sums(logits, targets)
        assert torch.equal(sums, _masked_sums(logits[:1], targets[:1]))
        assert sums[2:].tolist() == [2, 1]

    def test_metrics(self):
        predicted = np.array([1, 1, 0, 0, 1])
        labels = np.array([1, 0, 0, 1, 1])
        found = glue.compute_metrics(("accuracy", "f1", "matthews"), predicted, labels)
        assert found == pytest.approx(dict(accuracy=60, f1=200 / 3, matthews=100 / 6, examples=5))
        scores = glue.compute_metrics(
            ("spearman", "pearson"), np.array([1.0, 2.0, 9.0]), np.array([0.0, 1.0, 2.0])
        )
        assert scores["spearman"] == pytest.approx(100)
        assert 90 < scores["pearson"] < 100


@pytest.fixture(scope="module")
def pretrained(root, tmp_path_factory):
    """The folder of a refined network's pre-training."""
    out = tmp_path_factory.mktemp("pre")
    values = pretraining(root)
    iso.train(
        validate({**values, "model": {**values["model"], "recast": REFINED}, "out": str(out)}),
        show=False,
    )
    return out


class TestRuns:
    def test_pretraining_resumes_bit_for_bit(self, root, tmp_path, pretrained):
        values = pretraining(root)
        values["model"] = {**values["model"], "recast": REFINED}
        stopped_run(tmp_path, 5, values)
        result = iso.train(validate({**values, "out": str(tmp_path)}), show=False)
        same_snapshots(tmp_path, pretrained)
        assert result.metrics["masked_loss"] < 5
        assert result.metrics["sequences"] == 8
        again = iso.evaluate(iso.load(tmp_path / "model.safetensors"), root / "text.txt")
        # of the part that was left out
        assert again == {name: result.metrics[name] for name in again}

    def test_fine_tuning_starts_from_it(self, root, tmp_path, pretrained, capsys):
        values = fine_tuning(root)
        values["model"] |= dict(weights=str(pretrained / "model.safetensors"), recast=REFINED)
        result = iso.train(validate({**values, "out": str(tmp_path)}), show=False)
        assert result.metrics.keys() >= {"accuracy", "examples", "loss"}
        model = open_given(str(tmp_path), CheckpointOptions())
        assert "EditedBertSelfAttention" in {type(module).__name__ for module in model.modules()}
        assert iso.evaluate(model)["accuracy"] == result.metrics["accuracy"]  # on the run's data
        assert (
            '"label_names": ["entailment", "not_entailment"]'
            in read_header(tmp_path / "model.safetensors")["data"]
        )
        evaluate_task(
            task_of(model),
            model,
            "",
            ClassifierOptions(),
            EvaluationOptions(str(root)),
            ALONE,
            json_=False,
        )
        assert "accuracy (%)" in capsys.readouterr().out

    def test_it_is_tested_on_the_text_of_its_run(self, pretrained, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        monkeypatch.delenv("ISOMORPH_DATA", raising=False)
        model = open_given(str(pretrained), CheckpointOptions())
        assert iso.evaluate(model)["sequences"] == 8

    def test_a_split_goes_before_a_test_file(self, root, tmp_path, pretrained):
        """A run with data.split tests on a part of its training text, also next to a dev.txt."""
        folder = tmp_path / "texts"
        folder.mkdir()
        (folder / "train.txt").write_text((root / "text.txt").read_text())
        (folder / "dev.txt").write_text("a b c d e f g h i " * 40)
        model = iso.load(pretrained / "model.safetensors")
        assert iso.evaluate(model, folder) == iso.evaluate(model, root / "text.txt")
        (folder / "train.txt").write_text("a b c " * 400)  # another text: its test file
        alone = iso.evaluate(model, folder / "dev.txt")
        assert iso.evaluate(model, folder) == alone
        (folder / "train.txt").unlink()
        (folder / "dev.txt").write_text((root / "text.txt").read_text())  # of as many sequences
        assert iso.evaluate(model, folder)["sequences"] == 42

    def test_a_changed_text_of_its_run_is_refused(self, root, tmp_path, pretrained):
        grown = tmp_path / "text.txt"
        grown.write_text((root / "text.txt").read_text() + "\n" + "a b c d e f g h i " * 40)
        model = iso.load(pretrained / "model.safetensors")
        record_root(model, {"data": {"root": str(grown)}})
        refused("in training, so the part", iso.evaluate, model, grown)
        record_root(model, {"data": {"root": str(root)}})
        assert iso.evaluate(model, grown)["sequences"] > 8  # another text

    def test_a_regression_and_a_split(self, root, tmp_path):
        values = fine_tuning(root, "stsb")
        values["data"] |= dict(split=0.25)
        result = iso.train(validate({**values, "out": str(tmp_path)}), show=False)
        assert result.metrics["examples"] == 6
        assert -100 <= result.metrics["spearman"] <= 100
        # what training left out
        assert len(task_of(result.model).open_test(result.model, "glue", root)) == 6

    def test_outputs_that_are_not_finite_have_no_metric(self, root):
        part = glue.TextClassificationPart(
            dataset="rte", tokenizer=str(root / "vocab.txt"), length=16
        )
        model = timm.create_model("text_transformer", **NETWORK, num_classes=2)
        model.table.data[6] = math.nan  # a letter of half of the texts
        with pytest.raises(NotFinite, match="outputs are not finite"):
            find_task("text_classification")(part).evaluate(
                model, EvaluationOptions("glue", root), ALONE
            )


RTE = "index\tsentence1\tsentence2\tlabel\n"
TEXTS = {"cola": ["sentence"], "sst2": ["sentence"], "mnli": ["premise", "hypothesis"]}
TEXTS |= {"qnli": ["question", "sentence"], "qqp": ["question1", "question2"]}
"""Columns of the hub's files; sentence1 and sentence2 in the others."""


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A folder of the parquet files of all tasks as on the hub, the training examples in two files."""
    folder = tmp_path_factory.mktemp("hub")
    for name in glue.GLUE:
        splits = ["train-00000-of-00002", "train-00001-of-00002"]
        splits += [
            f"{split}{'_matched' * (name == 'mnli')}-00000-of-00001"
            for split in ("validation", "test")
        ]
        for split in splits:
            write_parquet(
                folder / name / f"{split}.parquet", name, -1 if split.startswith("test") else 1
            )
    return folder


def write_parquet(path, name, first, /, **changes):
    path.parent.mkdir(exist_ok=True)
    texts = {
        column: [f"{column} one", f"{column} two"]
        for column in TEXTS.get(name, ["sentence1", "sentence2"])
    }
    labels = [float(first), 2.5] if name == "stsb" else [first, 0]
    columns = {**texts, "label": labels, "idx": [0, 1]} | changes
    write_table(
        pyarrow.table({key: value for key, value in columns.items() if value is not None}), path
    )


def test_a_name_on_the_hub(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(glue, "impatient_hub", nullcontext)
    asked = []
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda *given, **more: asked.append((given, more)) or hub,
    )
    assert glue.read_examples(glue.open_root(Path("nyu-mll/glue"), ["rte"]), "rte", "test")
    assert asked == [
        (("nyu-mll/glue",), dict(repo_type="dataset", allow_patterns=["rte/*.parquet"]))
    ]
    assert glue.open_root(hub) == hub


def test_columns_by_name_and_number(root):
    assert glue.read_file(root / "CoLA/dev.tsv", glue.GLUE["cola"])[1] == (('b "c',), 0)
    assert glue.read_file(root / "STS-B/dev.tsv", glue.GLUE["stsb"])[0] == (("a b", "c d"), 2.5)
    assert len(glue.training_sentences(root)) == 12 * (2 * 2 + 2 + 2 * 2)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rte", "index\tlabel\n", "has the columns index, label, and RTE needs .*'sentence1'"),
        ("rte", f"{RTE}0\ta\tb\n", "line 2: 3 columns, and 4 are needed"),
        ("rte", f"{RTE}0\ta\tb\tmaybe\n", "line 2: label 'maybe' is unknown; use ent"),
        *(
            (
                "stsb",
                f"sentence1\tsentence2\tscore\na\tb\t{n}\n",
                f"line 2: label '{n}' is not a score; .* 0 to 5",
            )
            for n in ("nan", "5.1")
        ),
    ],
)
def test_what_is_wrong_is_said(tmp_path, name, content, message):
    path = tmp_path / "train.tsv"
    path.write_text(content)
    with pytest.raises(iso.UserError, match=message):
        glue.read_file(path, glue.GLUE[name])


@pytest.mark.parametrize("name", sorted(glue.GLUE))
def test_files_as_on_the_hub(hub, name):
    texts = TEXTS.get(name, ["sentence1", "sentence2"])
    first = (tuple(f"{column} one" for column in texts), 1.0)
    assert glue.read_examples(hub, name, "train")[::2] == [first, first]
    assert glue.read_examples(hub / name, name, "test")[0] == first
