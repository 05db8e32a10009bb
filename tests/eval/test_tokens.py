from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kvquant_eval import tokens as subject
from kvquant_eval.errors import InputError
from kvquant_eval.texts import default_text
from kvquant_eval.tokens import Tokens, check_vocabulary, tokenise

from .tiny import SAMPLE, tiny_tokenizer


def _merging_everything() -> PreTrainedTokenizerFast:
    """A BPE without word boundaries, as SentencePiece models have: merges reach across blanks."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Split("\n\n\n", "isolated")
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False)
    tokenizer.train_from_iterator([default_text().content[:20_000]], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("make", [tiny_tokenizer, _merging_everything])
@pytest.mark.parametrize("text", [default_text().content[:30_000], "a" * 5000, " " * 3000 + "x" * 3000, SAMPLE])
def test_a_prefix_gives_the_ids_of_the_whole(monkeypatch: pytest.MonkeyPatch, make: Any, text: str) -> None:
    monkeypatch.setattr(subject, "_MARGIN", 64)
    monkeypatch.setattr(subject, "_CHARACTERS_PER_TOKEN", 1)
    tokenizer = make()
    whole = tokenizer(text, verbose=False)["input_ids"]
    for wanted in (1, 2, 17, 100, 1000, len(whole) - 1, len(whole), len(whole) + 1):
        assert tokenise(tokenizer, text, wanted).ids.tolist() == whole[:wanted]


def test_only_a_prefix_of_a_long_text_is_read() -> None:
    tokenizer = tiny_tokenizer()
    read = []

    def spy(text: str, **options: Any) -> Any:
        read.append(len(text))
        return tokenizer(text, **options)

    assert len(tokenise(spy, SAMPLE * 1000, 100).ids) == 100
    assert max(read) < 20_000


def test_bos_follows_the_tokenizer() -> None:
    without, with_one = tokenise(tiny_tokenizer(), SAMPLE, 50), tokenise(tiny_tokenizer(bos=True), SAMPLE, 50)
    assert without.bos == "0 BOS tokens (the tokenizer adds none)"
    assert with_one.bos == "1 BOS token (<s> = 0), as the tokenizer adds"
    assert with_one.ids.tolist() == [0, *without.ids.tolist()[:49]]


def test_an_end_mark_is_left_out() -> None:
    tokenizer = tiny_tokenizer()

    def marked(text: str, add_special_tokens: bool = True, **options: Any) -> Any:
        ids = tokenizer(text, add_special_tokens=False, **options)["input_ids"]
        return {"input_ids": [*ids, 1] if add_special_tokens else ids}

    assert 1 not in tokenise(marked, "a word", 50).ids.tolist()


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("text", ["", "a"])
def test_hardly_any_text(text: str, bos: bool) -> None:
    tokens = tokenise(tiny_tokenizer(bos), text, 10)
    assert len(tokens.ids) == len(text) + bos
    assert tokens.ids.dtype == torch.int64


def test_a_tokenizer_of_another_model_is_refused(llama: Any) -> None:
    check_vocabulary(Tokens(torch.tensor([96]), ""), llama)
    check_vocabulary(Tokens(torch.tensor([], dtype=torch.long), ""), llama)
    with pytest.raises(InputError, match=r"model: .* id 97, .* 0 to 96"):
        check_vocabulary(Tokens(torch.tensor([3, 97]), ""), llama)
