"""The end of an attention: from carried state to output, logsumexp and block masses."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsswap import bf16
from hsswap.driver.host_memory import Scratch
from hsswap.driver.operations import FinalizeWork
from hsswap.driver.tensor import Tensor

F32 = NDArray[np.float32]


def finalize(work: FinalizeWork, scratch: Scratch) -> None:
    """Divide by the sum and round to BF16; rows that saw nothing are 0."""
    total: F32 = work.state.total.array()
    weighted: NDArray[Any] = work.state.weighted.array()
    out = np.where(total[..., None] == 0, np.float32(0), weighted / total[..., None])
    work.out.array()[...] = bf16.from_float32(out)
    if work.lse is None and work.block_mass is None:
        return
    lse = work.state.maximum.array() + np.log(total)
    if work.lse is not None:
        work.lse.array()[...] = lse
    if work.block_mass is not None and work.block_lse is not None:
        _write_masses(work.block_lse, lse, work.block_mass)


def _write_masses(block_lse: Tensor, lse: F32, block_mass: Tensor) -> None:
    """exp(block_lse - lse), averaged over rows and query groups: ``[S, H, B]``."""
    sequences, rows, queries, blocks = block_lse.shape
    heads = block_mass.shape[1]
    # A row that saw nothing has a logsumexp of -inf, and so have its blocks: its masses are 0.
    seen = np.where(lse == -np.inf, np.float32(0), lse)
    mass = np.exp(block_lse.array() - seen[..., None])
    grouped = mass.reshape(sequences, rows, heads, queries // heads, blocks)
    block_mass.array()[...] = grouped.mean((1, 3))
