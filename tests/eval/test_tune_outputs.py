"""What is told of a tuning: comments that are true, pictures that can be drawn, and what lies between presets."""

from __future__ import annotations

import io
import math
import re
from dataclasses import dataclass, replace

import numpy as np
import pytest
from PIL import Image

from kvquant import PrecisionPolicy, tuned_names
from kvquant.tuner.allocation import allocate
from kvquant.tuner.candidates import RAW, Candidates, Frame
from kvquant.tuner.footprint import ROLES, Footprint
from kvquant.tuner.sensitivity import Cell, Sensitivity
from kvquant_eval.errors import InputError
from kvquant_eval.front import kl_at
from kvquant_eval.rows import Row
from kvquant_eval.tuning.compare import compared, rivals
from kvquant_eval.tuning.explain import bits, choices, losses_at, width
from kvquant_eval.tuning.goal import Goal
from kvquant_eval.tuning.notes import spans
from kvquant_eval.tuning.outputs import commented, is_tuned
from kvquant_eval.tuning.pictures import layers_picture, pareto_picture
from kvquant_eval.tuning.solution import Outcome, Solution, Trial, untested_row

from .tiny import tiny_llama

CODECS = {
    role: (RAW, *(f"{base}/{axis}/g64/none" for base in ("int8", "int4", "nf4", "int2")))
    for role, axis in (("key", "channel"), ("value", "token"))
}


def known(layers: tuple[int, ...] = (0, 1, 2, 5), depth: int = 7, **settings: bool) -> Sensitivity:
    """Losses that fall with bits, of layers of which some are another kind's."""
    draw = np.random.default_rng(3)
    footprint = Footprint(dict.fromkeys(layers, (2, 64, 64)), 4096, 128, depth)
    frames = (Frame(), Frame(recent_tokens=0))
    candidates = Candidates(footprint, CODECS["key"], CODECS["value"], frames, **settings)
    cells = []
    for layer in layers:
        for role in ROLES:
            base = 10 ** draw.normal(-3, 0.5)
            cells += [
                Cell(layer, role, codec, base * 4.0 ** (4 - (width(codec) or 16)) * draw.uniform(0.8, 1.2), None)
                for codec in CODECS[role][1:]
            ]
    return Sensitivity(candidates, tuple(cells), {frames[0]: 1.0, frames[1]: 1.1}, "ab", {"text": "a\nbook"})


def solution(sensitivity: Sensitivity, budget: float = 0.25) -> Solution:
    assignment = allocate(sensitivity, budget)
    return Solution(
        goal=Goal(budget=budget),
        policy=sensitivity.candidates.policy(assignment, "mine"),
        assignment=assignment,
        sensitivity=sensitivity,
        ratio=sensitivity.candidates.footprint.ratio(assignment),
        predicted=sensitivity.predicted(assignment),
        measured=0.004,
        trials=[Trial("first", 0.24, 0.005, 0.004), Trial("nothing lost", 0.3, 0.0, 0.0)],
        facts=sensitivity.facts,
    )


def row(policy: str, ratio: float, kl: float | None, **more: str) -> Row:
    return Row("tiny", policy, 4096, "prefill", "float32", kv_ratio=ratio, kl_mean=kl, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("budget", [0.18, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("latent", [False, True])
def test_a_commented_policy_loads_equal_and_its_comments_are_true(budget: float, latent: bool) -> None:
    sensitivity = known(latent=latent)
    found = solution(sensitivity, budget)
    text = commented(found, "kvquant tune --text 'two\nlines'")
    assert PrecisionPolicy.from_yaml(text) == found.policy
    assert is_tuned(text)
    assert "# text: a book" in text
    assert "# kvquant tune --text 'two lines'" in text
    told = re.findall(r"rank ([\d, -]+) of 4, KL ([\d.e+-]+)", text)
    assert sum(float(kl) for _, kl in told) == pytest.approx(found.predicted, rel=0.05)
    roles = ("latents", "rotary keys") if latent else ("keys", "values")
    assert text.count(f"# {roles[0]}: rank") == text.count(f"# {roles[1]}: rank")


def test_neighbours_are_what_a_step_would_really_change() -> None:
    sensitivity = known()
    found = solution(sensitivity)
    footprint = sensitivity.candidates.footprint
    steps = 0
    for (layer, role), choice in choices(sensitivity, found.assignment).items():
        for other in (choice.cheaper, choice.dearer):
            if other is None:
                continue
            changed = found.assignment.replaced(layer, role, other.codec)
            kl = sensitivity.predicted(changed) - found.predicted
            assert other.kl - choice.chosen.kl == pytest.approx(kl, abs=1e-12)
            assert other.ratio - choice.chosen.ratio == pytest.approx(footprint.ratio(changed) - found.ratio)
            assert (other is choice.cheaper) == (other.ratio < choice.chosen.ratio) == (kl > 0)
            steps += 1
    assert steps >= 8


def test_ranks_and_widths() -> None:
    sensitivity = known()
    found = choices(sensitivity, solution(sensitivity).assignment)
    for role in ROLES:
        losses = losses_at(sensitivity, role, 4)
        best = {
            layer: min(
                sensitivity.losses[layer, role][codec] for codec in CODECS[role] if codec[:4] in ("int4", "nf4/")
            )
            for layer in losses
        }
        assert losses == best
        ranked = sorted(losses, key=lambda layer: found[layer, role].rank)
        assert ranked == sorted(losses, key=lambda layer: -losses[layer])
    assert [width(name) for name in ("fp16", "nf4/token/g64/none", "dynamic8", "mine")] == [16, 4, 8, None]
    assert bits(sensitivity, 0, "key", RAW) == 16
    assert bits(sensitivity, 0, "value", "int4/token/g64/none") == 4.5


def test_spans() -> None:
    assert spans([]) == ""
    assert spans([1, 2, 3, 7, 9, 10]) == "1-3, 7, 9-10"


@pytest.mark.parametrize("layers", [(0,), (3, 7, 11), tuple(range(40))])
def test_pictures(layers: tuple[int, ...]) -> None:
    found = solution(known(layers, depth=80))
    rows = [untested_row(found, "not measured"), *(row(f"preset-{n}", 0.2 + n / 20, 10.0**-n) for n in range(9))]
    curve = Outcome("kvquant tune", "now", found, "", None).curve
    most = {each.policy: 1.1 * each.kv_ratio for each in rows[1:]}
    for told in (found, found.with_rows(compared(found, [row("mine", 0.25, 0.003), *rows[1:]], most))):
        for picture in (layers_picture(told), pareto_picture(told, curve)):
            image = Image.open(io.BytesIO(picture))
            assert image.width == 1280
            assert len(image.getcolors() or ()) > 4


def test_pictures_of_what_loses_nothing() -> None:
    everything = known()
    lossless = replace(everything, cells=tuple(replace(cell, estimate=0.0, measured=0.0) for cell in everything.cells))
    found = replace(solution(lossless), predicted=0.0, measured=0.0, trials=())
    for picture in (layers_picture(found), pareto_picture(found, [])):
        assert Image.open(io.BytesIO(picture)).width == 1280


def test_what_lies_between_presets() -> None:
    @dataclass
    class Preset:
        ratio: float
        kl: float

    presets = [Preset(0.2, 1e-1), Preset(0.3, 1e-2), Preset(0.35, 5e-2), Preset(0.5, 1e-4), Preset(1.1, 0.0)]
    assert kl_at(presets, 0.1) is None
    assert kl_at([], 0.1) is None
    assert kl_at(presets, 0.2) == pytest.approx(1e-1)
    assert kl_at(presets, 0.25) == pytest.approx(math.sqrt(1e-3))
    assert kl_at(presets, 0.4) == pytest.approx(1e-3)
    assert kl_at(presets, 0.8) == 1e-4  # a logarithm does not reach 0
    assert kl_at(presets, 1.2) == 0


def test_rows_beside_presets() -> None:
    found = solution(known())
    failed = row("broken", 0.25, 1e-9, status="failed", reason="why")
    rows = compared(found, [row("a", 0.2, 1e-1), row("mine", 0.25, 1e-3), row("b", 0.3, 1e-3), failed], {"a": 0.21})
    assert [each.policy for each in rows] == ["mine", "a", "b", "broken"]
    assert rows[0].kl_at_equal_bytes == pytest.approx(1e-2)
    assert rows[0].ratio_to_rivals == pytest.approx(0.1)
    assert (rows[0].budget, rows[0].measured) == (0.25, 0.004)
    assert [each.kv_ratio_most for each in rows] == [found.ratio, 0.21, None, None]
    (alone,) = compared(found, [row("mine", 0.25, 1e-3)], {})
    assert alone.kl_at_equal_bytes is alone.ratio_to_rivals is None


def test_presets_that_were_tuned_are_no_rivals() -> None:
    names = {policy.name for policy in rivals(tiny_llama())}
    assert {"int4", "k8v4", "balanced"} <= names
    assert not names & set(tuned_names())


@pytest.mark.parametrize("given", [(None, None, None), ("1", "1", None), ("1.5", None, None)])
def test_goals(given: tuple[str | None, str | None, str | None]) -> None:
    with pytest.raises(InputError):
        Goal.parse(*given)
    assert Goal.parse("1", None, None).max_loss == math.inf
    assert Goal.parse(None, None, "1").max_loss == pytest.approx(math.log(1.01))
    assert Goal.parse(None, "0.005", None).max_loss == 0.005
