"""Block attention in plain torch, on any device: what the compiled kernels are held to, and what does without them.

Keys of integer codes are not decoded: q·(s·c + z) = (q·s)·c + q·z, so the scale of a channel goes into the query
once per group and only codes are multiplied; likewise the scale of a token goes into its weight. A rotation goes into
the query, and for values is undone in the output. Partial results of segments are merged by the log of their sums of
exponentials (online softmax; Milakov and Gimelshein, 2018).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ..codecs import Fields
from ..codecs.affine import Affine
from ..codecs.packing import unpack
from ..codecs.rotation import hadamard
from .segments import Dense, Sealed, Segment, rotates

SCRATCH_TOKENS = 2048  # of history that are worked on at once: bounds what a step takes beside the cache


@dataclass
class Sums:
    """A softmax in the making over ``[heads, queries]``: largest score, sum, and weighted sum of values, float32."""

    most: Tensor
    total: Tensor
    values: Tensor

    @classmethod
    def start(cls, query: Tensor, dim: int) -> Sums:
        """Nothing seen yet by ``query`` ``[heads, queries, …]``, whose values have ``dim`` channels."""
        heads, queries, _ = query.shape
        zeros = query.new_zeros((heads, queries), dtype=torch.float32)
        return cls(zeros - math.inf, zeros.clone(), zeros.new_zeros((heads, queries, dim)))

    def add(self, scores: Tensor, weigh: Callable[[Tensor], Tensor]) -> None:
        """Take in tokens of float32 ``scores`` ``[heads, queries, tokens]``; ``weigh`` sums values by weight."""
        most = torch.maximum(self.most, scores.amax(dim=-1))
        seen = most.isfinite()
        change = torch.where(seen, (self.most - most).exp(), 1.0)
        weights = (scores - torch.where(seen, most, 0.0)[..., None]).exp()
        self.total = self.total * change + weights.sum(dim=-1)
        self.values = self.values * change[..., None] + weigh(weights)
        self.most = most

    def result(self) -> tuple[Tensor, Tensor]:
        """The output and the log of the sum of exponentials; zeros and -inf where a query saw nothing."""
        output = self.values / torch.where(self.total > 0, self.total, 1.0)[..., None]
        return output, self.most + self.total.log()


def attend(
    query: Tensor, segments: Sequence[Segment], dim: int, *, scale: float, softcap: float = 0.0, news: int = 1
) -> tuple[Tensor, Tensor]:
    """Attention of ``query`` ``[heads, queries, key dim]`` over the tokens of ``segments``.

    ``dim`` is that of the values; ``scale`` that of q·k, of which ``softcap · tanh(q·k / softcap)`` is taken if it is
    not 0. Query m of a head is that of new token ``m % news`` (see `Dense`). Returns the output, float32
    ``[heads, queries, dim]``, and the log of the sum of exponentials ``[heads, queries]``.
    """
    query = query.float() * scale
    plain, rotated = Sums.start(query, dim), Sums.start(query, dim)
    turned = hadamard(query) if any(_turns(segment, "key") for segment in segments) else query
    for part in parts_of(segments):
        if isinstance(part, Dense):
            scores = query @ part.keys.float().mT
        else:
            scores = _scores(turned if _turns(part, "key") else query, part)
            if part.extra is not None:
                scores = scores + scale * _in_a_row(part.extra)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = _masked(scores, part, news)
        (rotated if _turns(part, "value") else plain).add(scores, partial(_weigh, part))
    rotated.values = hadamard(rotated.values)
    return merge([plain.result(), rotated.result()])


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """One attention from those over parts of the tokens: pairs of output and log of the sum of exponentials."""
    outputs, logs = (torch.stack(tensors) for tensors in zip(*parts, strict=True))
    total = logs.logsumexp(dim=0)
    shares = (logs - torch.where(total.isfinite(), total, 0.0)).exp()
    return (outputs * shares[..., None]).sum(dim=0), total


def _turns(segment: Segment, side: str) -> bool:
    """Whether a segment's keys, or values, are worked on in rotated form."""
    if isinstance(segment, Dense):
        return False
    codec = segment.key if side == "key" else segment.value
    return rotates(codec) and _folds(segment, side)


def _folds(segment: Sealed, side: str) -> bool:
    """Whether a side's codes can be multiplied as they are."""
    if side == "key":
        codec = segment.key
        return isinstance(codec, Affine) and (
            codec.axis == "channel" or codec.channel_group(segment.dims[0]) >= segment.dims[0]
        )
    return isinstance(segment.value, Affine) and segment.value.axis == "token"


def parts_of(segments: Sequence[Segment], most: int = SCRATCH_TOKENS) -> Iterator[Segment]:
    """The segments, those of blocks in parts of about ``most`` tokens, those that count no token left out."""
    for segment in segments:
        if isinstance(segment, Dense):
            if segment.tokens:
                yield segment
            continue
        size, blocks = segment.block_tokens, len(next(iter(segment.keys.values())))
        step = max(1, most // size)
        for start in range(segment.first // size, blocks, step):
            stop = min(start + step, blocks)
            first, last = max(segment.first - start * size, 0), min(segment.stop, stop * size) - start * size
            if first < last:
                keys, values = (
                    {name: field[start:stop] for name, field in fields.items()}
                    for fields in (segment.keys, segment.values)
                )
                extra = None if segment.extra is None else segment.extra[start:stop]
                yield replace(segment, keys=keys, values=values, first=first, stop=last, extra=extra)


def _scores(query: Tensor, part: Sealed) -> Tensor:
    """q·k of ``query`` ``[heads, queries, dim]``, ``[heads, queries, tokens]``."""
    codec, fields, dim = part.key, part.keys, part.dims[0]
    if not isinstance(codec, Affine) or not _folds(part, "key"):
        return query @ codec.decode(fields, dim, torch.float32).transpose(0, 1).flatten(1, 2).mT
    codes, scale, middle = _centred(codec, fields, dim)
    if codec.axis == "token":
        scores = (query @ codes.mT) * scale.mT + query.sum(-1, keepdim=True) * middle.mT
        return _in_a_row(scores)
    grouped = torch.unflatten(codes, 2, (-1, codec.group))  # [n, heads, groups, group, dim]
    each = query[None, :, None]
    scores = (each * scale[..., None, :]) @ grouped.mT + (each * middle[..., None, :]).sum(-1, keepdim=True)
    return _in_a_row(scores.transpose(2, 3).flatten(3))


def _weigh(part: Segment, weights: Tensor) -> Tensor:
    """The sum of values by ``weights`` ``[heads, queries, tokens]``, of a codec that rotates in rotated form."""
    if isinstance(part, Dense):
        return weights @ part.values.float()
    codec, fields, dim = part.value, part.values, part.dims[1]
    if not isinstance(codec, Affine) or not _folds(part, "value"):
        return weights @ codec.decode(fields, dim, torch.float32).transpose(0, 1).flatten(1, 2)
    codes, scale, middle = (x.transpose(0, 1).flatten(1, 2) for x in _centred(codec, fields, dim))
    sums = []
    for group, codes_of_group in enumerate(torch.split(codes, codec.channel_group(dim), dim=-1)):
        of_codes = (weights * scale[:, None, :, group]) @ codes_of_group
        sums.append(of_codes + weights @ middle[:, :, group, None])
    return torch.cat(sums, dim=-1)


def _centred(codec: Affine, fields: Fields, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes ``[n, heads, tokens, dim]`` about 0, their scale, and what 0 stands for, in float32.

    Counted from the lowest code, sums over many tokens would be differences of large numbers.
    """
    half = 1 << (codec.bits - 1)
    codes = unpack(fields["codes"], codec.bits, dim).float().sub_(half)
    scale, zero = (fields[name].float() for name in ("scale", "zero"))
    return codes, scale, zero + half * scale


def _in_a_row(x: Tensor) -> Tensor:
    """``[n, heads, queries, tokens]`` of n blocks as ``[heads, queries, n · tokens]``."""
    return x.permute(1, 2, 0, 3).flatten(2)


def _masked(scores: Tensor, part: Segment, news: int) -> Tensor:
    """Scores, -inf where a query does not see a token."""
    tokens = scores.shape[-1]
    if isinstance(part, Sealed):
        if part.first or part.stop < tokens:
            scores[..., : part.first] = -math.inf
            scores[..., part.stop :] = -math.inf
    elif part.causal and news > 1:
        own = torch.arange(scores.shape[1], device=scores.device) % news + tokens - news
        hidden = torch.arange(tokens, device=scores.device) > own[:, None]
        scores = scores.masked_fill(hidden, -math.inf)
    return scores
