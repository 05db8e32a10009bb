"""What a tuner may choose from, and what its choice is as a policy."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from ..codecs import Affine, Codec, codec_names, get_codec
from ..errors import CodecError, PolicyError, shown
from ..geometry import caches_latents
from ..keybias import key_biases
from ..policy import LayerPolicy, PrecisionPolicy
from .footprint import ROLES, Footprint

RAW = "fp16"
GROUPS = (32, 64, 128)


@dataclass(frozen=True)
class Frame:
    """What a policy sets for all layers at once."""

    sink_tokens: int = 4
    recent_tokens: int = 128
    key_bias: Literal["remove", "keep"] = "remove"

    @classmethod
    def of(cls, policy: PrecisionPolicy) -> Self:
        """That of a policy."""
        return cls(policy.sink_tokens, policy.recent_tokens, policy.key_bias)


# The first is the one the presets have.
FRAMES = (
    Frame(4, 128),
    Frame(16, 128),
    Frame(64, 128),
    *(Frame(sinks, recent) for recent in (0, 256) for sinks in (4, 16)),
)


@dataclass(frozen=True)
class Assignment:
    """A choice: a frame, and for each compressed layer the canonical names of its key's and its value's codec."""

    frame: Frame
    layers: Mapping[int, tuple[str, str]]

    def places(self) -> Iterator[tuple[int, str, str]]:
        """Layer, role and codec of every layer's keys and values."""
        for layer, codecs in self.layers.items():
            for role, codec in zip(ROLES, codecs, strict=True):
                yield layer, role, codec

    def codec(self, layer: int, role: str) -> str:
        """The codec of a layer's keys, or values."""
        return self.layers[layer][ROLES.index(role)]

    def replaced(self, layer: int, role: str, codec: str) -> Assignment:
        """The same with another codec for a layer's keys, or values."""
        key, value = self.layers[layer]
        pair = (codec, value) if role == "key" else (key, codec)
        return Assignment(self.frame, {**self.layers, layer: pair})


@dataclass(frozen=True)
class Candidates:
    """The codecs of keys and of values, by canonical name, ``fp16`` among them, and the frames that may be chosen.

    ``frames[0]`` is the one that isolated losses are measured in. Where a model caches ``latent`` parts (MLA), keys
    stand for the latent and values for the rotary key. Raises `PolicyError` on what no policy could say.
    """

    footprint: Footprint
    key: tuple[str, ...]
    value: tuple[str, ...]
    frames: tuple[Frame, ...]
    latent: bool = False

    def __post_init__(self) -> None:
        if not self.frames:
            raise PolicyError("frames: none given; at least one is needed")
        for role in ROLES:
            names = self.codecs(role)
            if RAW not in names or len(set(names)) < len(names):
                raise PolicyError(f"{role}: {shown(names)}; allowed: different codecs, {RAW} among them")
            for name in names:
                if get_codec(name, role, self.footprint.block_tokens).name != name:
                    raise PolicyError(f"{role}: {shown(name)} is not a codec's canonical name")
        for frame in self.frames:
            self.policy(self.uncompressed(frame), "frame")

    @classmethod
    def of(
        cls,
        model: Any,
        context: int,
        *,
        codecs: Sequence[str] | None = None,
        frames: Sequence[Frame] | None = None,
        block_tokens: int = 128,
    ) -> Self:
        """Codecs with every axis, group and rotation that differs for a transformers model's heads.

        ``context`` is the length of the text, in tokens, whose bytes count. ``codecs`` are those of these names
        (``int4``, not ``int4/token/g64/none``) and ``fp16``; by default all whose codes attention reads as they are,
        which leaves out bitsandbytes'. Raises `CodecError` for one that does not exist, or that cannot encode blocks
        of ``block_tokens``.
        """
        footprint = Footprint.of(model, context, block_tokens)
        latent = caches_latents(model.config)
        dims = {role: {shape[1 + which] for shape in footprint.shapes.values()} for which, role in enumerate(ROLES)}
        chosen = {}
        for role in ROLES:
            found: dict[Any, str] = {}
            for base in dict.fromkeys([RAW, *(_read_as_they_are() if codecs is None else codecs)]):
                for codec in _variants(base, role, max(dims[role]), block_tokens, required=codecs is not None):
                    found.setdefault(_behaviour(codec, dims[role]), codec.name)
            chosen[role] = tuple(found.values())
        if latent:
            chosen["value"] = tuple(name for name in chosen["value"] if _serves_rotary(name, block_tokens))
        if frames is None:
            frames = [frame for frame in FRAMES if frame.sink_tokens <= block_tokens]
            if key_biases(model, footprint.shapes):
                frames = [*frames, Frame(key_bias="keep")]
        return cls(footprint, chosen["key"], chosen["value"], tuple(frames), latent)

    def codecs(self, role: str) -> tuple[str, ...]:
        """The codecs of keys, or of values."""
        return self.key if role == "key" else self.value

    def uncompressed(self, frame: Frame | None = None) -> Assignment:
        """The choice that loses nothing."""
        return Assignment(frame or self.frames[0], dict.fromkeys(self.footprint.shapes, (RAW, RAW)))

    def isolated(self, layer: int, role: str, codec: str, frame: Frame | None = None) -> PrecisionPolicy:
        """The policy in which one layer's keys, or values, have a codec and all else is uncompressed."""
        assignment = self.uncompressed(frame).replaced(layer, role, codec)
        return self.policy(assignment, f"layer {layer} {role} {codec}")

    def policy(self, assignment: Assignment, name: str) -> PrecisionPolicy:
        """The policy that a choice is: equal neighbours under one selector, uncompressed layers by default.

        Equal choices give policies of one fingerprint.
        """
        layers = {}
        for pair, members in itertools.groupby(sorted(assignment.layers.items()), lambda entry: entry[1]):
            first, *others = [layer for layer, _ in members]
            if pair != (RAW, RAW):
                layers[f"{first}-{others[-1]}" if others else f"{first}"] = self._named(pair)
        return PrecisionPolicy(
            name=name,
            block_tokens=self.footprint.block_tokens,
            sink_tokens=assignment.frame.sink_tokens,
            recent_tokens=assignment.frame.recent_tokens,
            key_bias=assignment.frame.key_bias,
            default=self._named((RAW, RAW)),
            layers=layers,
        )

    def assignment(self, policy: PrecisionPolicy) -> Assignment | None:
        """The choice that a policy is; None where it is none of these candidates'."""
        frame = Frame.of(policy)
        if frame not in self.frames or policy.block_tokens != self.footprint.block_tokens:
            return None
        try:
            named = {
                layer: given for selector, given in policy.layers for layer in selector.indices(self.footprint.depth)
            }
        except ValueError:  # made for a model of more layers
            return None
        layers = {}
        for layer in self.footprint.shapes:
            given = named.get(layer, policy.default)
            if self.latent:
                given = given.for_latents(policy.block_tokens)
            layers[layer] = given.key.name, given.value.name
            known = given.key.name in self.key and given.value.name in self.value
            if not known or (given.latent and not self.latent):
                return None
        return Assignment(frame, layers)

    def _named(self, pair: tuple[str, str]) -> dict[str, str]:
        return dict(zip(("latent", "rotary") if self.latent else ROLES, pair, strict=True))


def _variants(base: str, role: str, dim: int, block_tokens: int, required: bool) -> list[Codec]:
    """A codec with every combination of options that it takes; first of a kind is its default group."""
    found = []
    plain = {"codec": base}
    wide = [1 << bit for bit in range(8, dim.bit_length())]  # 256 and on, up to the head
    for axis, rotate in itertools.product(("channel", "token"), ("none", "hadamard")):
        for group in (None, *GROUPS, *(wide if axis == "token" else ())):
            options = {"axis": axis, "rotate": rotate} | ({} if group is None else {"group": group})
            try:
                found.append(get_codec(plain | options, role, block_tokens))
            except CodecError:  # no such option, or a group that does not divide a block
                continue
    if not found:
        try:
            found.append(get_codec(plain, role, block_tokens))
        except CodecError:
            if required:
                raise
    return found


def _read_as_they_are() -> list[str]:
    """Names of the codecs that every kernel attends to without decoding."""
    return [name for name in codec_names() if isinstance(get_codec(name), Affine)]


def _behaviour(codec: Codec, dims: set[int]) -> Any:
    """What two codecs have in common that do the same to heads of ``dims`` channels."""
    if isinstance(codec, Affine) and codec.axis == "token":
        return codec.bits, codec.rotate, *(codec.channel_group(dim) for dim in sorted(dims))
    return codec.name


def _serves_rotary(name: str, block_tokens: int) -> bool:
    """Whether a policy that does not name the rotary key would let it have this codec: all heads share that key."""
    codec = get_codec(name, "value", block_tokens)
    return LayerPolicy(codec, codec).for_latents(block_tokens).value is codec
