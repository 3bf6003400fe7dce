"""BERT-Small with and without refined attention: masked-word pre-training, and fine-tuning on GLUE (Refiner Table 6).

1.45M steps of 128 sequences of 128 tokens of English Wikipedia and BookCorpus, then 3 epochs of each task (10 of RTE
and STS-B), with ELECTRA's settings. What the paper leaves open: docs/guides/readings.md.

The corpora are text files of your own (`--data.root FOLDER`). `bert_narrow*` and `glue_*_narrow*` are runs that two CPU
cores finish.
"""

from typing import Any

# Refined attention in all layers, which computes what BERT's attention computed until it is trained.
REFINED: dict[str, Any] = dict(rule="AttentionToRefined", ratio=3, where="*.attention.self")

NARROW: dict[str, Any] = dict(
    family="bert", hidden_size=128, num_hidden_layers=4, num_attention_heads=4
)
# A BERT of 4.8M parameters, 3.9M of them word embeddings.
NARROW |= dict(intermediate_size=512, max_position_embeddings=128)

# Published results of BERT-Small on the development sets, plain and with refined attention.
TABLE_6 = {"mnli": (75.8, 78.1), "qnli": (83.7, 86.4), "qqp": (86.8, 88.0), "rte": (57.4, 57.6)}
TABLE_6 |= {"sst2": (88.4, 88.8), "mrpc": (83.8, 84.1), "cola": (41.6, 42.2), "stsb": (83.6, 84.0)}
_METRICS = {"cola": "Matthews correlation", "stsb": "Spearman correlation"}


def _pretraining(refined: bool) -> dict[str, Any]:
    return dict(
        task=dict(name="masked_lm"),
        model=dict(name="bert_small", **(dict(recast=REFINED) if refined else {})),
        data=dict(source="text", batch_size=128, workers=4),
        optim=dict(
            lr=5e-4, weight_decay=0.01, schedule="linear", warmup_iterations=10_000, clip_grad=1.0
        ),
        iterations=1_450_000,
        amp="bf16",
        source="Refiner Table 6, pre-training as BERT-Small in ELECTRA's paper",
        expected="average of 8 GLUE tasks 76.1 after fine-tuning"
        if refined
        else "average of 8 GLUE tasks 75.1",
    )


def _narrow_pretraining(refined: bool) -> dict[str, Any]:
    return dict(
        task=dict(name="masked_lm", length=64),
        model=dict(
            name="text_transformer", kwargs=NARROW, **(dict(recast=REFINED) if refined else {})
        ),
        data=dict(source="glue", batch_size=32, test_images=200),
        optim=dict(lr=2e-3, weight_decay=0.01, schedule="linear", warmup_epochs=0.3, clip_grad=1.0),
        epochs=3,
        source="Refiner Table 6 in small, docs/guides/language.md",
    )


def _fine_tuning(dataset: str, refined: bool, narrow: bool) -> dict[str, Any]:
    pretraining = ("bert_narrow" if narrow else "bert_small") + "_refined" * refined
    network: dict[str, Any] = (
        dict(name="text_transformer", kwargs=NARROW) if narrow else dict(name="bert_small")
    )
    network |= dict(weights=f"runs/{pretraining}/model.safetensors") | (
        dict(recast=REFINED) if refined else {}
    )
    epochs = 10 if dataset in ("rte", "stsb") else 3  # as in ELECTRA
    published = TABLE_6[dataset][refined]
    return dict(
        task=dict(name="text_classification", dataset=dataset)
        | (dict(length=64) if narrow else {}),
        model=network,
        data=dict(source="glue", batch_size=32),
        optim=dict(
            lr=3e-4,
            weight_decay=0.01,
            layer_decay=0.8,
            schedule="linear",
            warmup_epochs=epochs / 10,
        )
        | dict(clip_grad=1.0),
        epochs=epochs,
        source=f"Refiner Table 6{' in small' if narrow else ''}, {dataset}",
        expected=""
        if narrow
        else f"{published} {_METRICS.get(dataset, 'accuracy')} on the development set",
    )


RECIPES: dict[str, dict[str, Any]] = {
    "bert_small": _pretraining(refined=False),
    "bert_small_refined": _pretraining(refined=True),
    "bert_narrow": _narrow_pretraining(refined=False),
    "bert_narrow_refined": _narrow_pretraining(refined=True),
    **{
        f"glue_{dataset}{'_narrow' * narrow}{'_refined' * refined}": _fine_tuning(
            dataset, refined, narrow
        )
        for dataset in TABLE_6
        for narrow in (False, True)
        for refined in (False, True)
        if not narrow or dataset in ("sst2", "cola", "rte", "mrpc")
    },
}
