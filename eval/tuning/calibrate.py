"""Tuning with a model: what is measured, in which order, and whether the goal was met."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import kvquant
from kvquant import PrecisionPolicy
from kvquant.tuner.candidates import Candidates
from kvquant.tuner.sensitivity import Sensitivity
from kvquant.tuner.tune import Tuned, require_feasible, tune_policy

from ..errors import InputError
from ..models import LoadedModel, check_causal, load
from ..options import format_context
from ..rope import context_limit, frequencies_of
from ..rows import Scores
from ..sweep import Settings
from .command import Options, Talk, Tell
from .compare import compared, comparison, most_ratios, rivals
from .goal import Goal
from .objective import KLObjective
from .passages import Passages, cut, find_texts
from .second_order import Estimates, estimates
from .solution import Solution, Trial, untested_row
from .tail import Tail

_CHUNK = 128  # tokens per forward on held-out text
_TIGHTEN = 0.7  # of the KL limit, where perplexity rose by more than was wanted
_MOST_TIGHTENINGS = 12
_ALONE = ("cells", "frames")  # stages of the search that come before whole policies
_MEASURED_CELLS = 2  # of each layer's keys, and of its values, on average: estimates tell the others


def calibrated(options: Options, known: Sensitivity | None, talk: Talk) -> Solution:
    """The best policy as measured on the text, and beside the presets on held-out text.

    ``known`` sensitivities are not measured again. Raises `kvquant.KVQuantError` for bad input.
    """
    context = options.context or (known.candidates.footprint.context if known else 0)
    text, other = find_texts(options.text, options.held_out, context)
    loaded = load(options.model or "", options.dtype, talk.say, partial(_check_context, context))
    check_causal(loaded)
    fingerprint = kvquant.model_fingerprint(loaded.model)
    if known is not None:
        known.require(fingerprint)
    passages = cut(loaded, text, other, context, options.verify)
    candidates = known.candidates if known else Candidates.of(loaded.model, context, codecs=options.codecs)
    if options.goal.budget is not None:
        require_feasible(candidates, options.goal.budget)
    facts = _facts(loaded, fingerprint, passages, options)
    with talk.stages() as tell, frequencies_of(loaded.model, context):
        objective = _objective(loaded, passages.calibration, options.score_tokens, tell)
        search = _Search(objective, candidates, options, rivals(loaded.model), fingerprint, facts, tell)
        solution = search.run(known)
    return _verified(solution, loaded, passages, talk, options)


@dataclass
class _Search:
    """One search for a goal: an objective, what may be chosen, and what presets are to be beaten."""

    objective: KLObjective
    candidates: Candidates
    options: Options
    rivals: Sequence[PrecisionPolicy]
    fingerprint: str
    facts: dict[str, str]
    tell: Tell
    began: float = field(default_factory=time.monotonic)  # and again after estimates, which the time does not limit
    alone: float = 0.0  # passes that measured cells and frames one by one

    def run(self, known: Sensitivity | None) -> Solution:
        """The solution, without rows."""
        estimated = None
        if known is None:
            estimated = _estimates(self.objective, self.candidates, self.options.seed, self.tell)
        estimating, self.began = time.monotonic() - self.began, time.monotonic()
        tuned, delta = self._tuned(known, estimated)
        goal, real = self.options.goal, _real_ratio(self.objective.tail, tuned.policy)
        facts = self.facts | {
            "a real cache": f"{real:.4f} of the bytes, given the text at once",
            "agreement": _agreement(tuned),
            "cost": self._cost(estimating),
        }
        if delta is not None:
            facts["perplexity on the calibration text"] = f"{delta:+.2f} %"
        return Solution(
            goal=goal,
            policy=tuned.policy,
            assignment=tuned.assignment,
            sensitivity=tuned.sensitivity,
            ratio=tuned.ratio,
            predicted=tuned.predicted,
            measured=tuned.measured,
            trials=[Trial(step.what, step.ratio, step.measured, step.predicted) for step in tuned.steps],
            facts=facts,
            broken=list(_broken(goal, real, tuned.measured, delta)),
        )

    def _tuned(self, known: Sensitivity | None, estimated: Estimates | None) -> tuple[Tuned, float | None]:
        """What was found, and where a limit on perplexity was given by how many percent that rose."""
        goal = self.options.goal
        if goal.max_delta_ppl is None:
            return self._found(known, estimated, goal.max_kl), None
        limit = goal.max_loss
        for _ in range(_MOST_TIGHTENINGS):
            tuned = self._found(known, estimated, limit)
            delta = delta_pct(self.objective.scores(tuned.policy))
            if delta <= goal.max_delta_ppl:
                break
            known, limit = tuned.sensitivity, limit * _TIGHTEN
        return tuned, delta

    def _found(self, known: Sensitivity | None, estimated: Estimates | None, max_loss: float | None) -> Tuned:
        left = self.began + 60 * self.options.minutes - time.monotonic()
        return tune_policy(
            self.objective,
            self.candidates,
            self.options.goal.budget,
            max_loss=max_loss,
            estimates=estimated if known is None else None,
            sensitivity=known,
            fingerprint=self.fingerprint,
            facts=self.facts,
            measurements=2 * _MEASURED_CELLS * len(self.candidates.footprint.shapes),
            seconds=max(0.0, left),
            name=self.options.name,
            rivals=self.rivals,
            tick=self._tick,
        )

    def _cost(self, estimating: float) -> str:
        estimates, alone = estimating / self.objective.tail.exact_seconds, self.alone
        return (
            f"in scored passes of the whole text: sensitivity {estimates + alone:.1f} (estimates {estimates:.1f}, "
            f"cells and frames {alone:.1f}), whole policies {self.objective.passes - alone:.1f}; "
            f"{estimating + time.monotonic() - self.began:.0f} s in all"
        )

    def _tick(self, stage: str, done: int, total: int) -> None:
        """Tells of a stage's steps, or of the time there is where nobody knows how many there will be."""
        if stage in _ALONE:
            self.alone = self.objective.passes
        if total:
            self.tell(stage, done, total)
        else:
            limit = 60 * self.options.minutes
            self.tell("trying whole policies, at most", min(limit, time.monotonic() - self.began), limit)


def delta_pct(scores: Scores) -> float:
    """By how many percent perplexity rose."""
    return float(100 * np.expm1((scores.nll - scores.reference_nll).mean()))


def _verified(solution: Solution, loaded: LoadedModel, passages: Passages, talk: Talk, options: Options) -> Solution:
    """The solution with rows on held-out text, and whether its bytes hold there."""
    if passages.held_out is None:
        return solution.with_rows([untested_row(solution, "not compared: --no-verify")])
    context = len(passages.held_out)
    settings = Settings((context,), "prefill", _CHUNK, options.score_tokens, options.dtype, options.seed)
    sweep = comparison(loaded, passages.held_out, solution, settings)
    with talk.progress(f"{len(sweep.policies)} policies on held-out text", sweep.forwards()) as tick:
        most = most_ratios(loaded.model, solution.sensitivity.candidates.footprint, sweep.policies)
        rows = compared(solution, list(sweep.rows(tick)), most)
    if rows[0].status == "ok":
        return solution.with_rows(rows)
    return replace(solution, rows=rows, broken=[*solution.broken, f"held-out text: {rows[0].reason}"])


def _real_ratio(tail: Tail, policy: PrecisionPolicy) -> float:
    """The share of the 16-bit bytes that a real cache takes for the whole text."""
    cache = kvquant.KVQuantCache(policy.resolve(tail.model), tail.model.config)
    with torch.no_grad():
        for layer in cache.compressed():
            cache.update(*tail.held(layer.index), layer.index)
    return cache.stats().kv_ratio


def _broken(goal: Goal, ratio: float, kl: float, delta: float | None) -> Iterator[str]:
    """What of a goal does not hold on the calibration text, as measured."""
    if goal.budget is not None and ratio > goal.budget:
        yield f"{ratio:.4f} of the bytes measured, over the budget of {goal.budget:g}"
    if goal.max_kl is not None and kl > goal.max_kl:
        yield f"KL {kl:.3g} measured, over {goal.max_kl:g}"
    if goal.max_delta_ppl is not None and delta is not None and delta > goal.max_delta_ppl:
        yield f"perplexity up by {delta:.2f} % on the calibration text, over {goal.max_delta_ppl:g} %"


def _objective(loaded: LoadedModel, ids: Tensor, score_tokens: int, tell: Tell) -> KLObjective:
    def tick(start: int, end: int) -> None:
        tell("reading the text", end, len(ids))

    return KLObjective(loaded.model, ids, score_tokens, tick)


def _estimates(objective: KLObjective, candidates: Candidates, seed: int, tell: Tell) -> Estimates:
    """Of all cells but those that are no numbers: what overflows is not chosen."""
    found = estimates(objective.tail, candidates, seed=seed, tick=partial(tell, "estimates"))
    return {cell: loss for cell, loss in found.items() if math.isfinite(loss)}


def _agreement(tuned: Tuned) -> str:
    gap = abs(tuned.predicted - tuned.measured) / tuned.measured if tuned.measured else 0.0
    told = f"predicted and measured KL differ by {100 * gap:.0f} %"
    return told if tuned.agreed else f"{told}, more than was sought, within the time"


def _facts(loaded: LoadedModel, fingerprint: str, passages: Passages, options: Options) -> dict[str, str]:
    return {
        "model": f"{loaded.name} ({loaded.weights})",
        "dtype": options.dtype,
        "weights": f"fingerprint `{fingerprint}`",
        **passages.facts,
        "context": str(len(passages.calibration)),
        "protocol": f"prefill: the past exact, then compressed; the last {options.score_tokens} tokens are scored in "
        f"chunks of {_CHUNK} that attend to it",
    }


def _check_context(context: int, config: Any) -> None:
    """`InputError` where a model does not take so many tokens."""
    limit = context_limit(config)
    if limit is not None and context > limit:
        raise InputError(
            f"--context: {format_context(context)}; allowed: at most the model's limit, {limit} tokens "
            "(max_position_embeddings)"
        )
