"""The two texts of a tuning: one to measure on, and one that nothing was chosen by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InputError
from ..models import LoadedModel
from ..options import format_context
from ..texts import Text, find_text
from ..tokens import Tokens, check_vocabulary, leading_ids, tokenise


@dataclass(frozen=True)
class Passages:
    """Token ids, int64 ``[context]`` each, and in words where they are from; without a comparison only the first."""

    calibration: Tensor
    held_out: Tensor | None
    facts: dict[str, str]


def find_texts(text: Sequence[str], held_out: Sequence[str], context: int) -> tuple[Text, Text | None]:
    """What ``--text`` and ``--held-out`` name, at least as far as two contexts reach. Raises `InputError`."""
    calibration = find_text(text, 2 * context)
    if not held_out:
        return calibration, None
    try:
        return calibration, find_text(held_out, context)
    except InputError as error:
        # Texts are read for one option everywhere else.
        raise InputError(str(error).replace("--text:", "--held-out:")) from error


def cut(loaded: LoadedModel, text: Text, other: Text | None, context: int, verify: bool) -> Passages:
    """The first ``context`` tokens of ``text``, and if ``verify`` those that follow, or the first of ``other``.

    A tokenizer's BOS leads both. Raises `InputError` where a text is too short, or both passages are the same.
    """
    tokens = _tokens(loaded, text, context * (2 if verify and other is None else 1))
    calibration, following = tokens.ids[:context], tokens.ids[context:]
    facts = {"text": f"{_named(text)}, its first {context} tokens; {tokens.bos}"}
    if len(calibration) < context:
        raise InputError(
            f"--text: {text.name}: only {len(calibration)} tokens; allowed: at least --context "
            f"({format_context(context)}), and as many again for the comparison unless --held-out names another text"
        )
    if not verify:
        return Passages(calibration, None, facts)
    if other is None:
        lead = torch.tensor(leading_ids(loaded.tokenizer), dtype=torch.long)
        held_out = torch.cat((lead, following))[:context]
        facts["held-out text"] = f"the {len(following[: context - len(lead)])} tokens that follow"
    else:
        held_out = _tokens(loaded, other, context).ids
        facts["held-out text"] = f"{_named(other)}, its first {context} tokens"
    if len(held_out) < context:
        name, what = ("--text", "beyond --context") if other is None else ("--held-out", "in all")
        raise InputError(
            f"{name}: {(other or text).name}: only {len(held_out)} tokens {what}, but held-out text takes "
            f"{context}; allowed: a longer text, a shorter --context, another text as --held-out, or --no-verify"
        )
    if torch.equal(calibration, held_out):
        raise InputError("--held-out: the same tokens as --text, which prove nothing; allowed: another text")
    return Passages(calibration, held_out, facts)


def _tokens(loaded: LoadedModel, text: Text, count: int) -> Tokens:
    tokens = tokenise(loaded.tokenizer, text.content, count)
    check_vocabulary(tokens, loaded.model)
    return tokens


def _named(text: Text) -> str:
    return f"{text.name}, SHA-256 `{text.sha256}`"
