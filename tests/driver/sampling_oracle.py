"""Sampling in plain Python and float64, written apart from the kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]


def philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Philox4x32-10."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(b >> 32) ^ c[1] ^ k[0], b % 2**32, (a >> 32) ^ c[3] ^ k[1], a % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def distribution(
    logits: Sequence[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> F64:
    """What a token is chosen from; zeros where all logits are NaN."""
    numbers = {v: float(x) for v, x in enumerate(logits) if not math.isnan(x)}
    p = np.zeros(len(logits))
    if not numbers:
        return p
    peak = max(numbers.values())
    if temperature <= 0:
        p[min(v for v, x in numbers.items() if x == peak)] = 1
        return p
    for v, x in numbers.items():
        p[v] = 1.0 if x == peak else math.exp((x - peak) / temperature)
    if 0 < top_k < len(logits):
        p[p < sorted(p)[-top_k]] = 0
    if top_p < 1:
        whole = p.sum()
        above = [p[p > w].sum() for w in p]
        p = np.where([a < top_p * whole or w == 1 for a, w in zip(above, p, strict=True)], p, 0)
    p[p < min_p] = 0
    return np.asarray(p / p.sum())


def scores(p: F64, index: int, purpose: int, key: Sequence[int]) -> F64:
    """The race; -inf where there is no weight."""
    out = np.full(len(p), -np.inf)
    for v in np.flatnonzero(p > 0):
        word = philox((index, int(v) // 4, purpose, 0), key)[int(v) % 4]
        u = min((word + 0.5) / 2**32, 1 - 2**-24)
        out[v] = math.log(p[v]) - math.log(-math.log1p(-u))
    return out
