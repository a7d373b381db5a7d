"""Tiles that stream through the ring of device slots: where their blocks are.

One table for many tiles, in device memory before the first of them is copied. A table for each tile
would wait in the engine that copies to the device, behind copies of the tiles after it, and these
for the tile's attention, which has to free the ring: copies and attention would take turns.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hsswap.driver.base import Buffer, Device, Stream
from hsswap.driver.round_operations import CopyWork
from hsswap.driver.tensor import Tensor, tensor_in, tensor_of
from hsswap.errors import OutOfSlots
from hsswap.pools import GroupPool, state_bytes
from hsswap.tiers import I32, Tile

ALIGN = 256
"""Bytes, of the tables of a pass behind its carried state."""


def tile_tokens_for(span_tokens: int, tile_tokens: int) -> int:
    """Tokens of a tile that is whole spans. Raises OutOfSlots when the ring is too small."""
    if span_tokens > tile_tokens:
        raise OutOfSlots(
            f"a span has {span_tokens} tokens at this length and a tile {tile_tokens}; set "
            f"tile_tokens to {span_tokens} or more"
        )
    return tile_tokens // span_tokens * span_tokens


def tables_at(pool: GroupPool, rows: int) -> int:
    """Where in a pass's scratch memory the tables are."""
    return -(-state_bytes(pool.group, rows) // ALIGN) * ALIGN


def tapered(tiles: list[Tile], span_blocks: int) -> list[Tile]:
    """The same blocks, of three tiles and more with about a span alone at each end: what the first
    copy and the last attention could be beside is not there.
    """
    if len(tiles) < 3:
        return tiles
    last = tiles[-1]
    spans = (last.stop - last.start - (span_blocks + 1) // 2) // span_blocks
    edges = {tiles[0].start + span_blocks, last.start + max(0, spans) * span_blocks}
    edges |= {edge for tile in tiles for edge in (tile.start, tile.stop)}
    return [Tile(*both) for both in pairwise(sorted(edges))]


def parts_of(tiles: list[Tile], missing: NDArray[np.intp]) -> list[slice]:
    """Which of the missing blocks are of each tile. ``missing``: behind the first tile's start."""
    edges = np.searchsorted(missing, [tile.stop - tiles[0].start for tile in tiles]).tolist()
    return [slice(*both) for both in zip([0, *edges], edges, strict=False)]


def place(pool: GroupPool, placed: I32, missing: NDArray[np.intp], parts: list[slice]) -> None:
    """Device slots for missing blocks: of the regions whose turn it is, one for each tile that
    misses any.
    """
    regions = pool.coming_regions()
    for part in parts:
        if part.start < part.stop:
            placed[missing[part]] = next(regions).slots[: part.stop - part.start]


def upload(
    device: Device, stream: Stream, pool: GroupPool, placed: I32, memory: Buffer, at: int
) -> Tensor:
    """The units ``[1, H, n]`` of block slots ``placed`` ``[n]``, from byte ``at`` of device memory
    on, for what is enqueued on the stream next.
    """
    table = pool.slots.table(placed)
    uploaded = tensor_in(memory, "i32", table.shape, offset_bytes=at)
    source = tensor_of(table, "i32", table.shape, "table")
    device.copy_words(stream, CopyWork(source, uploaded))
    return uploaded


def columns(table: Tensor, start: int, stop: int) -> Tensor:
    """Entries ``start`` to ``stop`` (exclusive) of each list of a table."""
    shape = (*table.shape[:2], stop - start)
    address = table.address + 4 * start
    return Tensor(address, shape, table.strides, "i32", table.on_device, table)
