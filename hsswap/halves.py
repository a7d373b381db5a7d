"""The 16-bit formats of K, V, queries and outputs: BF16 as codes, FP16 as NumPy's float16."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsswap import bf16

F32 = NDArray[np.float32]

DTYPES: dict[str, np.dtype[Any]] = {"bf16": np.dtype(np.uint16), "f16": np.dtype(np.float16)}
"""Names of the formats, and what NumPy arrays of them are."""


def widen(values: NDArray[Any], dtype: str, out: F32 | None = None) -> F32:
    """Float32 of an array of 16-bit items of the format ``dtype``, exactly.

    ``out``: a C-contiguous float32 array of the same shape, filled and returned if given.
    """
    if dtype == "bf16":
        return bf16.to_float32(values, out)
    halves = values.view(np.float16)
    if out is None:
        return halves.astype(np.float32)
    out[...] = halves
    return out


def narrow(values: F32, dtype: str) -> NDArray[Any]:
    """Float32 rounded to the format, to nearest, ties to even; what is too large is infinite."""
    if dtype == "bf16":
        return bf16.from_float32(values)
    with np.errstate(over="ignore"):
        return values.astype(np.float16)
