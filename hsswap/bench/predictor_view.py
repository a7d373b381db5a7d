"""One layer of a context as selectors and figures see it: logits, masses, residents, candidates.

Rows are the tested positions. All methods keep the same tokens resident, as the swap does: the
first 16, and behind them the last 128 with the block being filled. Every other full block is a
candidate:

    tokens   0 .. 16     16 .......................... cut     cut ......... length of the row
             resident    candidates                            resident, 128 to 143
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hsswap.bf16 import F32, U16, to_float32

BLOCK = 16
RECENT_BLOCKS = 8
I64 = NDArray[np.int64]
Bool = NDArray[np.bool_]


@dataclass(frozen=True)
class LayerView:
    """Attention of one layer for rows at positions ``first .. first + rows``.

    ``keys``: float32 ``[H, T, d]``; ``queries``: float32 ``[H, G, S, d]``, query head h * G + g;
    ``logits``: float32 ``[H, G, S, T]``, scaled by ``d ** -0.5``, -inf after the row's own token.
    """

    layer: int
    first: int
    keys: F32
    queries: F32
    logits: F32

    @classmethod
    def of(cls, layer: int, queries: U16, keys: U16, first: int) -> LayerView:
        """``queries`` ``[S, Q, d]`` of the last tokens of ``keys`` ``[T, H, d]``, BF16 codes."""
        rows, q_heads, dim = queries.shape
        k = np.ascontiguousarray(to_float32(keys).transpose(1, 0, 2))
        heads, length = k.shape[:2]
        q = to_float32(queries).reshape(rows, heads, q_heads // heads, dim).transpose(1, 2, 0, 3)
        q = np.ascontiguousarray(q, np.float32)
        flat: F32 = q.reshape(heads, -1, dim) * np.float32(dim**-0.5)
        logits: F32 = (flat @ k.swapaxes(1, 2)).reshape(heads, -1, rows, length)
        own = logits[..., length - rows :]
        own[...] = np.where(np.tri(rows, dtype=np.bool_), own, np.float32(-np.inf))
        return cls(layer, first, k, q, logits)

    @cached_property
    def lengths(self) -> I64:
        """Tokens that each row sees ``[S]``."""
        return self.first + 1 + np.arange(self.queries.shape[2])

    @cached_property
    def cuts(self) -> I64:
        """Where each row's recent tokens begin ``[S]``."""
        return np.maximum((self.lengths // BLOCK - RECENT_BLOCKS) * BLOCK, BLOCK)

    @cached_property
    def resident(self) -> Bool:
        """Tokens resident for each row ``[S, T]``."""
        token = np.arange(self.keys.shape[1])
        recent = (token >= self.cuts[:, None]) & (token < self.lengths[:, None])
        return recent | (token < BLOCK)

    def candidates(self, group_tokens: int = BLOCK) -> Bool:
        """Groups of tokens that may be chosen ``[S, T // group_tokens]``."""
        group = np.arange(self.keys.shape[1] // group_tokens)
        inside = (group + 1) * group_tokens <= self.cuts[:, None]
        return inside & (group * group_tokens >= BLOCK)

    @cached_property
    def key_blocks(self) -> F32:
        """Keys of the whole blocks ``[H, B, 16, d]``."""
        heads, length, dim = self.keys.shape
        return self.keys[:, : length // BLOCK * BLOCK].reshape(heads, -1, BLOCK, dim)

    @cached_property
    def total_lse(self) -> F32:
        """Logsumexp of all logits of a row ``[H, G, S]``."""
        best = self.logits.max(-1)
        lse: F32 = np.log(np.exp(self.logits - best[..., None]).sum(-1)) + best
        return lse

    @cached_property
    def resident_lse(self) -> F32:
        """Logsumexp of the resident tokens' logits ``[H, G, S]``: exact in any system."""
        with np.errstate(divide="ignore"):
            share = np.where(self.resident, self.weights, np.float32(0)).sum(-1)
            lse: F32 = np.log(share) + self.total_lse
        return lse

    @cached_property
    def weights(self) -> F32:
        """Softmax over the whole past ``[H, G, S, T]``."""
        weights: F32 = np.exp(self.logits - self.total_lse[..., None])
        return weights

    def query_mass(self, group_tokens: int = BLOCK) -> F32:
        """Mass of each group of tokens for each query head ``[H, G, S, B]``."""
        # As a product: NumPy's sums over a short last axis are ten times slower.
        mass: F32 = in_groups(self.weights, group_tokens) @ np.ones(group_tokens, np.float32)
        return mass

    def block_lse(self, head: int) -> F32:
        """Logsumexp of each block for the query heads of a KV head ``[G, S, B]``."""
        with np.errstate(divide="ignore"):
            lse: F32 = np.log(self.query_mass()[head])
        lse += self.total_lse[head][..., None]
        return lse

    def mass(self, group_tokens: int = BLOCK) -> F32:
        """The truth: mean mass over the query heads of a KV head ``[H, S, B]``."""
        mass: F32 = self.query_mass(group_tokens).mean(1)
        return mass


def in_groups(values: F32, group_tokens: int = BLOCK) -> F32:
    """Tokens along the last axis in whole groups ``[..., B, group_tokens]``, the rest left out."""
    whole = values.shape[-1] // group_tokens * group_tokens
    return values[..., :whole].reshape(*values.shape[:-1], -1, group_tokens)


def best_groups(scores: F32, candidates: Bool, k: int) -> I64:
    """The k best candidates ``[H, S, k]``, best first, -1 where there are fewer.

    ``scores`` is ``[H, S, B]``; a score of -inf is never chosen. Equal scores: the lower block.
    """
    usable = np.where(candidates & ~np.isnan(scores), scores, np.float32(-np.inf))
    k = min(k, usable.shape[-1])
    if k == 0:
        return np.empty((*usable.shape[:2], 0), np.int64)
    kth = np.partition(usable, usable.shape[-1] - k, axis=-1)[..., -k, None]
    # Of those level with the last place the lowest; a stable sort of at most k + ties.
    above, level = usable > kth, usable == kth
    room = k - above.sum(-1, keepdims=True)
    chosen = above | (level & (np.cumsum(level, axis=-1) <= room))
    index = np.nonzero(chosen)[2].reshape(*usable.shape[:2], k)
    value = np.take_along_axis(usable, index, -1)
    order = np.argsort(-value, axis=-1, kind="stable")
    best = np.take_along_axis(index, order, -1)
    best[np.take_along_axis(value, order, -1) == -np.inf] = -1
    return best
