from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvquant_eval.errors import InputError, one_line
from kvquant_eval.options import format_context, parse_contexts, parse_tokens, split_list, text_names


@pytest.mark.parametrize(
    ("text", "contexts"),
    [
        ("2K,4K", [2048, 4096]),
        ("4096,4k,100", [100, 4096]),
        ("1M", [1 << 20]),
        (" 8K , 2K,", [2048, 8192]),
        ("1", [1]),
    ],
)
def test_contexts_are_sorted_and_unique(text: str, contexts: list[int]) -> None:
    assert parse_contexts(text) == contexts


@pytest.mark.parametrize(
    "text", ["", ",", "0", "0K", "-1", "2.5K", "2KK", "1G", "two", "2K;4K", "١", "1e3", "9" * 5000, "2K\n4K"]
)
def test_anything_else_is_refused_in_one_line_that_quotes_it(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_contexts(text)
    message = str(caught.value)
    assert message.startswith("--contexts: ")
    assert "allowed: " in message
    assert "\n" not in message


@settings(deadline=None)
@given(st.integers(1, 10**12 - 1))
def test_a_printed_context_reads_back(tokens: int) -> None:
    assert parse_contexts(format_context(tokens)) == [tokens]


def test_numbers_of_tokens_are_read_as_contexts_are() -> None:
    assert (parse_tokens("--chunk", "1K"), parse_tokens("--chunk", "7")) == (1024, 7)
    with pytest.raises(InputError, match="--chunk: '1K,2K' is not a number of tokens; allowed: whole numbers"):
        parse_tokens("--chunk", "1K,2K")


def test_lists_drop_blanks_and_repeats() -> None:
    assert split_list("--policies", "int4, int8,,int4") == ["int4", "int8"]


def test_a_file_whose_name_has_a_comma_is_one_file(tmp_path: Path) -> None:
    both = tmp_path / "a,b.txt"
    assert text_names([f"{tmp_path}/a,b.txt"]) == [f"{tmp_path}/a", "b.txt"]
    both.touch()
    assert text_names([str(both), "c,d"]) == [str(both), "c", "d"]


def test_one_line_names_foreign_errors_and_cuts_long_ones() -> None:
    assert one_line(ValueError("\n first \nsecond")) == "ValueError: first second"
    assert one_line(KeyError()) == "KeyError"
    assert one_line(InputError("plain")) == "plain"
    assert len(one_line(ValueError("x" * 10_000))) == 300
