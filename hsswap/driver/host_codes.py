"""Encode and score of the predictor ``codes`` on the host device."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hsswap import bf16, codec
from hsswap.bf16 import F32
from hsswap.driver.codes_operations import (
    PAGE_BLOCKS,
    UNKNOWN_SCORE,
    Attended,
    EncodeCodesWork,
    LayerCodes,
    ScoreCodesWork,
)
from hsswap.driver.host_memory import Scratch
from hsswap.driver.host_ops import block_views, unit_views

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
    keys, _ = block_views(work.blocks)
    page, row = np.divmod(work.code_index, PAGE_BLOCKS)
    step = max(1, ENCODE_TOKENS // work.into.block_size)
    for head, own in enumerate(work.into.codecs):
        rows = _rows_of(work.into, head)
        for first in range(0, len(page), step):
            part = slice(first, first + step)
            packed = codec.encode(own, bf16.to_float32(keys[work.host_slots[part], head]))
            for number in np.unique(page[part]).tolist():
                here = page[part] == number
                rows[number][row[part][here]] = packed[here]


def score(work: ScoreCodesWork, scratch: Scratch) -> None:
    """The log of each block's predicted share of the attention."""
    group = work.codes.group
    blocks = len(work.code_index)
    queries = bf16.to_float32(work.queries.array())
    memory = (work.memory.predicted.array(), work.memory.correction.array())
    if work.first:
        memory[1][...] = 0
    true = _truth(work.last, group.group_size, blocks)
    if not work.first:
        held = slice(0, blocks)
        memory[1][:, held] = codec.corrected(memory[1][:, held], memory[0][:, held], true)
    known = work.code_index >= 0
    predicted = memory[0][:, :blocks]
    predicted[...] = -np.inf
    predicted[:, known] = _from_codes(work, queries, work.code_index[known])
    mass = predicted + memory[1][:, :blocks]
    np.copyto(mass, true, where=~known & ~np.isnan(true))
    exact = _exact(work, queries)
    scores = work.scores.array()
    is_listed = work.resident.blocks < blocks
    for head in range(group.kv_heads):
        part = slice(head * group.group_size, (head + 1) * group.group_size)
        own = mass[part].copy()
        own[:, work.resident.blocks[is_listed]] = exact[part][:, is_listed]
        beside = codec.log_mass(exact[part][:, ~is_listed]) if not is_listed.all() else None
        share = codec.shares(own, beside)
        is_unknown = np.isneginf(own).all(0)
        age = np.arange(blocks - 1, -1, -1)
        with np.errstate(invalid="ignore"):
            found = np.log(np.maximum(share, LEAST_SHARE))
        scores[head] = np.where(is_unknown, UNKNOWN_SCORE - age, found)


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


def _exact(work: ScoreCodesWork, queries: F32) -> F32:
    """Logsumexp ``[Q, R]`` of the resident units, from their keys."""
    resident, group = work.resident, work.codes.group
    keys, _ = unit_views(resident.units)
    taken = bf16.to_float32(keys[resident.slots])  # [H, R, T, dk]
    heads = queries.reshape(group.kv_heads, 1, group.group_size, -1)
    logits = heads @ taken.swapaxes(2, 3) * np.float32(group.logit_scale)  # [H, R, G, T]
    if group.soft_cap is not None:
        cap = np.float32(group.soft_cap)
        logits = np.tanh(logits / cap) * cap
    unseen = resident.blocks == len(work.code_index)
    logits[:, unseen, :, resident.tokens_filled :] = -np.inf
    found: F32 = codec.log_mass(logits).swapaxes(1, 2).reshape(group.q_heads, -1)
    return found
