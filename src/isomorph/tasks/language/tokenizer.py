"""Tokenisers of transformers, by vocabulary file, folder or hub name, and whether one belongs to a network."""

from functools import cache
from pathlib import Path
from typing import Any

from isomorph.errors import UserError, install_hint

UNUSED_EMBEDDINGS = 256
"""Most embeddings of a network that its tokeniser may leave unused: sizes are rounded up to multiples of 64 to 256."""
_NEEDED = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@cache
def open_tokenizer(source: str, lower_case: bool = True) -> Any:
    """Return a tokeniser of transformers: a vocabulary of BERT (vocab.txt), a folder, or a name on the hub.

    `lower_case` is for vocabulary files alone: a folder says itself what its tokeniser does.

    Raises: UserError if it cannot be opened, or lacks a special token that masked words need.
    """
    try:
        from transformers import AutoTokenizer, BertTokenizerFast
    except ImportError:
        raise UserError(f"tokenisers need the package transformers; {install_hint('nlp')}") from None
    if Path(source).is_file():
        _check_vocabulary(Path(source))
        return BertTokenizerFast(vocab=source, do_lower_case=lower_case)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except Exception as error:  # those of the hub, of json, and of transformers
        reason = "" if source.startswith((".", "/", "~")) else f" that answers: {' '.join(str(error).split())[:160]}"
        raise UserError(
            f"task.tokenizer {source!r} is not a vocabulary file, a folder or a name on the hub{reason}"
        ) from None
    missing = [name for name in ("pad", "cls", "sep", "mask") if getattr(tokenizer, f"{name}_token_id") is None]
    if missing:
        raise UserError(f"task.tokenizer {source} has no {missing[0]} token, so it is not that of an encoder of text")
    return tokenizer


def _check_vocabulary(path: Path) -> None:
    """Raise UserError for a file that is not a vocabulary of BERT, one token a line."""
    try:
        words = set(path.read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"task.tokenizer {path} cannot be read: {error}") from None
    missing = [token for token in _NEEDED if token not in words]
    if missing:
        raise UserError(f"task.tokenizer {path} is not a vocabulary of BERT, one token a line: it has no {missing[0]}")


def check_tokenizer(tokenizer: Any, source: str, model: Any, length: int) -> None:
    """Check that a tokeniser belongs to a network, and that the network takes sequences of this length.

    Raises: UserError saying what to give instead.
    """
    if not hasattr(model, "max_length"):
        kind = type(model).__name__
        raise UserError(f"{kind} is not a network for text; give model.name bert_small or text_transformer")
    if length > model.max_length:
        raise UserError(
            f"task.length {length} is longer than the network's {model.max_length} positions; lower it, or give "
            "model.kwargs.max_position_embeddings"
        )
    words, rows = len(tokenizer), model.table.shape[0]
    if not rows - UNUSED_EMBEDDINGS <= words <= rows:
        raise UserError(
            f"task.tokenizer {source} does not belong to this network: it has {words:,} tokens, and the network "
            f"{rows:,} word embeddings; give the network's own tokenizer, or model.kwargs.vocab_size {words}"
        )
    padding = getattr(model.body.config, "pad_token_id", None)
    if padding is not None and padding != tokenizer.pad_token_id:
        raise UserError(
            f"task.tokenizer {source} does not belong to this network: its padding is token {tokenizer.pad_token_id}, "
            f"the network's {padding}; give the network's own tokenizer, or model.kwargs.pad_token_id"
        )
