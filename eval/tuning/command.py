"""`kvquant tune` from its options to a policy, and what is written of it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from kvquant import KVQuantError, PrecisionPolicy
from kvquant.codecs import codec_names
from kvquant.tuner.allocation import allocate, fewest_bytes
from kvquant.tuner.sensitivity import Sensitivity

from ..errors import InputError
from . import outputs
from .goal import Goal
from .solution import Outcome, Solution, untested_row

_LARGEST_FILE = 64 << 20  # bytes; those of models of a hundred layers take three

Tell = Callable[[str, float, float], None]
"""Told a stage's name, how much of it is done, and how much there is."""


@dataclass(frozen=True)
class Options:
    """The command's options, parsed; see its ``--help``. ``source`` is ``--from``; None is what was not given."""

    goal: Goal
    model: str | None
    text: tuple[str, ...]
    held_out: tuple[str, ...]
    context: int | None
    codecs: tuple[str, ...] | None
    score_tokens: int
    dtype: str
    minutes: float
    verify: bool
    source: Path | None
    out: Path | None
    seed: int

    @property
    def name(self) -> str:
        """What the policy will be called."""
        return "tuned" if self.out is None else self.out.stem


@dataclass(frozen=True)
class Talk:
    """Where the command tells of long work: lines, stages of unknown length, and forwards (see `display`)."""

    say: Callable[[str], None]
    stages: Callable[[], AbstractContextManager[Tell]]
    progress: Callable[[str, Sequence[tuple[int, int]]], AbstractContextManager[Callable[[int, int], None]]]


def run(options: Options, arguments: Sequence[str], talk: Talk) -> Outcome:
    """Finds the policy, and writes it and its folder if asked to. Raises `kvquant.KVQuantError` for bad input.

    Cheap checks come first. Without a model it is found from the sensitivities of an earlier run alone.
    """
    known = None if options.source is None else read(options.source)
    _check(options, known)
    with nullcontext() if options.out is None else outputs.prepared(options.out):
        return _found(options, known, shlex.join(["kvquant", *arguments]), talk)


def _found(options: Options, known: Sensitivity | None, command: str, talk: Talk) -> Outcome:
    if options.model is None:
        assert known is not None
        solution = solved(options, known)
    else:
        from .calibrate import calibrated  # loads transformers

        solution = calibrated(options, known, talk)
    outcome = Outcome(
        command=command,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        solution=solution,
        yaml=outputs.commented(solution, command),
        saved=None if options.out is None else str(outputs.folder_of(options.out) / outputs.SENSITIVITY),
    )
    if options.out is not None:
        outputs.write(options.out, outcome)
    return outcome


def read(path: Path) -> Sensitivity:
    """The sensitivities of an earlier run. Raises `kvquant.KVQuantError` where that can't be read."""
    try:
        if path.exists() and (not path.is_file() or path.stat().st_size > _LARGEST_FILE):
            raise InputError(f"--from: {path}: not a file of up to {_LARGEST_FILE >> 20} MiB")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(f"--from: {path}: {why}; allowed: a sensitivity.json of `kvquant tune --out`") from error
    return Sensitivity.from_json(text, f"--from: {path}")


def solved(options: Options, known: Sensitivity) -> Solution:
    """The best policy as far as sensitivities tell. Raises `kvquant.KVQuantError` where none is small enough."""
    goal, footprint = options.goal, known.candidates.footprint
    budget = goal.budget
    assignment = fewest_bytes(known, goal.max_loss) if budget is None else allocate(known, budget)
    solution = Solution(
        goal=goal,
        policy=known.candidates.policy(assignment, options.name),
        assignment=assignment,
        sensitivity=known,
        ratio=footprint.ratio(assignment),
        predicted=known.predicted(assignment),
        facts=dict(known.facts),
    )
    return solution.with_rows([untested_row(solution, "not measured: no --model")])


def _check(options: Options, known: Sensitivity | None) -> None:
    """Raises `InputError` for options that do not go together, before anything takes long."""
    if options.model is None and known is None:
        raise InputError("--model: missing; allowed: a model to measure, or --from with what was measured before")
    if known is None and options.context is None:
        raise InputError("--context: missing; allowed: the number of tokens whose cache is to fit, e.g. 8K")
    if known is not None and options.codecs is not None:
        raise InputError("--codecs: were chosen when --from was measured; allowed: only one of the two")
    if known is not None and options.context not in (None, known.candidates.footprint.context):
        measured = known.candidates.footprint.context
        raise InputError(f"--context: {options.context}, but --from was measured at {measured}; allowed: that")
    for name in options.codecs or ():
        if name not in codec_names():
            raise InputError(f"--codecs: {name!r} is no codec; allowed: {', '.join(codec_names())}")
    if options.held_out and not options.verify:
        raise InputError("--held-out: not read with --no-verify; allowed: only one of the two")
    try:
        PrecisionPolicy(name=options.name, default={"key": "fp16", "value": "fp16"})
    except KVQuantError as error:
        raise InputError(f"--out: {options.out}: the policy's {error}") from error
