"""Losses, and the file they are in."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvquant import KVQuantError, PolicyError, Sensitivity
from kvquant.tuner.candidates import Frame
from kvquant.tuner.files import _digest
from kvquant.tuner.sensitivity import Cell
from tests.tuner import made

INT8, INT4, INT2 = made.FEW[1:]
FRAME = {"sink_tokens": 4, "recent_tokens": 128, "key_bias": "remove", "factor": 1.0}


def of(*cells, **settings):
    return Sensitivity(
        made.candidates(layers=1), cells, {made.TWO_FRAMES[0]: 1.0, made.TWO_FRAMES[1]: 2.0}, **settings
    )


def test_what_was_measured_counts_and_corrects_its_neighbours():
    known = of(
        Cell(0, "key", INT8, 1e-6, None),
        Cell(0, "key", INT4, 1e-3, 3e-3),
        Cell(0, "key", INT2, 1e-1, 5e-2),
        Cell(0, "value", INT4, 1e-3, None),
        Cell(0, "value", INT2, None, 7.0),
    )
    assert known.loss(0, "key", INT4) == 3e-3
    assert known.loss(0, "key", INT8) == pytest.approx(3e-6)  # int4 is nearer than int2
    assert known.loss(0, "value", INT4) == 1e-3  # nothing with both numbers there
    assert known.loss(0, "value", INT2) == 7.0
    assert known.loss(0, "key", "fp16") == 0
    corrected = replace(known, corrections={(0, "key"): 0.5})
    assert corrected.loss(0, "key", INT4) == 1.5e-3
    assert corrected.loss(0, "value", INT2) == 7.0
    whole = made.Assignment(made.TWO_FRAMES[1], {0: (INT4, INT2)})
    assert corrected.predicted(whole) == 2 * (1.5e-3 + 7.0)


def test_what_nothing_is_known_of():
    known = of(Cell(0, "key", INT8, 1e-6, None))
    with pytest.raises(PolicyError, match="layer 0 value: nothing is known of 'int4"):
        known.loss(0, "value", INT4)
    with pytest.raises(PolicyError, match="nothing is known of Frame"):
        known.predicted(known.candidates.uncompressed(Frame(1, 2)))
    assert known.covers(known.candidates.uncompressed())
    assert not known.covers(known.candidates.uncompressed(Frame(1, 2)))
    assert not known.covers(known.candidates.uncompressed().replaced(0, "value", INT4))


@pytest.mark.parametrize("estimate", [0.0, 5e-324, 1e300, 1.7e308])
@pytest.mark.parametrize("measured", [None, 0.0, 5e-324, 1e300, 1.7e308])
def test_no_number_overflows(estimate, measured):
    known = of(
        Cell(0, "key", INT8, estimate, None), Cell(0, "key", INT4, 1e-3, measured), corrections={(0, "key"): 1e9}
    )
    assert all(0 <= loss <= 1e100 for loss in known.losses[0, "key"].values())


def test_another_model_is_refused():
    known = of(fingerprint="abc")
    known.require("abc")
    with pytest.raises(PolicyError, match="of another model: of abc, not xyz"):
        known.require("xyz")
    with pytest.raises(PolicyError, match="an unknown one"):
        of().require("xyz")


numbers = st.just(0.0) | st.floats(1e-30, 1e9)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_a_file_says_it_all(data):
    given = made.candidates(layers=data.draw(st.integers(1, 3)), context=data.draw(st.integers(2, 5000)))
    cells = [
        Cell(layer, role, codec, *data.draw(st.sampled_from([(1.0, None), (None, 2.0), (3.0, 4.0)])))
        for layer in given.footprint.shapes
        for role in ("key", "value")
        for codec in data.draw(st.sets(st.sampled_from(made.FEW[1:])))
    ]
    cells = tuple(replace(cell, estimate=cell.estimate and data.draw(numbers)) for cell in cells)
    known = Sensitivity(
        given,
        cells,
        dict.fromkeys(data.draw(st.sets(st.sampled_from(given.frames), min_size=1)), data.draw(numbers)),
        data.draw(st.text(max_size=5)),
        data.draw(st.dictionaries(st.text(), st.text(), max_size=3)),
        {(0, "key"): data.draw(numbers)},
    )
    assert Sensitivity.from_json(known.to_json()) == known


@pytest.fixture(scope="module")
def text():
    return made.sensitivity(made.candidates(layers=1), fingerprint="abc", facts={"text": "a – ö"}).to_json()


def test_a_file_tells_every_cell_and_its_bytes_on_a_line(text):
    content = json.loads(text)
    (line,) = [line for line in text.splitlines() if '"layer": 0, "role": "value", "codec": "int4' in line]
    cell = json.loads(line.strip(" ,"))
    assert cell in content["cells"]
    footprint = Sensitivity.from_json(text).candidates.footprint
    assert cell["nbytes"] == footprint.side_bytes(0, "value", cell["codec"], made.TWO_FRAMES[0])


def refusal(text):
    """What a file is refused with, in one line that begins with its name."""
    with pytest.raises(KVQuantError) as error:
        Sensitivity.from_json(text, "some.json")
    message = str(error.value)
    assert message.startswith("some.json: ")
    assert "\n" not in message
    assert len(message) < 500
    return message


def changed(text, **settings):
    """A file that someone made with care: its digest is right."""
    content = json.loads(text) | settings
    del content["digest"]
    return json.dumps({"digest": _digest(content)} | content)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"format": 2}, "format: 2; this release reads format 1"),
        ({"format": True}, "format: True; this release reads format 1"),
        ({"context": 0}, "context: .*greater than or equal to 1"),
        ({"context": 10**12}, "context: .*less than or equal to"),
        ({"context": "8192"}, "context: .*valid integer"),
        ({"block_tokens": 100}, "block_tokens"),
        ({"shapes": []}, "shapes: "),
        ({"shapes": [{"layer": 1, "heads": 1, "key_channels": 8, "value_channels": 8}]}, "layer: 0 is none of"),
        ({"key": ["fp16", "int9/channel/g64/none"]}, "int9"),
        ({"key": ["int8/channel/g64/none"]}, "fp16 among them"),
        ({"frames": []}, "frames: none given"),
        ({"frames": [FRAME | {"sink_tokens": 500}]}, "sink_tokens: 500"),
        ({"frames": [FRAME | {"factor": -1.0}]}, "frames.0.factor"),
        ({"frames": [FRAME | {"factor": 1e-310}]}, "frames.0.factor: .*allowed: 0, or 1e-30"),
        ({"frames": [FRAME | {"factor": None}]}, "frames: none has a factor"),
        ({"frames": [FRAME | {"sink_tokens": n} for n in range(100)]}, "frames: .*at most 64 items"),
        ({"frames": [FRAME, FRAME]}, "frames: one is told twice"),
        ({"cells": [{"layer": 0}]}, "cells.0.role: Field required"),
        ({"facts": {"a": 1}}, "facts.a: "),
        ({"more": 1}, "more: Extra inputs"),
        ({"corrections": [{"layer": 0, "role": "key", "factor": 1.0}] * 2}, "corrections: one is told twice"),
        ({"corrections": [{"layer": 9, "role": "key", "factor": 1.0}]}, "corrections.0.layer: 9 is none of"),
    ],
)
def test_files_that_make_no_sense(text, settings, why):
    assert re.search(why, refusal(changed(text, **settings)))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"codec": "int4/channel/g32/none"}, "cells.0.codec: 'int4/channel/g32/none' is none of the"),
        ({"codec": "fp16"}, "cells.0.codec: 'fp16'"),
        ({"codec": 4}, "cells.0.codec: "),
        ({"role": "query"}, "cells.0.role: "),
        ({"layer": -1}, "cells.0.layer: -1 is none of"),
        ({"estimate": None}, "cells.0: neither estimate nor measured"),
        ({"estimate": -1e-9}, "cells.0.estimate: .*allowed: 0, or 1e-30 to 1e.09"),
        ({"measured": 1e-300}, "cells.0.measured: .*allowed: 0, or 1e-30 to 1e.09"),
        ({"measured": 1e300}, "cells.0.measured: .*allowed: 0, or 1e-30 to 1e.09"),
        ({"estimate": "1"}, "cells.0.estimate: .*valid number"),
        ({"nbytes": 1}, "cells.0.nbytes: 1, but in this release it is [0-9]+: measure again"),
    ],
)
def test_cells_that_make_no_sense(text, settings, why):
    first, *others = json.loads(text)["cells"]
    assert re.search(why, refusal(changed(text, cells=[first | settings, *others])))
    assert "told twice" in refusal(changed(text, cells=[first, first, *others]))


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_numbers_that_are_none(text, number):
    assert "finite" in refusal(text.replace('"factor": 1.0', f'"factor": {json.dumps(number)}'))


def test_names_that_are_told_twice(text):
    assert "'context' is told twice" in refusal(text.replace('"context"', '"context": 1, "context"', 1))


def test_numbers_that_would_not_be_read_are_not_written(text):
    known = Sensitivity.from_json(text)
    cells = [replace(cell, estimate=1e-300, measured=1e300) for cell in known.cells]
    again = Sensitivity.from_json(replace(known, cells=tuple(cells)).to_json())
    assert {(cell.estimate, cell.measured) for cell in again.cells} == {(0.0, 1e9)}


def test_what_is_no_such_file():
    for text, why in (
        ("", "not JSON"),
        ("null", "not a sensitivity file"),
        ("[]", "not a sensitivity file"),
        ("[" * 100_000, "not JSON"),
        ("\x00\ud800", "not JSON"),
        ('{"format": 1' + 5000 * "0" + "}", "not JSON"),
        ('{"a": 1}', "format: None; this release reads format 1"),
        ('{"format": [' + "1," * 100_000 + "1]}", "format: "),
    ):
        assert why in refusal(text)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_damage_is_noticed(text, data):
    """One character is another, and what follows may be missing: a refusal, unless nothing that counts has changed."""
    at = data.draw(st.integers(0, len(text) - 1))
    rest = data.draw(st.sampled_from([text[at + 1 :], ""]))
    damaged = text[:at] + data.draw(st.characters()) + rest
    try:
        found = Sensitivity.from_json(damaged, "some.json")
    except KVQuantError:
        refusal(damaged)
    else:
        assert found == Sensitivity.from_json(text)
