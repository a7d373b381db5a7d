"""Choosing tokens at random on the host device (:mod:`hsswap.driver.sampling_operations`)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hsswap.driver.host_memory import Scratch
from hsswap.driver.round_operations import NO_TOKEN
from hsswap.driver.sampling_operations import Purpose, RejectWork, SampleWork, Sampling

F32 = NDArray[np.float32]
U32 = NDArray[np.uint32]

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)
_ROUNDS = 10


def philox(counter: tuple[int, NDArray[np.int64], int, int], key: tuple[int, int]) -> U32:
    """Philox4x32-10 of counters that differ in their second word: ``[n, 4]``."""
    blocks = counter[1].astype(np.uint64)
    c = [np.full_like(blocks, counter[0]), blocks]
    c += [np.full_like(blocks, counter[2]), np.full_like(blocks, counter[3])]
    k0, k1 = key
    for _ in range(_ROUNDS):
        left, right = c[0] * _MULTIPLIERS[0], c[2] * _MULTIPLIERS[1]
        c = [
            (right >> _SHIFT) ^ c[1] ^ np.uint64(k0),
            right & _LOW,
            (left >> _SHIFT) ^ c[3] ^ np.uint64(k1),
            left & _LOW,
        ]
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return np.stack(c, axis=1).astype(np.uint32)


def uniform(words: U32) -> F32:
    """Between 0 and 1, both excluded."""
    u = (words.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    below: F32 = np.minimum(u, np.float32(1.0 - 2.0**-24))
    return below


def race(weights: F32, index: int, purpose: Purpose, key: tuple[int, int]) -> int:
    """The index that wins; NO_TOKEN where no weight is positive."""
    kept = np.flatnonzero(weights > 0)
    if not len(kept):
        return NO_TOKEN
    blocks = kept // 4
    wanted, place = np.unique(blocks, return_inverse=True)
    words = philox((index & 0xFFFFFFFF, wanted, int(purpose), 0), key)[place, kept % 4]
    score = np.log(weights[kept]) - np.log(-np.log1p(-uniform(words)))
    return int(kept[np.argmax(score)])


def weights_of(logits: F32, s: int, sampling: Sampling) -> F32:
    """The weights of one row ``[V]``: all zero for a row of NaN."""
    temperature = sampling.temperature.array()[s]
    weights = np.zeros(len(logits), np.float32)
    if not (numbers := ~np.isnan(logits)).any():
        return weights
    if not temperature > 0:
        weights[np.argmax(np.where(numbers, logits, -np.inf))] = 1
        return weights
    x = np.where(numbers, logits / temperature, np.float32(-np.inf))
    peak = x.max()
    # Infinite logits are certain, and equals among themselves.
    weights[...] = np.where(x == peak, 1, np.exp(x - peak)) if np.isfinite(peak) else x == peak
    weights[~numbers] = 0
    _keep_largest(weights, int(sampling.top_k.array()[s]))
    _keep_share(weights, float(sampling.top_p.array()[s]))
    weights[weights < sampling.min_p.array()[s]] = 0
    return weights


def _keep_largest(weights: F32, count: int) -> None:
    if 0 < count < len(weights):
        weights[weights < np.partition(weights, -count)[-count]] = 0


def _keep_share(weights: F32, share: float) -> None:
    if not share < 1:
        return
    order = np.argsort(-weights, kind="stable")
    ranked = weights[order].astype(np.float64)
    above = np.concatenate([[0.0], np.cumsum(ranked)[:-1]])
    # Equal ones have the same above them: what is above the first of them.
    first = np.searchsorted(-ranked, -ranked, side="left")
    lost = above[first] >= share * ranked.sum()
    lost[ranked == ranked[0]] = False
    weights[order[lost]] = 0


def _key(sampling: Sampling, s: int) -> tuple[int, int]:
    low, high = sampling.seed.array()[s].tolist()
    return low, high


def sample(work: SampleWork, scratch: Scratch) -> None:
    """See :class:`SampleWork`."""
    logits, tokens = work.logits.array(), work.tokens.array()
    for s, r in np.ndindex(*tokens.shape):
        weights = weights_of(logits[s, r], s, work.sampling)
        index = int(work.position.array()[s]) + work.plus + r
        token = race(weights, index, work.purpose, _key(work.sampling, s))
        tokens[s, r] = token
        total = weights.sum(dtype=np.float64)
        if work.probabilities is not None:
            share = 0.0 if token == NO_TOKEN else weights[token] / total
            work.probabilities.array()[s, r] = share
        if work.distribution is not None:
            work.distribution.array()[s, r] = weights / total if total else 0.0


def reject(work: RejectWork, scratch: Scratch) -> None:
    """See :class:`RejectWork`."""
    preds, brk = work.preds.array(), work.brk.array()
    for s in range(len(preds)):
        used, base = brk[s].tolist()
        for r in range(used + base):
            draft = r + 1 - base
            if draft < used:
                preds[s, r] = _stands_or_not(work, s, r, draft)
            else:
                weights = weights_of(work.logits.array()[s, r], s, work.sampling)
                index = int(work.pos_start.array()[s]) + r + 1
                preds[s, r] = race(weights, index, Purpose.TARGET, _key(work.sampling, s))


def _stands_or_not(work: RejectWork, s: int, r: int, draft: int) -> int:
    """The draft after row r, or the token in its place."""
    weights = weights_of(work.logits.array()[s, r], s, work.sampling)
    total = weights.sum(dtype=np.float64)
    if not total:
        return NO_TOKEN
    p = weights / np.float32(total)
    token = int(work.vtok.array()[s, r + 1])
    if work.draft_distribution is None:
        q = np.zeros_like(p)
        q[token] = 1
    else:
        q = work.draft_distribution.array()[s, draft]
    index, key = int(work.pos_start.array()[s]) + r + 1, _key(work.sampling, s)
    words = philox((index & 0xFFFFFFFF, np.zeros(1, np.int64), int(Purpose.ACCEPT), 0), key)
    if uniform(words[0, :1])[0] * q[token] < p[token]:
        return token
    chosen = race(np.maximum(p - q, 0), index, Purpose.RESIDUAL, key)
    return token if chosen == NO_TOKEN else chosen
