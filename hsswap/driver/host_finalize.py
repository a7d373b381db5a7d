"""The end of an attention: from carried state to output, logsumexp and block masses."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsswap.codec import log_mass
from hsswap.driver.choice_operations import LearnWork
from hsswap.driver.host_memory import Scratch
from hsswap.driver.operations import FinalizeWork, LeftOut
from hsswap.driver.tensor import Tensor
from hsswap.fitting import fitted, sums_of
from hsswap.halves import narrow, widen

F32 = NDArray[np.float32]


def finalize(work: FinalizeWork, scratch: Scratch) -> None:
    """Divide by the sum and round; rows that saw nothing are 0."""
    maximum: F32 = work.state.maximum.array()
    total: F32 = work.state.total.array()
    weighted: NDArray[Any] = work.state.weighted.array()
    if work.sinks is not None:
        maximum, total, weighted = _with_sinks(maximum, total, weighted, work.sinks.array())
    out = np.where(total[..., None] == 0, np.float32(0), weighted / total[..., None])
    if work.left_out is not None:
        made_up = _made_up(out, maximum + np.log(total), work.left_out)
        out = np.where(total[..., None] == 0, np.float32(0), made_up)
    work.out.array()[...] = narrow(out, work.out.dtype)
    if work.lse is None and work.block_mass is None:
        return
    lse = maximum + np.log(total)
    if work.lse is not None:
        work.lse.array()[...] = lse
    if work.block_mass is not None and work.block_lse is not None:
        _write_masses(work.block_lse, lse, work.block_mass)


def _made_up(out: F32, lse: F32, left_out: LeftOut) -> F32:
    """``out`` ``[1, 1, Q, dv]`` with what stands in for the blocks that were not chosen."""
    predicted, chosen = left_out.predicted.array(), left_out.chosen.array()
    rest = np.ones((len(chosen), predicted.shape[1] + 1), np.bool_)
    np.put_along_axis(rest, chosen, False, 1)  # -1: the column that is left out
    by_query = np.repeat(rest[:, :-1], len(predicted) // len(chosen), axis=0)
    log_rest = log_mass(np.where(by_query, predicted, np.float32(-np.inf)))
    with np.errstate(over="ignore", invalid="ignore"):
        share = 1 / (1 + np.exp(lse[0, 0] - log_rest))
    lacking = left_out.scale.array()[:, None] * out + left_out.value.array()
    made_up: F32 = out + share[:, None] * lacking
    return made_up


def learn(work: LearnWork, scratch: Scratch) -> None:
    """Add sums over the rows, and fit. A row with what is no number teaches nothing."""
    maximum: F32 = work.state.maximum.array()[:, 0]
    total: F32 = work.state.total.array()[:, 0]
    weighted: F32 = work.state.weighted.array()[:, 0]
    saw = total > 0
    near = np.where(saw[..., None], weighted, 0) / np.where(saw, total, 1)[..., None]
    full = widen(work.full.array(), work.full.dtype)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        share = np.maximum(1 - np.exp(maximum + np.log(total) - work.full_lse.array()), 0)
        known = saw & np.isfinite(share)
        known &= np.isfinite(np.square(near).sum(-1)) & np.isfinite(np.square(full).sum(-1))
    near, full = (np.where(known[..., None], part, np.float32(0)) for part in (near, full))
    more = sums_of(near, full, np.where(known, share, np.float32(0)))
    sums = work.sums.array()
    sums[...] = more if work.begin else sums + more
    work.scale.array()[...], work.value.array()[...] = fitted(sums)


def _with_sinks(maximum: F32, total: F32, weighted: F32, sinks: F32) -> tuple[F32, F32, F32]:
    """The state with a logit of each query head added to the softmax, without a value."""
    highest = np.maximum(maximum, sinks)
    base = np.where(highest == -np.inf, np.float32(0), highest)
    factor = np.exp(maximum - base)
    return highest, total * factor + np.exp(sinks - base), weighted * factor[..., None]


def _write_masses(block_lse: Tensor, lse: F32, block_mass: Tensor) -> None:
    """exp(block_lse - lse), averaged over rows and query groups: ``[S, H, B]``."""
    sequences, rows, queries, blocks = block_lse.shape
    heads = block_mass.shape[1]
    # A row that saw nothing has a logsumexp of -inf, and so have its blocks: its masses are 0.
    seen = np.where(lse == -np.inf, np.float32(0), lse)
    mass = np.exp(block_lse.array() - seen[..., None])
    grouped = mass.reshape(sequences, rows, heads, queries // heads, blocks)
    block_mass.array()[...] = grouped.mean((1, 3))
