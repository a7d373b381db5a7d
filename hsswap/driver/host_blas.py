"""Matrix products that run on the calling thread alone, whatever BLAS would do.

OpenBLAS gives a product of more than 2**18 multiplications to several threads (0.3.31,
interface/gemm.c: SMP_THRESHOLD_MIN times GEMM_MULTITHREAD_THRESHOLD). They wait for each other by
spinning, and where another thread wants the core, a product takes a time slice: decode over 2,048
tokens, 32 / 8 heads, d 128, took 1,040 ms instead of 3.8 on two busy cores (2026-11-30). Products
that stay below the limit also round the same way for every number of threads.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]

SERIAL_MULTIPLICATIONS = 1 << 18
COLUMN_MULTIPLE = 8


def multiply(left: F32, right: F32, out: F32) -> None:
    """``left @ right`` into ``out``, in blocks of columns that depend on the shapes alone.

    ``left`` ``[..., M, K]``, ``right`` ``[..., K, N]``; leading axes are broadcast. Each block is
    small enough for one thread as long as M times K is at most 2**15.
    """
    if left.shape[-2] == 1:
        # A single row would go to the product of matrix and vector, which forks far earlier.
        twice = np.empty((*out.shape[:-2], 2, out.shape[-1]), np.float32)
        multiply(np.concatenate((left, left), axis=-2), right, twice)
        out[...] = twice[..., :1, :]
        return
    columns = right.shape[-1]
    most = SERIAL_MULTIPLICATIONS // max(1, left.shape[-2] * left.shape[-1])
    step = max(1, most // COLUMN_MULTIPLE) * COLUMN_MULTIPLE
    for first in range(0, columns, step):
        part = slice(first, first + step)
        np.matmul(left, right[..., part], out=out[..., part])
