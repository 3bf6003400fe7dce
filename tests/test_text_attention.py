"""Refined attention and pyramids in transformers' text models: same function, no leak from padding, the way back."""

import copy

import pytest
import torch

import isomorph as iso
from refusals import refused
from requirements import optional
from test_map_edit import train_edits

transformers = optional("transformers", "nlp")

SIZES = dict(
    vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
)
BERT_SIZES = dict(SIZES, max_position_embeddings=40)
DISTILBERT_SIZES = dict(
    vocab_size=50, dim=32, n_layers=2, n_heads=4, hidden_dim=64, max_position_embeddings=40
)
FAMILIES = {
    "bert": ("Bert", BERT_SIZES, "*.attention.self"),
    "electra": ("Electra", dict(BERT_SIZES, embedding_size=16), "*.attention.self"),
    "roberta": ("Roberta", dict(BERT_SIZES, pad_token_id=0), "*.attention.self"),
    "distilbert": ("DistilBert", DISTILBERT_SIZES, "*.attention"),
}
LENGTHS = (12, 9, 5)
RULE = iso.AttentionToRefined(ratio=3)


def build(family, **changes):
    name, sizes, where = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(sizes | changes))
    return getattr(transformers, f"{name}Model")(config).eval(), where


def padded_batch(left=False):
    """Sequences of unequal lengths with their mask, padded on the right or left."""
    torch.manual_seed(1)
    ids = torch.randint(1, 50, (len(LENGTHS), max(LENGTHS)))
    mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).long()
    mask = mask.flip(1) if left else mask
    return dict(input_ids=ids * mask, attention_mask=mask)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    model, where = build(request.param)
    return model, iso.recast(model, RULE, where=where)


def test_same_function_on_unequal_lengths(family):
    plain, refined = family
    report = iso.verify(plain, refined, [padded_batch(), padded_batch(left=True)])
    assert report.fp64 < 1e-6
    assert [target.kind for target in report.targets] == [
        f"Edited{type(plain).__name__[:-5]}SelfAttention"
    ] * 2
    assert "input_ids 3x12, attention_mask 3x12" in str(report)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_padding_leaks_nothing(family, implementation):
    model = train_edits(copy.deepcopy(family[1])).double()
    model.set_attn_implementation(implementation)
    batch = padded_batch()
    together = model(**batch).last_hidden_state
    weights = torch.randn(together.shape, dtype=torch.float64)
    parameters = [p for name, p in model.named_parameters() if "pooler" not in name]
    real = batch["attention_mask"][..., None].bool()
    gradients = torch.autograd.grad((together * weights * real).sum(), parameters)
    alone_loss = 0
    for i, n in enumerate(LENGTHS):
        alone = model(input_ids=batch["input_ids"][i : i + 1, :n]).last_hidden_state
        assert (alone[0] - together[i, :n]).abs().max() < 1e-12
        alone_loss = alone_loss + (alone[0] * weights[i, :n]).sum()
    for one, other in zip(torch.autograd.grad(alone_loss, parameters), gradients, strict=True):
        assert (one - other).abs().max() <= 1e-12 * max(1, other.abs().max())


def test_the_way_back(family):
    plain, refined = family
    back = iso.revert(refined)
    layers = [(a, b) for a, b in zip(plain.modules(), back.modules(), strict=True)]
    for a, b in layers:
        assert type(a) is type(b)
    for _, b in layers:
        if hasattr(b, "config"):
            assert b.config is back.config
    torch.testing.assert_close(back(**padded_batch()), plain(**padded_batch()), atol=0, rtol=0)
    refused(
        r"not plain attention: its maps' relative deviation",
        iso.revert,
        train_edits(copy.deepcopy(refined)),
    )


@pytest.fixture(scope="module")
def bert():
    model, where = build("bert")
    return model, train_edits(iso.recast(model, RULE, where=where))


def test_a_mask_of_two_segments_is_kept_apart(bert):
    model = copy.deepcopy(bert[1]).double()
    ids = torch.randint(1, 50, (1, 12))
    segment = torch.arange(12) >= 7
    positions = torch.cat([torch.arange(7), torch.arange(5)])[None]
    together = model(
        ids, attention_mask=(segment[:, None] == segment)[None, None], position_ids=positions
    )
    alone = model(ids[:, 7:], position_ids=positions[:, 7:]).last_hidden_state
    torch.testing.assert_close(together.last_hidden_state[:, 7:], alone, atol=1e-12, rtol=0)


def gpt2():
    config = transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=1, n_head=4, n_positions=16)
    return transformers.GPT2Model(config)


@pytest.mark.parametrize(
    ("make", "rule", "reason"),
    [
        (gpt2, RULE, "GPT2Attention is causal"),
        (
            lambda: build("bert")[0],
            iso.AttentionToRefined(span="spatial"),
            "words in a row, which is not a grid",
        ),
        (
            lambda: build("bert")[0],
            iso.AttentionToRefined(reduce=False),
            "only timm's Attention gets",
        ),
    ],
)
def test_rejected_by_reason(make, rule, reason):
    refused(
        reason,
        iso.recast,
        make(),
        rule,
        where=lambda name, module: name.endswith(("attention.self", "0.attn")),
    )
