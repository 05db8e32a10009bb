"""The comments of a tuned policy: what it is for, what it costs, and why each layer has what it has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvquant.tuner.footprint import ROLES

from ..table import number
from .explain import TYPICAL_BITS, Choice, Option, choices
from .solution import Solution

DEFAULT = "default"  # the entry of layers that no selector names


def header(solution: Solution, command: str) -> list[str]:
    """What was asked, of what model and text, and what was found."""
    footprint = solution.sensitivity.candidates.footprint
    asked = "" if solution.goal.budget is None else f" (budget {solution.goal.budget:g})"
    return [
        command,
        *(f"{name}: {words}" for name, words in solution.facts.items()),
        f"bytes: {solution.ratio:.4f} of 16 bits an element of its full-attention layers at {footprint.context} "
        f"tokens{asked}",
        f"KL in nats per token: predicted {number(solution.predicted, '.3g')}, "
        + ("not measured" if solution.measured is None else f"measured {number(solution.measured, '.3g')}"),
        *_frame(solution),
        *_held_out(solution),
        *(f"NOT MET: {words}" for words in solution.broken),
        "",
        f"Of each entry: its layers' ranks by KL at {TYPICAL_BITS} bits or the nearest, 1 the most sensitive; what "
        "they add to KL,",
        "by all that was measured; what the next codecs worth their bytes would change, in KL as predicted and in all "
        "bytes.",
    ]


def layer_notes(solution: Solution) -> dict[str, list[str]]:
    """Lines by entry of the policy's ``layers``, and for its default."""
    found = choices(solution.sensitivity, solution.assignment)
    depth = solution.sensitivity.candidates.footprint.depth
    left = set(solution.assignment.layers)
    notes = {}
    for selector, _ in solution.policy.layers:
        layers = sorted(left.intersection(selector.indices(depth)))
        left.difference_update(layers)
        notes[selector.text] = list(_entry_notes(solution, found, layers))
    notes[DEFAULT] = list(_entry_notes(solution, found, sorted(left))) or ["no compressed layer of this model"]
    return notes


def spans(numbers: Sequence[int]) -> str:
    """Ascending numbers the way people write them: ``3-7, 9``."""
    runs: list[list[int]] = []
    for each in numbers:
        if runs and each == runs[-1][-1] + 1:
            runs[-1].append(each)
        else:
            runs.append([each])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _frame(solution: Solution) -> Iterator[str]:
    """What sinks, recent tokens and key biases do, where they are not the first choice."""
    sensitivity, frame = solution.sensitivity, solution.assignment.frame
    if frame != (first := sensitivity.candidates.frames[0]):
        changed = [name for name in vars(frame) if getattr(frame, name) != getattr(first, name)]
        told = ", ".join(f"{name} {getattr(frame, name)}" for name in changed)
        usual = ", ".join(f"{getattr(first, name)}" for name in changed)
        yield f"{told}: {sensitivity.frame_factors[frame]:.2f} of the KL under {usual}"


def _held_out(solution: Solution) -> Iterator[str]:
    row = next((row for row in solution.rows if row.status == "ok"), None)
    if row is None or row.kl_mean is None:
        return
    words = f"on held-out text: KL {row.kl_mean:.3g}, perplexity {number(row.ppl_delta_pct, '+.2f')} %"
    if row.kl_at_equal_bytes:
        words += f"; presets at the same bytes: KL {row.kl_at_equal_bytes:.3g}"
    yield words


def _entry_notes(solution: Solution, found: dict[tuple[int, str], Choice], layers: Sequence[int]) -> Iterator[str]:
    latent = solution.sensitivity.candidates.latent
    called = dict(zip(ROLES, ("latents", "rotary keys") if latent else ("keys", "values"), strict=True))
    for role in ROLES if layers else ():
        mine = [found[layer, role] for layer in layers]
        loss = sum(choice.chosen.kl for choice in mine)
        ranks = spans(sorted(choice.rank for choice in mine))
        yield f"{called[role]}: rank {ranks} of {len(solution.assignment.layers)}, KL {loss:.2g}"
        if changes := [words for direction in ("cheaper", "dearer") if (words := _change(direction, mine))]:
            yield f"  {'; '.join(changes)}"


def _change(direction: str, mine: Sequence[Choice]) -> str:
    """What a step in a direction would change for all layers of an entry that can take one."""
    steps: list[tuple[Option, Option]] = [
        (choice.chosen, other) for choice in mine if (other := getattr(choice, direction)) is not None
    ]
    if not steps:
        return ""
    names = {other.codec for _, other in steps}
    kl = sum(other.kl - chosen.kl for chosen, other in steps)
    ratio = sum(other.ratio - chosen.ratio for chosen, other in steps)
    what = next(iter(names)) if len(names) == 1 else f"the next {direction}"
    return f"{what}: KL {kl:+.2g}, bytes {ratio:+.4f}"
