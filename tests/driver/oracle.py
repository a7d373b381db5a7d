"""Attention in float64, straight from rows of K and V, and the tolerance of promise 1.

Written apart from the implementation: no spans, no tiles, no carried state, dense rows. The only
thing in common is what BF16 means, and that is written again here, through float conversion.
Products are by einsum, which calls no BLAS: its threads would wait for each other on busy cores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

U16 = NDArray[np.uint16]
F64 = NDArray[np.float64]

FACTOR = 1.5
"""Ours may be off by this much more than the reference (ARCHITECTURE.md, promise 1)."""

FLOOR = 2.0**-9
"""Half a unit in the last place of BF16, relative."""

FLOOR_F16 = 2.0**-12
"""The same of FP16."""


def decode(codes: NDArray[Any]) -> F64:
    """BF16 codes as float64: sign, exponent of 8 bits biased by 127, 7 bits of fraction. Float16
    and float64 are taken as they are.
    """
    if codes.dtype in (np.float16, np.float64):
        return codes.astype(np.float64)
    numbers = codes.astype(np.int64)
    exponent, fraction = (numbers >> 7) & 0xFF, numbers & 0x7F
    normal = np.ldexp(1 + fraction / 128, exponent - 127)
    subnormal = np.ldexp(fraction / 128, -126)
    size = np.where(exponent == 0, subnormal, normal)
    size = np.where(exponent == 255, np.where(fraction == 0, np.inf, np.nan), size)
    signed: F64 = np.where(numbers >> 15, -size, size)
    return signed


def round_to_bf16(values: NDArray[np.floating]) -> F64:
    """The nearest BF16 numbers, ties to even, for finite values that are not subnormal."""
    fraction, exponent = np.frexp(values.astype(np.float64))
    rounded: F64 = np.ldexp(np.rint(fraction * 256), exponent - 8)  # 8 bits with the leading one
    return rounded


def round_to_f16(values: NDArray[np.floating]) -> F64:
    """The nearest FP16 numbers."""
    return values.astype(np.float16).astype(np.float64)


@dataclass(frozen=True)
class Heads:
    """How query heads share KV heads, and what is done to logits."""

    group_size: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None


@dataclass(frozen=True)
class Reference:
    """Outputs ``[R, Q, dv]`` of the oracle and of the BF16 reference; ``lse`` ``[R, Q]``;
    ``logits`` ``[R, Q, tokens]`` with -inf where a row does not look.
    """

    exact: F64
    usual: F64
    lse: F64
    logits: F64
    floor: float = FLOOR

    def tolerance(self) -> float:
        """The largest relative L2 error that promise 1 allows."""
        return FACTOR * max(relative_error(self.usual, self.exact), self.floor)


def relative_error(got: F64, wanted: F64) -> float:
    """L2 norm of the difference over that of ``wanted``; 0 for two zeros."""
    size = float(np.linalg.norm(wanted))
    off = float(np.linalg.norm(got - wanted))
    return 0.0 if off == 0 else math.inf if size == 0 else off / size


def attend(
    queries: NDArray[Any], keys: NDArray[Any], values: NDArray[Any], length: int, heads: Heads
) -> Reference:
    """Attention of rows ``[R, Q, dk]``, the last of which sees ``length`` tokens.

    ``keys`` ``[tokens, H, dk]`` and ``values`` ``[tokens, H, dv]``.
    """
    q, k, v = decode(queries), decode(keys), decode(values)
    is_half = queries.dtype == np.float16
    rows, query_heads, _ = q.shape
    exact = np.zeros((rows, query_heads, v.shape[2]))
    usual = np.zeros_like(exact)
    lse = np.full((rows, query_heads), -np.inf)
    logits = np.full((rows, query_heads, len(k)), -np.inf)
    for r in range(rows):
        end = length - (rows - 1 - r)
        start = 0 if heads.window is None else max(0, end - heads.window)
        if end <= start:
            continue
        for kv in range(k.shape[1]):
            group = slice(kv * heads.group_size, (kv + 1) * heads.group_size)
            seen_k, seen_v = k[start:end, kv], v[start:end, kv]
            raw = np.einsum("gd,td->gt", q[r, group], seen_k) * heads.scale
            if heads.soft_cap is not None:
                raw = heads.soft_cap * np.tanh(raw / heads.soft_cap)
            logits[r, group, start:end] = raw
            top = raw.max(1, keepdims=True)
            weight = np.exp(raw - top)
            total = weight.sum(1, keepdims=True)
            lse[r, group] = (top + np.log(total))[:, 0]
            exact[r, group] = np.einsum("gt,td->gd", weight, seen_v) / total
            usual[r, group] = _usual(q[r, group], seen_k, seen_v, heads, is_half)
    return Reference(exact, usual, lse, logits, FLOOR_F16 if is_half else FLOOR)


def _usual(q: F64, k: F64, v: F64, heads: Heads, is_half: bool) -> F64:
    """The usual kernel: logits and softmax in float32, P rounded, PV in float32, output rounded."""
    rounded_of = round_to_f16 if is_half else round_to_bf16
    raw = np.einsum("gd,td->gt", q.astype(np.float32), k.astype(np.float32))
    raw *= np.float32(heads.scale)
    if heads.soft_cap is not None:
        cap = np.float32(heads.soft_cap)
        raw = cap * np.tanh(raw / cap)
    weight = np.exp(raw - raw.max(1, keepdims=True))
    rounded = rounded_of(weight).astype(np.float32)
    product = np.einsum("gt,td->gd", rounded, v.astype(np.float32))
    return rounded_of(product / weight.sum(1, keepdims=True))
