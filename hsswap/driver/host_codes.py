"""Encode and score of the predictor ``codes`` on the host device."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hsswap import codec
from hsswap.bf16 import F32
from hsswap.codec import PAGE_BLOCKS
from hsswap.config import LayerGroup
from hsswap.driver.codes_operations import (
    UNKNOWN_SCORE,
    Attended,
    EncodeCodesWork,
    LayerCodes,
    ScoreCodesWork,
)
from hsswap.driver.host_memory import Scratch
from hsswap.driver.host_ops import block_views, unit_views, wide_keys
from hsswap.driver.tensor import Tensor
from hsswap.halves import widen

ENCODE_TOKENS = 2048
"""Tokens encoded at a time: float32 keys of 128 dims are then 1 MiB, within the cache of a core."""

LEAST_SHARE = 1e-300
"""Shares are at least this, so that their logs stay above :data:`UNKNOWN_SCORE`."""


def _rows_of(codes: LayerCodes, head: int) -> list[NDArray[np.uint16]]:
    """A head's codes in each page, ``[PAGE_BLOCKS, n, T]``."""
    size = codes.block_size
    first = sum(c.planes for c in codes.codecs[:head]) * size
    planes = codes.codecs[head].planes
    return [
        page.array().view(np.uint16)[:, first : first + planes * size].reshape(-1, planes, size)
        for page in codes.pages
    ]


def encode(work: EncodeCodesWork, scratch: Scratch) -> None:
    """Codes of full blocks out of host slots."""
    views = block_views(work.blocks)
    page, row = np.divmod(work.code_index, PAGE_BLOCKS)
    step = max(1, ENCODE_TOKENS // work.into.block_size)
    for head, own in enumerate(work.into.codecs):
        rows = _rows_of(work.into, head)
        for first in range(0, len(page), step):
            part = slice(first, first + step)
            wide = wide_keys(work.blocks.group, views, (work.host_slots[part], head))
            packed = codec.encode(own, wide)
            for number in np.unique(page[part]).tolist():
                here = page[part] == number
                rows[number][row[part][here]] = packed[here]


def score(work: ScoreCodesWork, scratch: Scratch) -> None:
    """The log of each block's predicted share of the attention."""
    group = work.codes.group
    code_index = _listed(work.code_index)
    blocks = len(code_index)
    queries = widen(work.queries.array(), group.dtype)
    memory = (work.memory.predicted.array(), work.memory.correction.array())
    if work.first:
        memory[1][...] = 0
    true = _truth(work.last, group.group_size, blocks)
    if not work.first:
        held = slice(0, blocks)
        memory[1][:, held] = codec.corrected(memory[1][:, held], memory[0][:, held], true)
    known = code_index >= 0
    predicted = memory[0][:, :blocks]
    predicted[...] = -np.inf
    predicted[:, known] = _from_codes(work, queries, code_index[known])
    exact, beside = _exact_logits(work, queries, blocks)
    plain = np.where(np.isnan(exact), predicted, exact)
    np.copyto(plain, true, where=np.isnan(exact) & ~known & ~np.isnan(true))
    correction = memory[1][:, :blocks]
    correction[~known | ~np.isnan(exact)] = 0  # of what is no prediction
    for mass, into in ((plain + correction, work.scores), (plain, work.uncorrected)):
        into.array()[...] = _log_shares(mass, beside, group.group_size)


def _log_shares(mass: F32, beside: F32, group_size: int) -> NDArray[np.float64]:
    """Scores ``[H, B]`` of log masses ``[Q, B]`` and those ``[Q]`` of the block being filled."""
    blocks = mass.shape[1]
    age = np.arange(blocks - 1, -1, -1)
    scores = np.empty((len(mass) // group_size, blocks))
    for head in range(len(scores)):
        part = slice(head * group_size, (head + 1) * group_size)
        share = codec.shares(mass[part], beside[part])
        is_unknown = np.isneginf(mass[part]).all(0)
        with np.errstate(invalid="ignore"):
            found = np.log(np.maximum(share, LEAST_SHARE))
        scores[head] = np.where(is_unknown, UNKNOWN_SCORE - age, found)
    return scores


def _listed(given: NDArray[np.int32] | Tensor) -> NDArray[np.int32]:
    """A list that the caller gave, or that the device holds."""
    return given.array() if isinstance(given, Tensor) else given


def _truth(last: Attended | None, group_size: int, blocks: int) -> F32:
    """Logsumexp ``[Q, B]`` of what the last step attended, NaN elsewhere."""
    if last is None:
        return np.full((1, blocks), np.nan, np.float32)
    lse = last.lse.array()
    chosen = np.repeat(last.chosen.array(), group_size, axis=0)  # [Q, M]
    true = np.full((len(lse), blocks), np.nan, np.float32)
    query, entry = np.nonzero((chosen >= 0) & (chosen < blocks))
    true[query, chosen[query, entry]] = lse[query, entry]
    return true


def _from_codes(work: ScoreCodesWork, queries: F32, code_index: NDArray[np.int32]) -> F32:
    """Logsumexp ``[Q, n]`` of blocks by their codes."""
    group = work.codes.group
    mass = np.empty((group.q_heads, len(code_index)), np.float32)
    page, row = np.divmod(code_index, PAGE_BLOCKS)
    used = np.unique(page).tolist()
    for head, own in enumerate(work.codes.codecs):
        part = slice(head * group.group_size, (head + 1) * group.group_size)
        rows = _rows_of(work.codes, head)
        for number in used:
            here = np.flatnonzero(page == number)
            logits = codec.logits_of(own, queries[part], rows[number][row[here]])
            mass[part, here] = codec.log_mass(logits)
    return mass


def _exact_logits(work: ScoreCodesWork, queries: F32, blocks: int) -> tuple[F32, F32]:
    """Exact logsumexp ``[Q, B]`` of resident blocks, NaN for others, and ``[Q]`` that of the block
    being filled.
    """
    resident, group = work.resident, work.codes.group
    views = unit_views(resident.units)
    pinned = _listed(resident.pinned)
    pinned = pinned[pinned >= 0]
    exact = np.full((group.q_heads, blocks), np.nan, np.float32)
    beside = np.full(group.q_heads, -np.inf, np.float32)
    for head in range(group.kv_heads):
        part = slice(head * group.group_size, (head + 1) * group.group_size)
        if resident.cache is not None and len(pinned):
            block, place = np.nonzero(pinned[:, None] == resident.cache.owner.array()[head])
            held = wide_keys(group, views, resident.cache.slots.array()[head, place])
            exact[part, pinned[block]] = _mass_of_keys(group, queries[part], held).T
        if resident.active_tokens:
            active = (resident.active[head : head + 1], slice(resident.active_tokens))
            rows = wide_keys(group, views, active)
            beside[part] = _mass_of_keys(group, queries[part], rows)[0]
    return exact, beside


def _mass_of_keys(group: LayerGroup, queries: F32, keys: F32) -> F32:
    """Logsumexp ``[n, G]`` of queries ``[G, dk]`` and keys ``[n, T, dk]``; -inf instead of NaN."""
    logits: F32 = queries @ keys.swapaxes(1, 2) * np.float32(group.logit_scale)
    if group.soft_cap is not None:
        cap = np.float32(group.soft_cap)
        logits = np.tanh(logits / cap) * cap
    mass = codec.log_mass(logits)
    mass[np.isnan(mass)] = -np.inf
    return mass
