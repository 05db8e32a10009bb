"""What goes wrong for a user, told in one line."""

from __future__ import annotations

from kvquant import KVQuantError

LONGEST_LINE = 300


class InputError(KVQuantError):
    """Something the user gave can't be used; the message names the place, what was given and what is allowed."""


def printable(text: str) -> str:
    """The text with a blank for each character that controls, rather than shows, something.

    Halves of characters, of which file names may consist, are written as escapes.
    """
    whole = text.encode(errors="backslashreplace").decode()
    return "".join(letter if letter.isprintable() else " " for letter in whole)


def one_line(error: BaseException) -> str:
    """An exception's message as a line, led by its class if it isn't ours, at most `LONGEST_LINE` characters."""
    text = " ".join(printable(str(error)).split())
    if not isinstance(error, KVQuantError):
        name = type(error).__name__
        text = f"{name}: {text}" if text else name
    return text if len(text) <= LONGEST_LINE else text[: LONGEST_LINE - 1] + "…"
