"""How attend_decode shares a call of one query row a sequence out.

Every plan computes the same bits (hsswap/ptx/attention.cuh), so a plan may depend on everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

from hsswap.config import LayerGroup
from hsswap.driver.base import Stream
from hsswap.driver.cuda_attention_params import (
    Shape,
    attend_params,
    dim_constants,
    is_wide,
    transform_of,
)
from hsswap.driver.cuda_seam import Chip, Grid, Launch, Launcher
from hsswap.driver.cuda_top_k import fetch_lists, tells
from hsswap.driver.operations import AttendWork, FinalizeWork, PagePool
from hsswap.driver.tensor import contiguous_strides

CLUSTERS = (16, 8, 4, 2, 1)
PORTABLE_CLUSTER = 8
"""Thread blocks of a cluster; not every GPU has larger ones."""

FEW_SPANS = 16
"""Spans of a list up to which, with a multiprocessor a list, a block folds them itself."""

MOST_WARPS = 16
UNITS_A_LEAF = 8
MOST_SHARED_LEAVES = 5
"""Leaves of a thread block whose K fits into shared memory at once, each taken by several warps."""
MERGE_DIMS, MERGE_THREADS = 32, 128
MOST_GRID = 65535


class Extras(Enum):
    """What attend_decode does beside. Each is code of its own, which costs time even unused."""

    NONE = 0
    BLOCK_LSE = 1
    FETCH = 2
    """It fetches what it attends, and writes logsumexps of blocks."""


@dataclass(frozen=True, slots=True)
class Decode:
    """The constants of attention.cu."""

    cluster: int
    warps: int
    leaf_warps: int
    stages: int
    whole_spans: bool = False
    blocks_a_sm: int = 1
    block_lse: bool = False
    fetches: bool = False

    @property
    def together(self) -> int:
        """Leaves of a thread block at a time."""
        return self.warps // self.leaf_warps

    @property
    def leaf_parts(self) -> bool:
        """Whether parts are leaves; then a thread block can tell the masses of its blocks."""
        return self.cluster > 0 and not self.whole_spans

    def parts(self, shape: Shape) -> int:
        """Parts of a (sequence, KV head) that are folded in the end."""
        return shape.leaves if self.leaf_parts else shape.spans

    def shares(self, shape: Shape) -> int:
        """Thread blocks, or clusters of them, of a (sequence, KV head)."""
        return 1 if self.cluster else shape.spans

    def shared_bytes(self, shape: Shape, head_dim: int, group_size: int) -> int:
        """Shared memory of a thread block: attention.cu says what lies there."""
        rings = self.together * self.stages * 32 * head_dim
        if self.leaf_warps > 1:
            rings += self.together * (UNITS_A_LEAF * 512 + self.leaf_warps * 32)
        if not self.cluster:
            return rings + 64 * self.warps
        owned = group_size * head_dim // self.cluster
        # Folds take the rings' place: 20 KiB at most, where rings have 32 (12 and 16 at d 64).
        return rings + self.parts(shape) * (owned * 4 + group_size * 8)

    def constants(self) -> dict[str, int | str]:
        """As -D options."""
        return {
            "CLUSTER": self.cluster,
            "WARPS": self.warps,
            "LEAF_WARPS": self.leaf_warps,
            "STAGES": self.stages,
            "WHOLE_SPANS": int(self.whole_spans),
            "BLOCKS_A_SM": self.blocks_a_sm,
            "BLOCK_LSE": int(self.block_lse),
            "FETCH": int(self.fetches),
        }


def plan_decode(device: Launcher, work: AttendWork, shape: Shape) -> Decode | None:
    """How attend_decode takes a call, None for those it cannot take."""
    if not _can_take(device, work, shape):
        return None
    for plan in decode_plans(device, work.units.group, shape, _extras(work)):
        if plan.cluster <= PORTABLE_CLUSTER or _fits(device, work, shape, plan):
            return plan
    return None


def _extras(work: AttendWork) -> Extras:
    # Of a unit only K and V pass through attention.
    fetches = work.fetch is not None and not work.units.group.aux_bytes
    lse = work.block_lse is not None
    return Extras.FETCH if fetches and lse else Extras.BLOCK_LSE if lse else Extras.NONE


def decode_plans(chip: Chip, group: LayerGroup, shape: Shape, extras: Extras) -> Iterator[Decode]:
    """Plans in order of preference. A cluster over :data:`PORTABLE_CLUSTER` is only for a GPU on
    which all of them run at once; the first other one is good everywhere.
    """
    for plan in _plans(chip, group, shape):
        yield replace(plan, block_lse=extras is not Extras.NONE, fetches=extras is Extras.FETCH)


def _plans(chip: Chip, group: LayerGroup, shape: Shape) -> Iterator[Decode]:
    if shape.pairs >= chip.sm_count and shape.spans <= FEW_SPANS:
        yield Decode(1, min(4, _power(shape.spans)), 1, 2, True, 2)
        return
    for size in CLUSTERS:
        # Half of the multiprocessors are enough, and all clusters run at once.
        if shape.pairs * size <= chip.sm_count // (2 if size > 2 else 1):
            plan = _clustered(size, shape)
            if plan is None or _shared(group, shape, plan) > chip.shared_bytes_limit:
                continue
            yield plan
            if plan.cluster <= PORTABLE_CLUSTER:
                return
    if shape.leaves_a_span <= MOST_WARPS:
        # Two stages let two blocks share a multiprocessor; more in flight is slower then.
        stages = 4 if shape.spans * shape.pairs <= chip.sm_count else 2
        blocks_a_sm = 2 if stages == 2 and shape.leaves_a_span <= 8 else 1
        yield Decode(0, shape.leaves_a_span, 1, stages, False, blocks_a_sm)


def decode_takes(chip: Chip, group: LayerGroup, block_size: int) -> bool:
    """Whether attend_decode takes calls of such units."""
    return (
        chip.compute_capability >= (9, 0)
        and group.head_dim in (64, 128)
        and group.value_dim == group.head_dim
        and group.group_size <= 8
        and (block_size, group.is_e4m3) == (16, False)
        and not transform_of(group)
    )


def _can_take(device: Launcher, work: AttendWork, shape: Shape) -> bool:
    contiguous = contiguous_strides(work.queries.shape, 2)
    return not (
        isinstance(work.units, PagePool)
        or shape.rows != 1
        or not decode_takes(device, work.units.group, work.units.block_size)
        or not (is_wide(work) and work.queries.address % 8 == 0 and shape.entries > 0)
        or work.queries.strides[3] != 2
        or any(s % 8 for s in work.queries.strides[:3])
        or max(shape.sequences, shape.spans) > MOST_GRID
        or (work.queries.strides != contiguous and work.queries.strides[2] % 8)
    )


def _clustered(size: int, shape: Shape) -> Decode | None:
    """With clusters of so many blocks at most; None where a warp would have several leaves."""
    size = min(size, _power(shape.leaves))
    together = -(-shape.leaves // size)
    if together > UNITS_A_LEAF:
        return None
    if together > MOST_SHARED_LEAVES:
        return Decode(size, UNITS_A_LEAF, 1, 4)
    leaf_warps = min(UNITS_A_LEAF, _power(MOST_WARPS // together + 1) // 2)
    if together == 2 and 4 * shape.leaves >= 7 * size:
        leaf_warps = 4  # nearly all blocks have two: 16 warps take longer then
    return Decode(size, together * leaf_warps, leaf_warps, 8)


def _fits(device: Launcher, work: AttendWork, shape: Shape, plan: Decode) -> bool:
    """Whether the device runs all clusters of a plan at once."""
    shared, block = _shared(work.units.group, shape, plan), Grid(32 * plan.warps)
    grid, constants = Grid(plan.cluster), _constants(work, plan)
    one = Launch("attend_decode", constants, grid, block, shared, b"", plan.cluster)
    return shape.pairs <= device.max_active_clusters(one)


def _power(count: int) -> int:
    """The power of two at or above."""
    return 1 << max(0, count - 1).bit_length()


def _constants(work: AttendWork, plan: Decode) -> dict[str, int | str]:
    return dim_constants(work.units.group, work.units.block_size) | plan.constants()


def _shared(group: LayerGroup, shape: Shape, plan: Decode) -> int:
    return plan.shared_bytes(shape, group.head_dim, group.group_size)


def launch_decode(
    device: Launcher,
    stream: Stream,
    work: AttendWork,
    shape: Shape,
    plan: Decode,
    end: FinalizeWork | None,
) -> None:
    """Launch attend_decode, and merge_decode if its parts are in memory."""
    group = work.units.group
    params = attend_params(
        device, stream, work, shape, plan.parts(shape), end, partial=not plan.cluster
    )
    lists = b""
    if work.fetch is not None and plan.fetches:
        early = tells(device.last_launch(stream), work.fetch)
        lists = fetch_lists(work.fetch, early=early)
    grid = Grid(max(1, plan.cluster) * group.kv_heads, plan.shares(shape), shape.sequences)
    shared = _shared(group, shape, plan)
    device.launch(
        stream,
        "attend_decode",
        _constants(work, plan),
        grid,
        Grid(32 * plan.warps),
        shared,
        params + lists,
        cluster=max(1, plan.cluster),
        # Clusters that are placed while the kernel ahead still runs lie close together, where there
        # is room, and share what few paths to memory lead there: 16.7 us instead of 13.6 at 8,192
        # tokens. There is room everywhere behind select, which has a block a head, and where two
        # blocks fit on a multiprocessor: 6.6 us instead of 7.3 at 2,048 tokens.
        follows=plan.cluster <= 1
        or plan.fetches
        or (plan.leaf_warps > 1 and 2 * shared <= device.shared_bytes_limit),
    )
    if not plan.cluster:
        launch_merge(device, stream, work, shape, params)


def launch_merge(
    device: Launcher, stream: Stream, work: AttendWork, shape: Shape, params: bytes
) -> None:
    """Launch merge_decode for parts in memory."""
    group = work.units.group
    slices = group.head_dim // MERGE_DIMS
    device.launch(
        stream,
        "merge_decode",
        dim_constants(group, work.units.block_size),
        Grid(shape.rows_in_state * slices),
        Grid(MERGE_THREADS),
        0,
        params,
        cluster=slices,
        follows=True,
    )
