"""Formats of numbers for the verifier, by arithmetic of its own."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hsswap.config import LayerGroup

U16 = NDArray[np.uint16]
F32 = NDArray[np.float32]

E4M3_LARGEST = 448.0
E4M3_LEAST_STEP = -9
E4M3_LEAST_SCALE = 2.0**-126


def widen(codes: U16) -> F32:
    """BF16 codes as the float32 they stand for."""
    return (codes.astype(np.uint32) << np.uint32(16)).view(np.float32)


def round_to_bf16(values: F32) -> F32:
    """The nearest BF16 numbers, ties to even, as float32. For finite values."""
    bits = values.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    odd += bits
    odd += np.uint32(0x7FFF)
    odd &= np.uint32(0xFFFF0000)
    return odd.view(np.float32)


def kept_rows(group: LayerGroup, rows: F32) -> F32:
    """Rows ``[..., dim]`` of K or V as the group keeps them. For finite values.

    E4M3: multiples of a step of 2^-3 below the leading bit, at least 2^-9, of a row divided by a
    448th of its largest size.
    """
    if not group.is_e4m3:
        return rows
    largest = np.abs(rows).max(axis=-1, keepdims=True)
    scale = np.maximum(largest / np.float32(E4M3_LARGEST), np.float32(E4M3_LEAST_SCALE))
    ratio = rows / scale
    _, exponent = np.frexp(ratio)
    step = np.exp2(np.maximum(exponent - 4, E4M3_LEAST_STEP)).astype(np.float32)
    codes = np.minimum(np.abs(np.rint(ratio / step) * step), np.float32(E4M3_LARGEST))
    rounded: F32 = np.copysign(codes, rows) * scale
    return rounded
