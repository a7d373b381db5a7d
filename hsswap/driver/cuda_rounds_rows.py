"""Rows of logits on a GPU, for speculative rounds: the likeliest token, tokens at random.

Written against :class:`Launcher`; the structs are those at the top of the kernels' files.
"""

from __future__ import annotations

import struct

from hsswap.driver.base import Stream
from hsswap.driver.cuda_seam import Grid, Launcher
from hsswap.driver.round_operations import ArgmaxWork
from hsswap.driver.sampling_operations import RejectWork, SampleWork, Sampling
from hsswap.driver.tensor import Tensor

ROW_THREADS = 512  # of round_rows.cuh

PART_LOGITS = 8192
"""Logits that one thread block of argmax takes: 128,256 are read by 16 multiprocessors."""

COUNTER_BYTES = 65536
"""Of the workspace: what every operation leaves zero."""


def address_of(tensor: Tensor | None) -> int:
    """Null for a tensor that is not given."""
    return 0 if tensor is None else tensor.address


def argmax(device: Launcher, stream: Stream, work: ArgmaxWork) -> None:
    """See :class:`ArgmaxWork`."""
    sequences, rows, vocab = work.logits.shape
    count = sequences * rows
    parts = -(-vocab // PART_LOGITS)
    if 4 * count > COUNTER_BYTES:
        parts = 1  # so many rows fill the GPU by themselves
    partial = device.workspace(stream, COUNTER_BYTES + 12 * parts * count)
    params = struct.pack(
        "<QQQQQQqqii",
        work.logits.address,
        work.tokens.address,
        address_of(work.probabilities),
        address_of(work.flags),
        partial + COUNTER_BYTES,
        partial,
        vocab,
        -(-vocab // parts),
        rows,
        0,
    )
    grid = Grid(parts, count)
    device.launch(stream, "argmax", {}, grid, Grid(ROW_THREADS), 0, params)


def _sampling(sampling: Sampling) -> bytes:
    return struct.pack(
        "<5Q",
        sampling.temperature.address,
        sampling.top_k.address,
        sampling.top_p.address,
        sampling.min_p.address,
        sampling.seed.address,
    )


def sample(device: Launcher, stream: Stream, work: SampleWork) -> None:
    """See :class:`SampleWork`."""
    sequences, rows, vocab = work.logits.shape
    params = _sampling(work.sampling) + struct.pack(
        "<QQQQQqiIIi",
        work.logits.address,
        work.position.address,
        work.tokens.address,
        address_of(work.probabilities),
        address_of(work.distribution),
        vocab,
        rows,
        work.plus & 0xFFFFFFFF,
        int(work.purpose),
        0,
    )
    grid = Grid(sequences * rows)
    device.launch(stream, "sample", {}, grid, Grid(ROW_THREADS), 0, params)


def reject(device: Launcher, stream: Stream, work: RejectWork) -> None:
    """See :class:`RejectWork`."""
    sequences, rows, vocab = work.logits.shape
    params = _sampling(work.sampling) + struct.pack(
        "<QQQQQQqii",
        work.logits.address,
        work.pos_start.address,
        work.vtok.address,
        work.brk.address,
        work.preds.address,
        address_of(work.draft_distribution),
        vocab,
        rows,
        0,
    )
    grid = Grid(sequences * rows)
    device.launch(stream, "reject", {}, grid, Grid(ROW_THREADS), 0, params)
