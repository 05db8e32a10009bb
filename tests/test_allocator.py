"""The allocator is held to a plain map of bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvquant.store.allocator import Allocator

STEPS = st.lists(
    st.tuples(st.sampled_from(["allocate", "near", "claim", "free", "part"]), st.integers(0, 300), st.integers(1, 70)),
    max_size=60,
)


@given(steps=STEPS, alignment=st.sampled_from([1, 8, 64]))
def test_ranges_never_overlap_and_all_bytes_are_accounted_for(steps, alignment):
    allocator = Allocator(260, alignment)
    taken: dict[int, int] = {}
    free = set(range(allocator.capacity))

    def longest() -> int:
        best = run = 0
        for byte in range(allocator.capacity):
            run = run + 1 if byte in free else 0
            best = max(best, run)
        return best

    for action, at, nbytes in steps:
        size = allocator.size(nbytes)
        if action in ("free", "part"):
            if not taken:
                continue
            start = sorted(taken)[at % len(taken)]
            whole = taken.pop(start)
            if action == "part" and whole > alignment:
                taken[start + alignment] = whole - alignment
                whole = alignment
            joined = allocator.free(start, whole)
            free |= set(range(start, start + whole))
            assert set(range(*joined)) <= free
            assert not {joined[0] - 1, joined[1]} & free
            assert joined[0] <= start < joined[1]
        else:
            wanted = at // alignment * alignment
            if action == "claim":
                start = wanted if allocator.claim(wanted, nbytes) else None
                assert (start is not None) == (set(range(wanted, wanted + size)) <= free)
            else:
                start = allocator.allocate(nbytes, wanted if action == "near" else None)
                assert (start is not None) == (longest() >= size)
                if action == "near" and set(range(wanted, wanted + size)) <= free:
                    assert start == wanted
            if start is not None:
                assert start % alignment == 0
                assert set(range(start, start + size)) <= free
                free -= set(range(start, start + size))
                taken[start] = size
        assert allocator.used == sum(taken.values()) == allocator.capacity - len(free)
        assert allocator.largest == longest()
        assert bool(allocator.slots(at + 1)) == (longest() >= allocator.size(at + 1))


def test_what_is_given_back_is_one_piece_again():
    allocator = Allocator(640, 64)
    places = [allocator.allocate(64) for _ in range(10)]
    assert allocator.allocate(1) is None
    for place in places[::2] + places[1::2]:
        allocator.free(place, 64)
        assert allocator.slots(64) == allocator.slots(1) == (allocator.capacity - allocator.used) // 64
    assert allocator.slots(128) == 5
    assert allocator.allocate(640) == 0


def test_an_empty_stretch_has_no_room():
    assert Allocator(63, 64).allocate(1) is None
    assert not Allocator(0, 1).claim(0, 1)


def test_what_grows_lies_apart():
    allocator = Allocator(64 * 64, 64)
    starts = [allocator.allocate(64, apart=32 * 64) for _ in range(8)]
    assert starts == [64 * place for place in (0, 32, 16, 48, 8, 24, 40, 56)]
    ends = list(starts)
    for _ in range(7):
        ends = [allocator.allocate(64, at=end + 64, apart=32 * 64) for end in ends]
    assert ends == [start + 7 * 64 for start in starts]
    assert allocator.allocate(1, apart=32 * 64) is None
