"""Transformer encoders for text, built on transformers: BERT, ELECTRA, RoBERTa, DistilBERT and their relatives.

With `num_classes` 0 a network predicts the words at masked positions, for pre-training; otherwise it classifies
sequences, or sentence pairs, by their first token.
"""

import dataclasses
from collections import OrderedDict
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from timm.models import generate_default_cfgs
from torch import Tensor, nn

from isomorph.errors import UserError, optional_module
from isomorph.models.base import State, Variant, build_variant, register_variants
from isomorph.spec import ImageSize

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class WordHead(nn.Module):
    """Predict words from the tokens' vectors: a layer to the width of the embeddings, then the embeddings as weights.

    y = LayerNorm(GELU(W x + b)) E^T + c, with the table E of the word embeddings.

    Shape: x (..., C), table (V, D) -> (..., V)
    Source: BERT (Devlin et al., 2018), masked LM
    """

    def __init__(self, width: int, table: Tensor) -> None:
        super().__init__()
        self.dense = nn.Linear(width, table.shape[1])
        self.norm = nn.LayerNorm(table.shape[1], eps=1e-12)
        self.bias = nn.Parameter(torch.zeros(table.shape[0]))

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return F.linear(self.norm(F.gelu(self.dense(x))), table, self.bias)


class TextTransformer(nn.Module):
    """Encoder of token sequences, any of transformers' that are trained with masked words, with a head.

    `family` is transformers' name of the architecture; the further arguments are the fields of its configuration, such
    as hidden_size. With `positions`, words are predicted at these positions only, which saves most of the work.

    Shape: input_ids (B, N), attention_mask (B, N), 1 for real tokens, token_type_ids (B, N), positions (B, K)
    -> (B, num_classes), or with num_classes 0 (B, N, V), or (B, K, V) at positions
    Raises: UserError without transformers, for an unknown family or field, and for sequences longer than `max_length`.

    >>> net = timm.create_model("bert_small", num_hidden_layers=1, num_classes=3)
    >>> net(torch.tensor([[101, 7592, 102]])).shape
    torch.Size([1, 3])
    """

    in_chans: None = None

    def __init__(self, family: str = "bert", num_classes: int = 0, **fields: Any) -> None:
        super().__init__()
        transformers = optional_module(
            "transformers", "text transformers need the package transformers", "nlp"
        )
        settings = build_config(family, fields)
        self.body = transformers.AutoModel.from_config(settings, trust_remote_code=False)
        if hasattr(self.body, "pooler"):
            self.body.pooler = None  # the head reads the first token itself
        self.num_classes = num_classes
        self.num_features = self.head_hidden_size = settings.hidden_size
        self.head = self._new_head()

    @property
    def table(self) -> Tensor:
        """The word embeddings. Shape: -> (V, D)"""
        return self.body.get_input_embeddings().weight

    @property
    def max_length(self) -> int:
        """The largest number of tokens in a sequence."""
        embeddings = getattr(self.body, "embeddings", None)
        positions = getattr(embeddings, "position_embeddings", None)
        if positions is None:
            return getattr(self.body.config, "max_position_embeddings", 2**20)
        if positions.padding_idx is None:
            return positions.num_embeddings
        # positions are counted from there
        return positions.num_embeddings - positions.padding_idx - 1

    def _new_head(self) -> nn.Module:
        config = self.body.config
        drop = getattr(config, "hidden_dropout_prob", getattr(config, "dropout", 0.1))
        if self.num_classes:  # dropout before the layer, as in ELECTRA's code for fine-tuning
            layers = dict(drop=nn.Dropout(drop), fc=nn.Linear(self.num_features, self.num_classes))
            head: nn.Module = nn.Sequential(OrderedDict(layers))
        else:
            head = WordHead(self.num_features, self.table)
        for layer in head.modules():
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=getattr(config, "initializer_range", 0.02))
                nn.init.zeros_(layer.bias)
        return head.to(self.table.device, self.table.dtype)

    def forward_features(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        """Return the vectors of the tokens. Shape: (B, N) -> (B, N, C)"""
        if input_ids.shape[1] > self.max_length:
            raise UserError(
                f"a sequence of {input_ids.shape[1]} tokens is longer than the network's {self.max_length}",
            )
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        if getattr(self.body.config, "type_vocab_size", 0) > 1:
            inputs["token_type_ids"] = token_type_ids
        return self.body(**inputs).last_hidden_state

    def forward_head(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return the class logits, or those of the words. Shape: x (B, N, C) -> (B, num_classes) or (B, N or K, V)"""
        if self.num_classes:
            return self.head(x[:, 0])
        if positions is not None:
            x = x.gather(1, positions[..., None].expand(-1, -1, x.shape[-1]))  # (B, K, C)
        return self.head(x, self.table)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        features = self.forward_features(input_ids, attention_mask, token_type_ids)
        return self.forward_head(features, positions)

    def example_inputs(self, batch: int, size: ImageSize | None = None) -> dict[str, Tensor]:
        """Return random sequences of unequal lengths up to N, for a size (1, N). Shape: -> ids and mask (batch, N)"""
        N = size[-1] if size else min(64, self.max_length)
        generator = torch.Generator().manual_seed(0)
        padding = getattr(self.body.config, "pad_token_id", None) or 0
        ids = torch.randint(padding + 1, self.table.shape[0], (batch, N), generator=generator)
        lengths = torch.linspace(N, max(1, N // 2), batch).round()
        mask = torch.arange(N) < lengths[:, None]
        return {"input_ids": ids.where(mask, torch.tensor(padding)), "attention_mask": mask.long()}

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head by a new one for another number of classes; 0 predicts words."""
        self.num_classes = num_classes
        self.head = self._new_head()

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return patterns of parameter names by layer, for layer decay: embeddings 0, block i is i + 1, then a head."""
        blocks = [(r"^body\.\w+\.layer\.(\d+)", None), (r"^(?:head|body)\.", (99998,))]
        return dict(stem=r"^body\.embeddings", blocks=blocks)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute layers in the backward pass instead of storing their activations."""
        if enable:
            self.body.gradient_checkpointing_enable()
        else:
            self.body.gradient_checkpointing_disable()


def build_config(family: str, fields: dict[str, Any]) -> "PreTrainedConfig":
    """Return transformers' configuration of a family with these fields.

    Raises: UserError for a family that is not trained with masked words, or a field that it does not have.
    """
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    if family not in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        examples = "bert, electra, roberta, distilbert or another that transformers trains with masked words"
        raise UserError(
            f"family {family!r} is not an encoder of text with masked words; choose {examples}",
        )
    kind = CONFIG_MAPPING[family]
    names = [field.name for field in dataclasses.fields(kind)] + list(kind.attribute_map)
    for name in fields.keys() - names:
        suggestions = get_close_matches(name, names, n=1, cutoff=0)
        raise UserError(f"{name} is not a field of {family}; did you mean {suggestions[0]}?")
    if "use_cache" in names:
        fields = {"use_cache": False, **fields}
    return kind(**fields)


def checkpoint_filter_fn(state: State, model: TextTransformer) -> State:
    """Convert a checkpoint of transformers or of another head; the model's own head replaces one of another kind."""
    if not any(name.startswith("body.") for name in state):
        state = _body_state(state, f"{model.body.base_model_prefix}.")
    unused = (
        "body.pooler.",
        "body.embeddings.position_ids",
        "body.embeddings.token_type_ids",
        "head.",
    )
    converted = {name: tensor for name, tensor in state.items() if not name.startswith(unused)}
    head = {name: tensor for name, tensor in state.items() if name.startswith("head.")}
    own_head = model.head.state_dict(prefix="head.")
    return converted | (head if head.keys() == own_head.keys() else own_head)


def _body_state(state: State, prefix: str) -> State:
    """Return the tensors of transformers' base model, which other models have under a prefix."""
    if any(name.startswith(prefix) for name in state):
        state = {
            name.removeprefix(prefix): tensor
            for name, tensor in state.items()
            if name.startswith(prefix)
        }
    body = {}
    for name, tensor in state.items():
        name = name.replace("LayerNorm.gamma", "LayerNorm.weight")  # of the first BERTs
        name = name.replace("LayerNorm.beta", "LayerNorm.bias")
        body[f"body.{name}"] = tensor
    return body


_SMALL = dict(
    family="electra",
    embedding_size=128,
    hidden_size=256,
    intermediate_size=1024,
    num_hidden_layers=12,
    num_attention_heads=4,
)
VARIANTS = {
    "bert_small": Variant(
        _SMALL,
        "BERT-Small of ELECTRA: 12 layers of width 256, embeddings of width 128, 13.5M parameters (Refiner Table 6).",
    ),
    "bert_base": Variant(dict(family="bert"), "BERT-Base, uncased: 12 layers of width 768."),
    "roberta_base": Variant(
        dict(
            family="roberta",
            vocab_size=50265,
            max_position_embeddings=514,
            type_vocab_size=1,
            layer_norm_eps=1e-5,
        ),
        "RoBERTa-Base: 12 layers of width 768, with a vocabulary of 50,265 byte pairs.",
    ),
    "distilbert_base": Variant(
        dict(family="distilbert"), "DistilBERT-Base, uncased: 6 layers of width 768."
    ),
    "text_transformer": Variant(
        {}, "Any encoder of transformers that is trained with masked words, by family and fields."
    ),
}
_HUB_NAMES = {
    "bert_base": "google-bert/bert-base-uncased",
    "roberta_base": "FacebookAI/roberta-base",
    "distilbert_base": "distilbert/distilbert-base-uncased",
}


def _pretrained_cfg(name: str) -> dict[str, Any]:
    cfg: dict[str, Any] = dict(num_classes=0, input_size=None, classifier="head", first_conv=None)
    if name in _HUB_NAMES:
        return {**cfg, "hf_hub_id": _HUB_NAMES[name]}
    return {**cfg, "url": ""}


default_cfgs = generate_default_cfgs({name: _pretrained_cfg(name) for name in VARIANTS})
register_variants(__name__, partial(build_variant, TextTransformer), VARIANTS)
