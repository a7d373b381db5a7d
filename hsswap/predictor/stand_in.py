"""What stands in for the attention that top-k leaves out.

Of the attention a share m is left out. Attention over the rest alone gives o, as if what is left
out had the mean value o; in truth it has another, r, and the output should be o + m (r - o). SparQ
(arXiv 2312.04985, section 3) takes the mean of all values for r. In a small Llama that is far off
in the first layers, where even what is left out is much like what is chosen (error of the outputs
0.160, and 0.105 without), so r - o is learned: ``scale`` o + ``value``, for each query head. The
output becomes o + m (scale o + value), m being what the codes predict of the blocks left out, and
nothing more is read.

It is learned where the basis is: from a prompt's first tokens, with the choice of blocks that a
true oracle would make there. It serves where a sequence has no rows of its own to learn from
(:mod:`hsswap.lessons`). Names and shapes, for one KV head (G query heads, T tokens):

| function | takes | gives |
|---|---|---|
| ``stand_in_of`` | keys, values ``[T, d]``, queries ``[N, G, dk]`` | :class:`StandIn` |
| ``with_stand_in`` | outputs ``[..., G, dv]``, shares | the same, made up for |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsswap.bf16 import F32
from hsswap.fitting import fitted, sums_of
from hsswap.rope import F64

GROUP_TOKENS = 16
"""Tokens chosen together while learning, whatever the swap's blocks are."""

CHOSEN = 1 / 32
"""Part of the groups that is chosen: 2 of 64. Twice and half of it learn the same within 4 %."""

RECENT_TOKENS = 128
"""Never left out, nor are the first 16, as in top-k mode."""

LEAST_TOKENS = 512
"""Fewer leave too little out to learn from. Queries of the second half are used."""


@dataclass(frozen=True, slots=True)
class StandIn:
    """Of one KV head: float32 ``scale`` ``[..., G]`` and ``value`` ``[..., G, dv]``; zeros change
    nothing.
    """

    scale: F32
    value: F32

    @classmethod
    def nothing(cls, group_size: int, value_dim: int) -> StandIn:
        """Leaves an output as it is."""
        zeros = np.zeros((group_size, value_dim), np.float32)
        return cls(zeros[:, 0].copy(), zeros)


def with_stand_in(out: F32, share: NDArray[Any], stand_in: StandIn) -> F32:
    """Outputs ``[..., G, dv]`` of attention that left out ``share`` ``[..., G]`` of the mass."""
    lacking = stand_in.scale[..., None] * out + stand_in.value
    made_up: F32 = out + np.asarray(share, np.float32)[..., None] * lacking
    return made_up


def stand_in_of(
    keys: F64, values: F64, queries: F64, at: NDArray[np.int64], logit_scale: float
) -> StandIn:
    """Learn from the first T tokens' keys ``[T, dk]`` and values ``[T, dv]`` and from queries
    ``[N, G, dk]`` at positions ``at`` ``[N]``, all as they go into attention.

    The same input gives the same. Nothing is learned where T is under :data:`LEAST_TOKENS`.
    """
    tokens, group_size = len(keys), queries.shape[1]
    late = (at >= tokens // 2) & (at < tokens)
    if tokens < LEAST_TOKENS or not late.any():
        return StandIn.nothing(group_size, values.shape[1])
    at, queries = at[late], queries[late]
    weights = _weights(keys, queries, at, logit_scale)  # [N, G, T]
    full = weights @ values
    kept = weights * _kept(weights, at)[:, None]
    held = kept.sum(-1)
    near = (kept @ values) / held[..., None]
    scale, value = fitted(sums_of(near, full, 1 - held))
    return StandIn(scale.astype(np.float32), value.astype(np.float32))


def _weights(keys: F64, queries: F64, at: NDArray[np.int64], logit_scale: float) -> F64:
    """Softmax over each query's past."""
    logits: F64 = queries @ keys.T * logit_scale
    seen = np.arange(len(keys)) <= at[:, None]
    logits[np.broadcast_to(~seen[:, None], logits.shape)] = -np.inf
    weights: F64 = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return weights


def _kept(weights: F64, at: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Tokens attended ``[N, T]``: the pinned ones and the groups of greatest mean mass."""
    rows, tokens = len(weights), weights.shape[2]
    token = np.arange(tokens)
    first_recent = (at + 1) // GROUP_TOKENS * GROUP_TOKENS - RECENT_TOKENS
    whole = tokens // GROUP_TOKENS
    mass = weights.mean(1)[:, : whole * GROUP_TOKENS].reshape(rows, whole, GROUP_TOKENS).sum(-1)
    group = np.arange(whole)
    candidate = (group >= 1) & ((group + 1) * GROUP_TOKENS <= first_recent[:, None])
    count = max(1, round(CHOSEN * whole))
    order = np.argsort(np.where(candidate, -mass, 1), axis=1, kind="stable")
    chosen = np.zeros((rows, -(-tokens // GROUP_TOKENS)), np.bool_)
    np.put_along_axis(chosen, order[:, :count], True, 1)
    by_token = np.repeat(chosen, GROUP_TOKENS, axis=1)[:, :tokens]
    return by_token | (token >= first_recent[:, None]) | (token < GROUP_TOKENS)
