"""`kvquant bench residency`: hit rates are those of theory, rows and refusals."""

from __future__ import annotations

import json

import pytest

from kvquant_eval.bench.residency import ALL, BOUND, PAYLOAD, Cycle
from kvquant_eval.cli import run

from .test_bench import COLUMNS


@pytest.fixture
def rows(small_caches, capsys):
    """Runs the command, and gives its rows by room and subject."""

    def measure(*arguments):
        assert run(["bench", "residency", "--json", *arguments]) == 0
        document = json.loads(capsys.readouterr().out)
        assert all(list(row) == COLUMNS for row in document["rows"])
        return {(row["case"], row["subject"]): row for row in document["rows"]}

    return measure


@pytest.mark.parametrize(("layers", "rooms"), [(32, (16, 31)), (7, (1, 3, 7)), (2, (1, 2))])
def test_hit_rates_are_those_of_theory(rows, layers, rooms):
    found = rows("--layers", str(layers), "--room", ",".join(map(str, rooms)))
    for room in rooms:
        rate = {subject: row["value"] for (case, subject), row in found.items() if case == room}
        assert rate[BOUND] == room / layers
        assert rate["next-use"] == pytest.approx(room / layers, abs=0.01)
        assert rate["pinned-layers"] == pytest.approx(room / layers, abs=0.01)
        assert rate["lru"] == (1 if room == layers else 0)
        assert rate["mru"] == pytest.approx((room - 1) / (layers - 1), abs=0.01)


def test_rows_tell_what_is_moved_and_held(rows):
    found = rows("--layers", "8", "--room", "6", "--policies", "next-use,lru")
    assert [subject for _, subject in found] == ["next-use", "lru", BOUND]
    for name, moved in (("next-use", 2), ("lru", 8)):
        row = found[6, name]
        assert (row["bench"], row["case"], row["baseline"]) == ("residency", 6, ALL)
        assert row["ratio"] == row["ms_median"] / row["baseline_ms_median"] > 0
        assert row["bytes_moved"] == moved * PAYLOAD
        assert row["peak_bytes"] == 6 * PAYLOAD
        assert f"{7 * (8 - moved)} of 56 reads" in row["detail"]
    bound = found[6, BOUND]
    assert (bound["ms_median"], bound["ratio"]) == (None, None)
    assert "(C-1)/(N-1) = 0.7143" in bound["detail"]


def test_a_pass_reads_every_layer_once():
    cycle = Cycle(5, 2, "next-use")
    cycle.run()
    assert cycle.result((1.0,)).detail == "2 of 5 reads"
    cycle.close()


def test_a_table_a_room(small_caches, capsys):
    assert run(["bench", "residency", "--layers", "4", "--room", "3,2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rooms = [line.split(",")[0] for line in lines if line.startswith("Room for")]  # a busy machine's say so
    assert rooms == ["Room for 2 layers", "Room for 3 layers"]
    assert any(line.startswith(BOUND) and line.endswith("75.00%") for line in lines)
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--room", "0"], "--room: '0'; allowed: whole numbers from 1 to 32 (--layers), separated by commas"),
        (["--room", "33"], "--room: '33'; allowed: whole numbers from 1 to 32"),
        (["--room", "2.5"], "--room: '2.5'; allowed: "),
        (["--room", ","], "--room: ',' names nothing"),
        (["--policies", "lru,fifo"], "--policies: 'fifo'; allowed: next-use, lru, mru, pinned-layers"),
        (["--layers", "1"], "'--layers': Input should be greater than or equal to 2"),
    ],
)
def test_bad_input(capsys, arguments, complaint):
    assert run(["bench", "residency", *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert complaint in err
    assert err.count("\n") == 1
