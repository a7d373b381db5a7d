"""From samples of a prompt's keys and queries to the codecs of all layers and KV heads.

Pure: no device, no I/O. :func:`calibrate` is the whole of it; the parts are in ``basis`` (moments,
directions), ``bits`` (who gets how many) and ``quantiser`` (ranges). :func:`stand_ins` learns from
the same samples what to add for attention that is left out (``stand_in``).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hsswap.codec import HeadCodec, planes_of_budget
from hsswap.predictor.basis import HeadBasis, basis_of, rotated_samples, second_moments
from hsswap.predictor.bits import allocate_bits
from hsswap.predictor.quantiser import codec_of
from hsswap.predictor.stand_in import StandIn, stand_in_of
from hsswap.rope import F64, Rope

CALIBRATION_TOKENS = 1024
"""Tokens of a prompt that make the basis. Another text of 8,192 tokens was no better."""

SINK_TOKENS = 16
"""The first tokens, left out of the basis: their keys are outliers, and their block is always
attended."""

MOST_THREADS = 8
"""Side by side, and no more than half of the processors: an event loop is running beside them."""

QUERY_STEP = 4
"""Queries of every fourth token give the same recall as all (0.783 and 0.782 on a small Llama)."""


@dataclass(frozen=True, slots=True)
class HeadSamples:
    """What one KV head has shown: ``keys`` ``[T, dk]`` at ``positions`` ``[T]``, its group's
    ``queries`` ``[N, G, dk]`` at ``query_positions`` ``[N]`` or None, all as they go into
    attention. ``values`` ``[T, dv]``, or None where attention is not a plain softmax over the whole
    past. ``group_size``: G, ``value_dim``: dv.
    """

    keys: F64
    values: F64 | None
    positions: NDArray[np.int64]
    queries: F64 | None
    query_positions: NDArray[np.int64] | None
    rope: Rope | None
    logit_scale: float
    group_size: int
    value_dim: int


def calibrate(
    heads: Sequence[HeadSamples], metadata_ratio: float, context_tokens: int, seed: int = 0
) -> list[HeadCodec]:
    """The codecs of all ``heads`` (every layer's KV heads, in any fixed order), by one threshold.

    ``context_tokens``: positions the model will be used at, over which samples are spread. The same
    input gives the same codecs. Raises ArgumentError for a head with fewer than 2 keys behind the
    first :data:`SINK_TOKENS` positions.
    """
    heads = [_behind_sinks(head) for head in heads]
    elements = sum(head.keys.shape[-1] + head.value_dim for head in heads)
    planes = planes_of_budget(elements, len(heads), metadata_ratio)

    def basis(number: int, head: HeadSamples) -> HeadBasis:
        moments = second_moments(
            head.keys, head.queries, head.positions, head.rope, context_tokens, seed + number,
            head.query_positions,
        )  # fmt: skip
        return basis_of(moments, head.logit_scale)

    def codec(
        number: int, head: HeadSamples, basis: HeadBasis, own: NDArray[np.uint8]
    ) -> HeadCodec:
        # Other turns than those of the moments: ranges must hold for keys not seen.
        random = np.random.Generator(np.random.PCG64((seed + number, 1)))
        spread = rotated_samples(head.keys, head.positions, head.rope, 0, context_tokens, random)
        return codec_of(basis, own, spread, head.logit_scale)

    numbers = range(len(heads))
    with _threads() as pool:
        bases = list(pool.map(basis, numbers, heads))
        bits = allocate_bits([basis.variance for basis in bases], planes)
        return list(pool.map(codec, numbers, heads, bases, bits))


def _threads() -> ThreadPoolExecutor:
    """A head a turn: NumPy computes without the interpreter's lock."""
    count = min(MOST_THREADS, max(1, (os.cpu_count() or 1) // 2))
    return ThreadPoolExecutor(count, thread_name_prefix="hsswap-calibrate")


def stand_ins(heads: Sequence[HeadSamples]) -> list[StandIn]:
    """What stands in for attention that each head leaves out.

    Nothing without queries or values, and nothing of keys that are not those of the first tokens.
    """
    with _threads() as pool:
        return list(pool.map(_stand_in, heads))


def _stand_in(head: HeadSamples) -> StandIn:
    is_prompt = np.array_equal(head.positions, np.arange(len(head.keys)))
    if head.values is None or head.queries is None or not is_prompt:
        return StandIn.nothing(head.group_size, head.value_dim)
    assert head.query_positions is not None
    at = head.query_positions
    return stand_in_of(head.keys, head.values, head.queries, at, head.logit_scale)


def _behind_sinks(head: HeadSamples) -> HeadSamples:
    """Without the first tokens."""
    kept = head.positions >= SINK_TOKENS
    queries, at = head.queries, head.query_positions
    if queries is not None and at is not None:
        late = at >= SINK_TOKENS
        queries, at = queries[late], at[late]
    return replace(
        head,
        keys=head.keys[kept],
        values=None,
        positions=head.positions[kept],
        queries=queries,
        query_positions=at,
    )
