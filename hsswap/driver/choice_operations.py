"""What becomes of a choice: records of trim and fetch, which follow select, and of learn.

Shape letters, and what the device may hold, as in :mod:`hsswap.driver.operations`.
"""

from __future__ import annotations

from dataclasses import dataclass

from hsswap.driver.operations import I32, AttentionState, BlockPool, UnitCache, UnitPool
from hsswap.driver.tensor import Tensor


@dataclass(frozen=True, slots=True)
class TrimWork:
    """Of what select chose, what is not needed to keep the share left out within ``bound``.

    Tensors are those of the :class:`SelectWork` before it. A head's chosen blocks that are not in
    ``pinned`` ``[P]`` int32 are given up, the worst score first (of equal ones the higher block),
    as long as ``left_out`` stays at or under ``bound`` and ``least`` of them are kept. For one that
    is given up ``chosen`` and ``chosen_slots`` become -1 and ``missing`` 0; if it was missing, its
    place in the cache is free. ``left_out`` grows by its share: softmax of ``shares`` over blocks.
    """

    scores: Tensor
    shares: Tensor
    pinned: I32
    bound: float
    least: int
    cache: UnitCache
    chosen: Tensor
    chosen_slots: Tensor
    missing: Tensor
    left_out: Tensor


@dataclass(frozen=True, slots=True)
class FetchWork:
    """What select chose, brought into its slots and listed for attention, without the host.

    ``chosen``, ``chosen_slots`` ``[H, N]`` i32, ``missing`` ``[H, N]`` u8 and ``cache`` are those
    of the :class:`SelectWork` before it. ``host_slots`` ``[B]`` i32: the host slot of each logical
    block, -1 for one that the host tier does not have. A missing unit is copied out of its host
    slot. One without gives its place in the cache up, and its block goes into ``absent`` ``[H, N]``
    i32, the head's in ascending order, ``absent_count`` ``[H]`` i32 of them. Entries that trim gave
    up are -1 everywhere.

    Written for :class:`AttendWork`: ``slots`` and ``positions`` ``[H, N + W]`` i32. First what was
    chosen, with slot -1 where it is absent; then W blocks that no predictor ranks, such as the one
    being filled: ``tail_slots`` ``[H, W]`` and ``tail_positions`` ``[W]`` i32. All of it is
    contiguous along its last axis.
    """

    units: UnitPool
    blocks: BlockPool
    chosen: Tensor
    chosen_slots: Tensor
    missing: Tensor
    cache: UnitCache
    host_slots: Tensor
    tail_slots: Tensor
    tail_positions: Tensor
    slots: Tensor
    positions: Tensor
    absent: Tensor
    absent_count: Tensor


@dataclass(frozen=True, slots=True)
class LearnWork:
    """What N rows whose attention over everything is known teach of what a choice lacks.

    ``state`` ``[N, 1, Q]``: of attention of the rows over the choice. ``full`` ``[N, Q, dv]`` BF16
    or FP16, contiguous along dv, and ``full_lse`` ``[N, Q]`` float32, contiguous along Q: output
    and logsumexp of attention over everything. The share that the choice lacks is 1 - exp(its
    logsumexp - ``full_lse``), 0 at least. ``sums`` ``[Q, 2 dv + 3]`` float32, those of
    :func:`hsswap.fitting.sums_of`, are added to, or written where ``begin``. ``scale`` ``[Q]`` and
    ``value`` ``[Q, dv]`` float32, as :class:`~hsswap.driver.operations.LeftOut` takes them, become
    their fit. These and ``state`` are contiguous.
    """

    state: AttentionState
    full: Tensor
    full_lse: Tensor
    begin: bool
    sums: Tensor
    scale: Tensor
    value: Tensor
