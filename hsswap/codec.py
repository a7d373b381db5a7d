"""Codes of keys: a few bits a dim in a basis of their own, packed for one KV head of one block.

One KV head, T tokens of a block, m code dims of b(d) bits, n planes, G query heads:

| function | takes | gives |
|---|---|---|
| ``levels_of`` | codec, keys ``[N, dk]`` float32 | levels ``[N, m]`` uint8 |
| ``pack`` | codec, levels ``[B, T, m]`` | codes ``[B, n, T]`` uint16 |
| ``encode`` | codec, keys ``[B, T, dk]`` float32 | codes ``[B, n, T]`` uint16 |
| ``logits_of`` | codec, queries ``[G, dk]`` float32, codes | logits ``[G, B, T]`` float32 |
| ``log_mass`` | logits ``[G, B, T]`` | logsumexp of each block ``[G, B]`` |
| ``shares`` | log mass ``[G, B]``, resident logsumexp ``[G]`` | share of attention ``[B]`` |
| ``corrected`` | correction, prediction, truth ``[G, B]`` | the next correction ``[G, B]`` |

A code is level(d) = floor(key . encode(d) + bias(d)), kept within 0 to 2^b(d) - 1; a logit is
query . centre + sum over d of (query . query(d)) level(d): every quantiser is affine, so a logit is
a constant and one weight for each bit. That is what makes scoring cheap: no table of levels, and a
dim's bits may lie anywhere.

A token's bits are a string of n planes of 16; plane j of a block is T consecutive uint16, so
that neighbouring lanes of a GPU read neighbouring tokens of one plane.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from hsswap.bf16 import F32, U16

U8 = NDArray[np.uint8]

MAX_BITS = 6
"""Bits of a dim at most: the seventh would gain less than any other dim's first, nearly always."""

PLANE_BITS = 16

PAGE_BLOCKS = 256
"""Blocks whose codes get memory together: 4,096 tokens of 16 a block."""

TRUST, FADE = 0.8, 0.9
"""Of a prediction's error, what is added to the next prediction; and what each step leaves of it.
Trust of 0.5 to 0.9 and fading of 0.8 to 0.95 were within half a point of recall of this."""


@dataclass(frozen=True, slots=True)
class HeadCodec:
    """How one KV head's keys are coded: ``encode`` and ``query`` ``[dk, m]``, ``bias`` ``[m]``,
    ``centre`` ``[dk]`` float32, the logit scale in ``query`` and ``centre``; ``bits`` ``[m]``, each
    from 1 to 6. Bit p of a token's string is bit ``bit_of[p]`` of dim ``dim_of[p]``; the sum of
    ``bits`` is 16 n.
    """

    encode: F32
    bias: F32
    query: F32
    centre: F32
    bits: U8
    dim_of: NDArray[np.int16] = field(init=False)
    bit_of: U8 = field(init=False)

    def __post_init__(self) -> None:
        dims, places = np.array(string_of(tuple(self.bits.tolist())), np.int16)
        object.__setattr__(self, "dim_of", dims)
        object.__setattr__(self, "bit_of", places.astype(np.uint8))

    @property
    def planes(self) -> int:
        """Planes of 16 bits of a token."""
        return len(self.dim_of) // PLANE_BITS

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block's codes."""
        return 2 * self.planes * block_size


@lru_cache(maxsize=1024)
def string_of(bits: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """The dim of each bit of a token's string, and its place in the dim, for ``bits`` a dim.

    A GPU multiplies every byte as often as the one of most dims has dims, so they are spread: the
    widest dims first, each to the byte with most room; one that fits nowhere is cut.
    """
    room = [(-8, 0, byte) for byte in range(sum(bits) // 8)]  # less bits, dims so far
    heapify(room)
    dims, places = [0] * (8 * len(room)), [0] * (8 * len(room))
    for dim in sorted(range(len(bits)), key=lambda dim: -bits[dim]):
        place = 0
        while place < bits[dim]:
            free, count, byte = heappop(room)
            taken = min(-free, bits[dim] - place)
            first = 8 * byte + 8 + free
            dims[first : first + taken] = [dim] * taken
            places[first : first + taken] = range(place, place + taken)
            place += taken
            if free + taken < 0:
                heappush(room, (free + taken, count + 1, byte))
    return dims, places


def planes_of_budget(elements: int, heads: int, metadata_ratio: float) -> int:
    """Planes of 16 bits a token for all heads of a model, one each at least.

    ``elements``: of K and V of a token, all layers and heads; ``metadata_ratio``: bytes of codes to
    bytes of K and V, two bytes an element, as a plane.
    """
    return max(heads, int(metadata_ratio * elements))


def levels_of(codec: HeadCodec, keys: F32) -> U8:
    """Levels ``[N, m]`` of keys ``[N, dk]``; NaN and what is out of range become an end level."""
    with np.errstate(invalid="ignore", over="ignore"):
        place = np.floor(keys @ codec.encode + codec.bias)
    top = (1 << codec.bits.astype(np.int32)) - 1
    levels: U8 = np.clip(np.nan_to_num(place, nan=0.0), 0, top).astype(np.uint8)
    return levels


def pack(codec: HeadCodec, levels: U8) -> U16:
    """Codes ``[B, n, T]`` of levels ``[B, T, m]``."""
    bits = (levels[..., codec.dim_of] >> codec.bit_of) & 1
    packed = np.packbits(bits, axis=-1, bitorder="little")  # [B, T, 2 n]
    halves = packed.reshape(*levels.shape[:2], codec.planes, 2).astype(np.uint16)
    return np.ascontiguousarray((halves[..., 0] | halves[..., 1] << 8).swapaxes(1, 2))


def unpack(codec: HeadCodec, codes: U16) -> U8:
    """Levels ``[B, T, m]`` of codes ``[B, n, T]``."""
    words = codes.swapaxes(1, 2)
    bits = (words[..., None] >> np.arange(PLANE_BITS, dtype=np.uint16)) & 1
    flat = bits.reshape(*words.shape[:2], -1).astype(np.uint8) << codec.bit_of
    levels = np.zeros((*words.shape[:2], len(codec.bits)), np.uint8)
    for position, dim in enumerate(codec.dim_of.tolist()):
        levels[..., dim] |= flat[..., position]
    return levels


def encode(codec: HeadCodec, keys: F32) -> U16:
    """Codes ``[B, n, T]`` of keys ``[B, T, dk]``."""
    levels = levels_of(codec, keys.reshape(-1, keys.shape[-1]))
    return pack(codec, levels.reshape(*keys.shape[:2], -1))


def logits_of(codec: HeadCodec, queries: F32, codes: U16) -> F32:
    """Logits ``[G, B, T]`` of queries ``[G, dk]``, scaled, from codes ``[B, n, T]``."""
    weights = (queries @ codec.query)[:, codec.dim_of] * (1 << codec.bit_of).astype(np.float32)
    # A table for each byte of a token's string: what any of its 256 values adds.
    values = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    tables = weights.reshape(len(queries), -1, 8) @ values.T.astype(np.float32)  # [G, 2 n, 256]
    constant: F32 = queries @ codec.centre
    logits = np.empty((len(queries), codes.shape[0], codes.shape[2]), np.float32)
    logits[...] = constant[:, None, None]
    for plane in range(codec.planes):
        words = codes[:, plane]
        for query, table in enumerate(tables):
            logits[query] += table[2 * plane][words & 0xFF]
            logits[query] += table[2 * plane + 1][words >> 8]
    return logits


def log_mass(logits: F32) -> F32:
    """Logsumexp over the last axis; -inf where all logits are."""
    best = logits.max(-1)
    shift = np.where(np.isfinite(best), best, np.float32(0))
    with np.errstate(divide="ignore"):
        total: F32 = np.log(np.exp(logits - shift[..., None]).sum(-1)) + shift
    return total


def shares(mass: F32, resident: F32 | None = None) -> NDArray[np.float64]:
    """The part of the attention each block gets ``[B]``: the mean over the group's query heads.

    ``mass`` ``[G, B]``: logsumexp of each block. ``resident`` ``[G]``: that of all tokens that are
    not in these blocks, whose logits are exact; it decides how much each query head's blocks weigh
    against the other heads' (recall at 256 B: 0.803 without, 0.841 with).
    """
    every = mass if resident is None else np.concatenate((mass, resident[:, None]), axis=1)
    logits = every.astype(np.float64)
    best = logits.max(1, keepdims=True)
    shift = np.where(np.isfinite(best), best, 0)
    weight = np.exp(logits - shift)
    total = weight.sum(1, keepdims=True)
    part: NDArray[np.float64] = (weight / np.where(total > 0, total, 1)).mean(0)
    return part[: mass.shape[1]]


def corrected(correction: F32, predicted: F32, true: F32) -> F32:
    """What to add to the next predictions of each block's log mass, all ``[G, B]`` float32.

    ``correction`` was used so far, ``predicted`` are the last predictions without it, ``true`` what
    attention found (NaN for blocks that were not attended). A block's codes err the same way for
    similar queries, and those of neighbouring tokens are similar (cosine 0.83): on a small Llama
    recall at 128 B rose from 0.768 to 0.795, where the mean of predicted and true shares lowered
    it.
    """
    with np.errstate(invalid="ignore"):
        shown = np.float32(TRUST) * (true - predicted)
    kept: F32 = np.where(np.isfinite(shown), shown, np.float32(FADE) * correction)
    return kept
