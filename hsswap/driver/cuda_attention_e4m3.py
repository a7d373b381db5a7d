"""How decode attention over units of E4M3 is launched on a CUDA device: attend_decode_e4m3."""

from __future__ import annotations

from hsswap.config import LayerGroup
from hsswap.driver.base import Stream
from hsswap.driver.cuda_attention_decode import MOST_GRID, MOST_WARPS, launch_merge
from hsswap.driver.cuda_attention_params import Shape, attend_params, dim_constants, transform_of
from hsswap.driver.cuda_seam import Chip, Grid, Launcher
from hsswap.driver.operations import AttendWork, FinalizeWork, PagePool
from hsswap.ptx import Constants

ALIGNMENT = 16
"""Bytes of one load of a unit."""


def e4m3_takes(chip: Chip, group: LayerGroup, block_size: int) -> bool:
    """Whether attend_decode_e4m3 takes calls of such units."""
    return (
        chip.compute_capability >= (9, 0)
        and group.is_e4m3
        and group.head_dim in (64, 128)
        and group.value_dim == group.head_dim
        and group.group_size <= 8
        and (block_size, group.aux_bytes % ALIGNMENT) == (16, 0)
        and not transform_of(group)
    )


def e4m3_constants(group: LayerGroup, block_size: int, leaves_a_span: int) -> Constants:
    """As -D options: a warp for each leaf of a span."""
    return dim_constants(group, block_size) | {"WARPS": leaves_a_span}


def uses_e4m3(device: Launcher, work: AttendWork, shape: Shape) -> bool:
    """Whether attend_decode_e4m3 takes a call."""
    if (
        isinstance(work.units, PagePool)
        or shape.rows != 1
        or not shape.entries
        or shape.leaves_a_span > MOST_WARPS
        or max(shape.sequences, shape.spans) > MOST_GRID
        or not e4m3_takes(device, work.units.group, work.units.block_size)
    ):
        return False
    pools = [work.units.memory.address]
    if work.blocks is not None:
        pools.append(work.blocks.memory.address)
    queries = work.queries
    return (
        not any(address % ALIGNMENT for address in pools)
        and queries.strides[3] == 2
        and not any(number % 8 for number in (queries.address, *queries.strides[:3]))
    )


def launch_e4m3(
    device: Launcher, stream: Stream, work: AttendWork, shape: Shape, end: FinalizeWork | None
) -> None:
    """Launch it, and merge_decode for its parts."""
    group, warps = work.units.group, shape.leaves_a_span
    params = attend_params(device, stream, work, shape, shape.spans, end)
    constants = e4m3_constants(group, work.units.block_size, warps)
    grid = Grid(group.kv_heads, shape.spans, shape.sequences)
    shared = warps * (group.group_size * group.head_dim * 4 + 64)
    device.launch(
        stream,
        "attend_decode_e4m3",
        constants,
        grid,
        Grid(32 * warps),
        shared,
        params,
        follows=True,
    )
    launch_merge(device, stream, work, shape, params)
