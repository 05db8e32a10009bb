"""Tiny random models, a tiny tokenizer, and policies with blocks small enough to matter at these lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvquant import PrecisionPolicy, get_codec

BLOCK = RECENT = 8
FIRST_SCORED = 2 * (BLOCK + RECENT)
SAMPLE = "In the beginning was the word, and 42 words were counted twice.\n\tSo it goes; élan, naïve, 日本.\n" * 40


def scored(context: int, chunk: int, count: int, others: tuple[int, ...] = ()) -> list[int]:
    """Targets scored for a context under `small_policy`, token by token from the definition."""
    starts = {*range(0, context, chunk), *others}
    targets = []
    for target in range(max(1, context - count), context):
        start = max(start for start in starts if start < target)
        sealed = max(0, start - RECENT) // BLOCK * BLOCK
        if target >= FIRST_SCORED and 2 * sealed >= target:
            targets.append(target)
    return targets


def tiny_llama(seed: int = 0, **settings: Any) -> Any:
    """Weights large enough that predictions are far from uniform and quantisation shows."""
    shape = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
    }
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**(shape | settings))).eval()


def tiny_gpt2() -> Any:
    """64 learned positions: one more is an index error."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=97, n_positions=64, n_embd=64, n_layer=2, n_head=4, initializer_range=0.2)
    return GPT2LMHeadModel(config).eval()


def small_policy(codec: str, name: str | None = None, **settings: Any) -> PrecisionPolicy:
    settings = {"block_tokens": BLOCK, "recent_tokens": RECENT, "sink_tokens": 4} | settings
    return PrecisionPolicy(name=name or codec, default={"key": codec, "value": codec}, **settings)


class Stand:
    """Stores what raw storage does, changed by ``spoil`` on the way in or out."""

    lossless = False

    def __init__(self, name: str, spoil: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.name = name
        self._spoil = spoil
        self._raw = get_codec("fp16")

    def layout(self, heads: int, tokens: int, dim: int, dtype: torch.dtype) -> Any:
        return self._raw.layout(heads, tokens, dim, dtype)

    def encode(self, blocks: torch.Tensor) -> Any:
        return self._raw.encode(self._spoil(blocks))

    def decode(self, fields: Any, dim: int, dtype: torch.dtype) -> torch.Tensor:
        return self._raw.decode(fields, dim, dtype)


def tiny_tokenizer(bos: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 300 ids, trained on `SAMPLE`; ``<s>`` is 0 and leads a text if ``bos``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([SAMPLE], trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
