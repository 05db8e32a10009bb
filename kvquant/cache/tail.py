"""The raw tokens at the end of a row, in a buffer that they grow into.

A buffer is only ever written beyond what any tail shows of it, so rows may share one, and what was handed out stays as
it was.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROWTH = 32  # tokens of room at a time: a step that writes in place copies nothing, and little memory lies idle


class _Buffer:
    """``tokens`` ``[heads, room, dim]``, of which the first ``used`` are somebody's."""

    __slots__ = ("tokens", "used")

    def __init__(self, tokens: Tensor, used: int) -> None:
        self.tokens = tokens
        self.used = used


class Tail:
    """The first tokens of a buffer. Nothing here changes a tail: each change is a tail of its own."""

    __slots__ = ("_buffer", "tokens")

    def __init__(self, buffer: _Buffer, tokens: Tensor) -> None:
        self._buffer = buffer
        self.tokens = tokens  # [heads, tokens, dim]

    @classmethod
    def of(cls, tokens: Tensor) -> Tail:
        """A tail of ``tokens`` ``[heads, tokens, dim]`` in a buffer just large enough."""
        copy = tokens.detach().clone(memory_format=torch.contiguous_format)
        return cls(_Buffer(copy, copy.shape[1]), copy)

    @property
    def room(self) -> Tensor:
        """All that is allocated, which tails may share."""
        return self._buffer.tokens

    def append(self, new: Tensor) -> Tail:
        """The tail with ``new`` ``[heads, tokens, dim]`` behind it."""
        buffer, held = self._buffer, self.tokens.shape[1]
        stop, size = held + new.shape[1], buffer.tokens.shape[1]
        # What was made in inference mode can't be written outside of it.
        writable = torch.is_inference_mode_enabled() or not buffer.tokens.is_inference()
        if held != buffer.used or stop > size or not writable:
            room = -(-stop // GROWTH) * GROWTH if held else stop
            heads, _, dim = new.shape
            buffer = _Buffer(new.new_empty(heads, room, dim), held)
            buffer.tokens[:, :held] = self.tokens
        buffer.tokens[:, held:stop] = new.detach()
        buffer.used = stop
        return Tail(buffer, buffer.tokens[:, :stop])

    def first(self, count: int) -> Tail:
        """Its first ``count`` tokens."""
        return Tail(self._buffer, self.tokens[:, :count])

    def after(self, count: int) -> Tail:
        """What follows its first ``count`` tokens, in a buffer of its own: the old one may hold a whole prompt."""
        return Tail.of(self.tokens[:, count:])
