"""Arguments of encode and score for the predictor ``codes``; shape letters as in ``operations``.

Codes of a layer lie in pages of :data:`~hsswap.codec.PAGE_BLOCKS` blocks, so that memory grows with
the blocks. Code index i is row ``i % PAGE_BLOCKS`` of page ``i // PAGE_BLOCKS``; a row::

    | head 0: plane 0 [T] uint16 | plane 1 | ... | head 1: plane 0 ... |      row_bytes

so a head's codes have one stride and one place in every row of a layer (:mod:`hsswap.codec` says
what is in a plane).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsswap.codec import HeadCodec
from hsswap.config import LayerGroup
from hsswap.driver.operations import I32, BlockPool, UnitCache, UnitPool
from hsswap.driver.tensor import Tensor

UNKNOWN_SCORE = -1000.0
"""Of the newest block without a code that the last step did not attend; each older one has 1 less.
Below every block with a code, whose scores are logs of float64 shares."""

TABLE_ALIGNMENT = 16
"""Bytes, of tables and each part of them: a GPU loads so many at a time."""


@dataclass(frozen=True, slots=True)
class LayerCodes:
    """Codes of one layer. ``codecs``: one for each KV head, all of the layer's head_dim; none, no
    tables and no pages while no block has a code.

    ``tables``: what :func:`table_bytes` of ``codecs`` gives, u8 ``[n]``, in memory the device reads
    well, at a multiple of :data:`TABLE_ALIGNMENT`. ``pages``: u8 ``[PAGE_BLOCKS, row_bytes]`` each,
    contiguous, in order of code index.
    """

    codecs: tuple[HeadCodec, ...]
    tables: Tensor | None
    pages: tuple[Tensor, ...]
    group: LayerGroup
    block_size: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one block's codes, all heads."""
        return row_bytes_of(self.codecs, self.block_size)


def row_bytes_of(codecs: tuple[HeadCodec, ...], block_size: int) -> int:
    """Bytes of one block's codes, all heads."""
    return sum(codec.block_bytes(block_size) for codec in codecs)


@dataclass(frozen=True, slots=True)
class EncodeCodesWork:
    """Codes of n full blocks: keys of host slots ``host_slots`` ``[n]`` to ``code_index`` ``[n]``,
    which are distinct.
    """

    into: LayerCodes
    blocks: BlockPool
    host_slots: I32
    code_index: I32


@dataclass(frozen=True, slots=True)
class ScoreMemory:
    """What one (sequence, layer) remembers of its scores: float32 ``predicted`` and ``correction``
    ``[Q, C]``, C at least B. Only score writes them.
    """

    predicted: Tensor
    correction: Tensor


@dataclass(frozen=True, slots=True)
class Attended:
    """What the last step attended: blocks ``chosen`` ``[H, M]`` int32 (-1: none) and their
    logsumexp ``lse`` ``[Q, M]`` float32, of each query head.
    """

    chosen: Tensor
    lse: Tensor


@dataclass(frozen=True, slots=True)
class Resident:
    """Blocks whose keys are in device slots, so that their logits need no codes.

    ``pinned`` ``[P]`` int32: scored blocks that are looked up in ``cache``, head by head; those it
    does not hold (it is as the last select left it, or None) count by their codes. Keys that give
    NaN count as nothing. The device may hold the list: there -1 is no block. ``active``
    ``[H]`` int32: the units of the block being filled, which has ``active_tokens`` tokens, 0 if
    there is none.
    """

    units: UnitPool
    cache: UnitCache | None
    pinned: I32 | Tensor
    active: I32
    active_tokens: int


@dataclass(frozen=True, slots=True)
class ScoreCodesWork:
    """Scores of B full blocks of one sequence: ``scores`` ``[H, B]`` float32.

    ``queries`` ``[Q, dk]`` BF16; ``code_index`` ``[B]`` int32, which the device may hold, -1 for a
    block without a code. A score is the log of the block's predicted share of the attention, mean
    over the head's query group: logsumexp of the block's logits from codes, plus the correction of
    what ``last`` showed (:func:`hsswap.codec.corrected`; None: as if nothing had been), over that
    of everything, where ``resident`` blocks count with their exact logits. ``first``: whatever
    ``memory`` holds, take it as empty. ``uncorrected`` ``[H, B]`` float32: the same without the
    corrections, which find blocks better, but favour those that were attended.

    A block without a code counts with what the last step found; if that is nothing either, it is
    worth :data:`UNKNOWN_SCORE` less its distance from the newest block.
    """

    codes: LayerCodes
    queries: Tensor
    code_index: I32 | Tensor
    resident: Resident
    memory: ScoreMemory
    first: bool
    last: Attended | None
    scores: Tensor
    uncorrected: Tensor


FIELD_EXPONENT = 16
"""Added to the exponent of a field, so that it is no negative number."""


def fields_of(codec: HeadCodec) -> NDArray[np.uint32]:
    """The fields of every byte of a token's string, ``[2 n, 8]``, 0 where a byte has fewer.

    A field is a run of bits of one byte that are neighbours in one dim: bits 0 to 7 its mask in the
    byte, 8 to 15 the dim, from 16 on :data:`FIELD_EXPONENT` + e, where the masked byte counts 2^e
    levels of the dim. A byte times its weights is then a product a field, not a bit.
    """
    dims, places = codec.dim_of.astype(np.int64), codec.bit_of.astype(np.int64)
    bit = np.arange(len(dims))
    begins = bit % 8 == 0
    begins[1:] |= (np.diff(dims) != 0) | (np.diff(places) != 1)
    first = np.flatnonzero(begins)
    number = np.cumsum(begins) - 1  # the field of each bit
    masks = np.bincount(number, 1 << bit % 8).astype(np.int64)
    exponent = places[first] - first % 8 + FIELD_EXPONENT
    before = number[bit // 8 * 8][first]  # the first field of the same byte
    fields = np.zeros((len(dims) // 8, 8), np.uint32)
    fields[first // 8, np.arange(len(first)) - before] = masks | dims[first] << 8 | exponent << 16
    return fields


def table_bytes(codecs: tuple[HeadCodec, ...]) -> NDArray[np.uint8]:
    """The codecs of a layer as one run of bytes, for a device without NumPy.

    H heads, each part aligned to TABLE_ALIGNMENT, M the largest m, P the largest n::

        encode f32 [H, dk, M] | bias f32 [H, M] | query f32 [H, M, dk] | centre f32 [H, dk] |
        bits u8 [H, M], 0 past m | dim of each bit u8 [H, 16 P] | its place in it u8 [H, 16 P] |
        fields u32 [H, 2 P, 8], as :func:`fields_of` gives them |
        planes i32 [H] | planes of the heads before i32 [H]
    """
    most = max(len(codec.bits) for codec in codecs)
    planes = max(codec.planes for codec in codecs)
    dims = len(codecs[0].centre)
    heads = len(codecs)
    parts: list[NDArray[Any]] = [
        np.zeros((heads, dims, most), np.float32),
        np.zeros((heads, most), np.float32),
        np.zeros((heads, most, dims), np.float32),
        np.zeros((heads, dims), np.float32),
        np.zeros((heads, most), np.uint8),
        np.zeros((heads, 16 * planes), np.uint8),
        np.zeros((heads, 16 * planes), np.uint8),
        np.zeros((heads, 2 * planes, 8), np.uint32),
    ]
    for head, codec in enumerate(codecs):
        m, bits = len(codec.bits), len(codec.dim_of)
        parts[0][head, :, :m] = codec.encode
        parts[1][head, :m] = codec.bias
        parts[2][head, :m] = codec.query.T
        parts[3][head] = codec.centre
        parts[4][head, :m] = codec.bits
        parts[5][head, :bits] = codec.dim_of
        parts[6][head, :bits] = codec.bit_of
        parts[7][head, : bits // 8] = fields_of(codec)
    counts = np.array([codec.planes for codec in codecs], np.int32)
    parts += [counts, (np.cumsum(counts) - counts).astype(np.int32)]
    raw = b"".join(part.tobytes() + bytes(-part.nbytes % TABLE_ALIGNMENT) for part in parts)
    return np.frombuffer(raw, np.uint8)


def table_offsets(heads: int, dim: int, most: int, planes: int) -> tuple[int, ...]:
    """Where the parts of :func:`table_bytes` begin, for H, dk, M and P."""
    by_dim, bits = 4 * heads * dim * most, 16 * heads * planes
    sizes = (by_dim, 4 * heads * most, by_dim, 4 * heads * dim, heads * most, bits, bits, 4 * bits)
    offsets = [0]
    for nbytes in (*sizes, 4 * heads):
        offsets.append(offsets[-1] + -(-nbytes // TABLE_ALIGNMENT) * TABLE_ALIGNMENT)
    return tuple(offsets)
