"""Token ids of a text, as the whole text gives them, without tokenising more of it than needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .errors import InputError

_CHARACTERS_PER_TOKEN = 8  # more than most tokenizers need, so that one try is enough
_MARGIN = 4096


@dataclass(frozen=True)
class Tokens:
    """``ids``: int64 ``[n]``, at most as many as asked for; ``bos`` says which of them no text stands behind."""

    ids: Tensor
    bos: str


def tokenise(tokenizer: Any, text: str, wanted: int) -> Tokens:
    """The first ``wanted`` ids of the text (fewer if it is shorter), led by the tokenizer's own BOS if it has one.

    The text is never cut into pieces: a prefix is tokenised, and its ids are used as far as those of a prefix
    twice as long agree, so that no id depends on where the prefix ends.
    """
    bos = leading_ids(tokenizer)
    body = _prefix_ids(tokenizer, text, max(0, wanted - len(bos)))
    return Tokens(torch.tensor((bos + body)[:wanted], dtype=torch.long), _describe(tokenizer, bos))


def check_vocabulary(tokens: Tokens, model: Any) -> None:
    """Raises `InputError` if the tokenizer makes ids that the model has no embedding for."""
    highest = int(tokens.ids.max()) if len(tokens.ids) else -1
    rows = model.get_input_embeddings().weight.shape[0]
    if highest >= rows:
        raise InputError(f"model: its tokenizer gives id {highest}, but the model knows only 0 to {rows - 1}")


def _prefix_ids(tokenizer: Any, text: str, wanted: int) -> list[int]:
    length = wanted * _CHARACTERS_PER_TOKEN + _MARGIN
    ids = _encode(tokenizer, text[:length])
    while length < len(text):
        length *= 2
        longer = _encode(tokenizer, text[:length])
        if len(ids) >= wanted and ids[:wanted] == longer[:wanted]:
            break
        ids = longer
    return ids[:wanted]


def _encode(tokenizer: Any, text: str, special: bool = False) -> list[int]:
    # verbose=False: texts longer than the model's context are the point here, not worth a warning.
    ids: list[int] = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    return list(ids)


def leading_ids(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before a text; what it puts after one (an end mark) is left out."""
    plain, marked = _encode(tokenizer, "a"), _encode(tokenizer, "a", special=True)
    for start in range(len(marked) - len(plain) + 1):
        if plain and marked[start : start + len(plain)] == plain:
            return marked[:start]
    return []


def _describe(tokenizer: Any, bos: list[int]) -> str:
    if not bos:
        return "0 BOS tokens (the tokenizer adds none)"
    names = ", ".join(f"{tokenizer.convert_ids_to_tokens(token)} = {token}" for token in bos)
    return f"{len(bos)} BOS token{'s' if len(bos) > 1 else ''} ({names}), as the tokenizer adds"
