"""FP8 E4M3 as raw 8-bit codes, and rows of them with a scale: how a cache may keep K and V.

A code is sign, 4 bits of exponent biased by 7, 3 bits of fraction; 448 is the largest number, there
is no infinity, and 0x7F and 0xFF are NaN (Open Compute Project, "OCP 8-bit Floating Point
Specification (OFP8)", revision 1.0, 2023). An element of a row of K or V of one head is its code
times the row's scale, so that rows are appended and cut off without touching others.

Rows that come as BF16 or FP16 get the size of their largest finite element over 448 as their scale
(at least 2^-126; 1 for a row of zeros), so that the largest element, which weighs most in a
product, is kept best. Elements are divided by it in float32 and rounded to the nearest code, ties
to even. Infinities become 448 times the scale, of either sign, as saturation in that specification;
NaN stays NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]

LARGEST = 448.0
NAN_CODE = 0x7F
LEAST_SCALE = 2.0**-126
"""Scales stay normal numbers of float32."""


@dataclass(frozen=True, slots=True, eq=False)
class E4M3Rows:
    """Rows of K or of V that are E4M3 already, to be kept as they are.

    ``codes`` ``[rows, heads, dim]``, 8 bits each, and float32 ``scales`` ``[rows, heads]``: an
    element is its code times its scale. Arrays as any other argument, with any strides: one scale
    for all rows is an array broadcast to their shape. Of a framework whose E4M3 arrays cannot be
    exported, give codes as 8-bit integers (torch: ``x.view(torch.uint8)``).
    """

    codes: object
    scales: object

    @property
    def shape(self) -> object:
        """That of the codes."""
        return getattr(self.codes, "shape", None)


@cache
def _numbers() -> F32:
    """What each of the 256 codes is."""
    codes = np.arange(256)
    exponent, fraction = codes >> 3 & 15, codes & 7
    size = np.where(
        exponent == 0, np.ldexp(fraction / 8, -6), np.ldexp(1 + fraction / 8, exponent - 7)
    )
    size[codes & 127 == NAN_CODE] = np.nan
    return np.where(codes < 128, size, -size).astype(np.float32)


def to_float32(codes: U8, scales: F32, out: F32 | None = None) -> F32:
    """Float32 of codes ``[..., dim]`` times scales ``[...]``, rounded where a product must be.

    ``out``: a C-contiguous float32 array of the shape of ``codes``, filled and returned if given.
    """
    if out is None:
        out = np.empty(codes.shape, np.float32)
    np.take(_numbers(), codes, out=out, mode="clip")
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        out *= scales[..., None]
    return out


def from_float32(rows: F32) -> tuple[U8, F32]:
    """Codes ``[..., dim]`` and scales ``[...]`` of rows ``[..., dim]``, as the module says."""
    size = np.abs(rows)
    largest = np.where(np.isfinite(size), size, np.float32(0)).max(-1, initial=0)
    with np.errstate(invalid="ignore", under="ignore"):
        scales = np.maximum(largest / np.float32(LARGEST), np.float32(LEAST_SCALE))
        scales = np.where(largest > 0, scales, np.float32(1))
        size /= scales[..., None]
    bits = size.view(np.uint32)
    # Half of the last kept place, less one unless that place is odd, as hsswap.bf16 rounds.
    kept = (bits + (np.uint32(0x7FFFF) + (bits >> np.uint32(20) & np.uint32(1)))) >> np.uint32(20)
    least_normal = np.float32(2.0**-6)
    with np.errstate(invalid="ignore"):
        small = np.rint(np.minimum(size, least_normal) * np.float32(512)).astype(np.uint32)
    # 120 exponents lie between the biases of float32 and of E4M3.
    codes = np.where(size < least_normal, small, np.minimum(kept - np.uint32(120 << 3), 0x7E))
    codes = np.where(np.isnan(size), NAN_CODE, codes) | np.signbit(rows) << 7
    return codes.astype(np.uint8), scales
