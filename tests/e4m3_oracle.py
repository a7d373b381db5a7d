"""E4M3 from the definition of the format, in float64, apart from the implementation.

Every number of the format is written down; rounding looks for the nearest one.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]


def number(code: int) -> float:
    """What a code stands for: S.EEEE.MMM, bias 7, 0x7F and 0xFF are NaN."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, fraction = (code >> 3) & 0xF, code & 0x7
    if exponent == 15 and fraction == 7:
        return math.nan
    if exponent == 0:
        return sign * fraction / 8 * 2.0**-6
    return sign * (1 + fraction / 8) * 2.0 ** (exponent - 7)


NUMBERS = np.array([number(code) for code in range(256)])
ASCENDING = NUMBERS[:127]
"""Those of the codes 0 to 0x7E: 0 to 448, in order."""


def scale_for(largest: float) -> float:
    """A 448th of the number, in float32, from 2^-126 on; 1 for 0."""
    return max(float(np.float32(largest) / np.float32(448)), 2.0**-126) if largest else 1.0


def nearest(value: float) -> int:
    """The code of the nearest number, of two equally near ones that with an even code."""
    if math.isnan(value):
        return 0x7F | 0x80 * (math.copysign(1, value) < 0)
    size = min(abs(value), 448.0)
    above = int(np.searchsorted(ASCENDING, size))
    below = max(0, above - 1)
    up, down = ASCENDING[above] - size, size - ASCENDING[below]
    code = above if up < down or (up == down and above % 2 == 0) else below
    return code | 0x80 * (math.copysign(1, value) < 0)


def quantised(rows: F64) -> tuple[U8, F32]:
    """Codes ``[..., dim]`` and scales ``[...]`` of numbers that float32 holds."""
    sizes = np.abs(rows)
    largest = np.where(np.isfinite(sizes), sizes, 0).max(-1, initial=0.0)
    scales = np.vectorize(scale_for, otypes=[np.float32])(largest)
    ratio = np.minimum(sizes.astype(np.float32) / scales[..., None], 448.0).astype(np.float64)
    above = np.searchsorted(ASCENDING, np.nan_to_num(ratio))
    below = np.maximum(above - 1, 0)
    up, down = ASCENDING[above] - ratio, ratio - ASCENDING[below]
    code = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    code = np.where(np.isnan(ratio), 0x7F, code) | np.where(np.signbit(rows), 0x80, 0)
    return code.astype(np.uint8), scales.reshape(largest.shape)


def numbers(codes: U8, scales: F32) -> F64:
    """What codes ``[..., dim]`` with scales ``[...]`` stand for."""
    wide: F64 = NUMBERS[codes] * scales.astype(np.float64)[..., None]
    return wide
