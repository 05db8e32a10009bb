"""The needle probe: facts planted in a text at several depths, and asked for at its end.

::

    0                                                                 context
    |  text  · fact · text · fact ·  …  · text  | question, answer |
       depth 0.1      0.3                         one at a time, each on a copy of the cache

Perplexity hides the loss of a single token far back; an answer shows it. Answers are not generated but given: scored
are their log-probability, token by token, and whether every token was the most likely one. At short contexts the last
depths may lie in the raw tail, where nothing is lost. Compare NIAH (Kamradt, 2023) and RULER's several needles (Hsieh
et al., 2024).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .exact import branch, exact_cache
from .protocols import NewCache, take_over
from .rows import Needle
from .walk import EXACT_CHUNK, chunk_bounds, forward

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
PLACES = (
    *("Oslo", "Lima", "Cairo", "Kyoto", "Quito", "Riga", "Hanoi", "Turin", "Accra", "Perth"),
    *("Sofia", "Dakar", "Leeds", "Minsk", "Osaka", "Porto", "Tunis", "Zagreb", "Bergen", "Havana"),
)  # four for each depth


@dataclass(frozen=True)
class Question:
    """``ids`` int64 ``[n]``: the question and its answer, the last ``answer`` of them; ``depth`` is its fact's."""

    depth: float
    ids: Tensor
    answer: int


@dataclass(frozen=True)
class Haystack:
    """A text with its facts, int64 ``[n]``, and the questions about them."""

    ids: Tensor
    questions: tuple[Question, ...]


def plant(tokenizer: Any, ids: Tensor, context: int, seed: int = 0) -> Haystack:
    """Facts among the first of ``ids`` (int64 ``[n]``), so that text and any one question fill ``context`` tokens.

    Raises `ValueError` where they do not fit.
    """
    generator = np.random.default_rng(seed)
    codes = generator.integers(10_000, 99_999, len(PLACES))
    depths = np.repeat(DEPTHS, len(PLACES) // len(DEPTHS))
    facts, questions = [], []
    for place, code, depth in zip(generator.permutation(PLACES), codes, depths, strict=True):
        facts.append(_ids(tokenizer, f"\nThe secret number of {place} is {code}. Remember it.\n"))
        asked = f"\nWhat is the secret number of {place}? The secret number of {place} is"
        whole = _ids(tokenizer, f"{asked} {code}")
        questions.append(Question(float(depth), whole, len(whole) - _shared(whole, _ids(tokenizer, asked))))
    room = context - max(len(question.ids) for question in questions) - sum(map(len, facts))
    if room < sum(map(len, facts)) or room > len(ids):
        raise ValueError(f"{len(facts)} facts do not fit into {context} tokens of this text")
    parts, done = [], 0
    for depth, fact in zip(depths, facts, strict=True):
        stop = int(depth * room)
        parts += [ids[done:stop], fact]
        done = stop
    return Haystack(torch.cat([*parts, ids[done:room]]), tuple(questions))


@dataclass
class Probe:
    """The answers of a model under several policies; settings as in `Sweep`. ``tick`` as in `Walk`."""

    model: Any
    policies: Sequence[Any]
    new: NewCache
    protocol: str
    chunk: int
    tick: Callable[[int, int], None] = lambda start, end: None

    def run(self, haystack: Haystack) -> Iterator[tuple[str, tuple[Needle, ...]]]:
        """(policy, its `Needle` per depth), one policy after the other."""
        with torch.inference_mode():
            exact = exact_cache(self.model, len(haystack.ids))
            self._read(exact, haystack.ids, EXACT_CHUNK)
            baseline = self._answers(partial(branch, exact), haystack)
            for policy in self.policies:
                cache = self.new(policy)
                if self.protocol == "prefill":
                    take_over(cache, exact)
                else:
                    self._read(cache, haystack.ids, self.chunk)
                answers = self._answers(partial(copy.deepcopy, cache), haystack)
                yield policy.name, tuple(_by_depth(haystack, answers, baseline))

    def forwards(self, haystack: Haystack) -> list[tuple[int, int]]:
        """The forwards of `run`, for progress."""
        length = len(haystack.ids)
        reads = 0 if self.protocol == "prefill" else len(self.policies)
        questions = [self._asked(haystack)] * len(haystack.questions) * (1 + len(self.policies))
        return chunk_bounds([length], EXACT_CHUNK) + reads * chunk_bounds([length], self.chunk) + questions

    def _asked(self, haystack: Haystack) -> tuple[int, int]:
        """A question for progress: as long as a chunk, since what it takes is mostly decoding the history."""
        return len(haystack.ids), len(haystack.ids) + self.chunk

    def _read(self, cache: Any, ids: Tensor, chunk: int) -> None:
        for start, end in chunk_bounds([len(ids)], chunk):
            forward(self.model, ids[None, start:end], cache, torch.zeros(0, dtype=torch.long))
            self.tick(start, end)

    def _answers(self, fresh: Callable[[], Any], haystack: Haystack) -> list[tuple[float, bool]]:
        """The mean log-probability of each answer's tokens, and whether each was the likeliest.

        Every question is asked of a ``fresh`` copy of the cache.
        """
        found = []
        for question in haystack.questions:
            rows = torch.arange(len(question.ids) - question.answer - 1, len(question.ids) - 1)
            logits, _ = forward(self.model, question.ids[None, :-1], fresh(), rows)
            answer = question.ids[-question.answer :]
            self.tick(*self._asked(haystack))
            logprobs = logits.double().log_softmax(-1).gather(1, answer[:, None])
            found.append((float(logprobs.mean()), bool((logits.argmax(-1) == answer).all())))
        return found


def summary(found: Sequence[Needle], reason: str = "") -> dict[str, Any]:
    """A row's needle fields: the depths, and the means over them.

    Where a log-probability is infinite, they are None and the row's ``reason`` gets longer.
    """
    names = ("logprob", "logprob_baseline", "exact", "exact_baseline")
    means = {f"needle_{name}": float(np.mean([getattr(needle, name) for needle in found])) for name in names}
    infinite = [name for name, mean in means.items() if not np.isfinite(mean)]
    if not infinite:
        return {"by_depth": tuple(found), **means}
    told = f"{', '.join(infinite)}: infinite"
    return {**means, **dict.fromkeys(infinite), "reason": f"{reason}; {told}" if reason else told}


def _by_depth(
    haystack: Haystack, found: list[tuple[float, bool]], baseline: list[tuple[float, bool]]
) -> Iterator[Needle]:
    for depth in DEPTHS:
        at = [index for index, question in enumerate(haystack.questions) if question.depth == depth]
        pairs = [(scores, part) for part in (0, 1) for scores in (found, baseline)]
        yield Needle(depth, *(float(np.mean([scores[index][part] for index in at])) for scores, part in pairs))


def _shared(a: Tensor, b: Tensor) -> int:
    """How many ids two texts begin with in common."""
    size = min(len(a), len(b))
    return int((a[:size] == b[:size]).long().cumprod(0).sum())


def _ids(tokenizer: Any, text: str) -> Tensor:
    return torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.long)
