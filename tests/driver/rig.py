"""Memory, pools and a stream of a device under test, filled from NumPy arrays.

Everything is in host memory that the device can reach, so that the same tests read results on
every device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsswap.config import LayerGroup
from hsswap.driver.base import Buffer, Closeable, Device, Stream
from hsswap.driver.operations import (
    AttendWork,
    AttentionState,
    BlockPool,
    FinalizeWork,
    UnitPool,
)
from hsswap.driver.tensor import Tensor, tensor_in
from tests import e4m3_oracle
from tests.driver import oracle

U16 = NDArray[np.uint16]
I32 = NDArray[np.int32]
F32 = NDArray[np.float32]
NAN_CODE = 0x7FC1
DTYPE_NAMES = {
    "uint16": "bf16",
    "float16": "f16",
    "float32": "f32",
    "int32": "i32",
    "int64": "i64",
    "uint8": "u8",
    "uint32": "u32",
}


def random_codes(
    rng: np.random.Generator, shape: tuple[int, ...], scale: float = 1.0, dtype: str = "bf16"
) -> NDArray[Any]:
    """Normal numbers: BF16 codes, by cutting the lower half of float32 bits off, or float16."""
    values = (rng.standard_normal(shape) * scale).astype(np.float32)
    if dtype == "f16":
        return values.astype(np.float16)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def unit_bytes(group: LayerGroup, block_size: int) -> int:
    """K, V, their scales in E4M3, and aux."""
    elements = block_size * (group.head_dim + group.value_dim)
    if group.kv_dtype == "e4m3":
        return elements + 4 * 2 * block_size + group.aux_bytes
    return 2 * elements + group.aux_bytes


@dataclass(frozen=True)
class Cache:
    """K ``[S, tokens, H, dk]`` and V ``[S, tokens, H, dv]`` and the units that hold them; of E4M3
    the float64 numbers that codes and scales stand for.

    ``slots`` ``[S, H, B]``. Unwritten tokens and unused slots of the pool are NaN.
    """

    keys: NDArray[Any]
    values: NDArray[Any]
    units: UnitPool
    slots: I32

    @property
    def blocks(self) -> int:
        """Blocks of each sequence."""
        return int(self.slots.shape[2])


@dataclass(frozen=True)
class Attended:
    """What attend and finalize left, copied."""

    out: U16
    maximum: NDArray[np.float32]
    total: NDArray[np.float32]
    weighted: NDArray[np.float32]
    lse: NDArray[np.float32]
    block_lse: NDArray[np.float32] | None

    def bits(self) -> tuple[bytes, ...]:
        """All of it, for comparing bit for bit."""
        parts = (self.out, self.maximum, self.total, self.weighted, self.lse)
        return tuple(part.tobytes() for part in parts)


class Rig(Closeable):
    """A device, one stream of it, and what tests put on it."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.stream: Stream = device.stream()
        self._buffers: list[Buffer] = []

    def close(self) -> None:
        """Close the stream, then the memory."""
        self.stream.close()
        for buffer in self._buffers:
            buffer.close()

    def tensor(self, array: NDArray[Any]) -> Tensor:
        """The array's content in memory of the device."""
        dtype = DTYPE_NAMES[array.dtype.name]
        buffer = self.device.allocate_host(max(1, array.nbytes))
        self._buffers.append(buffer)
        tensor = tensor_in(buffer, dtype, array.shape)
        tensor.array()[...] = array
        return tensor

    def units(self, group: LayerGroup, block_size: int, slots: int, fill: int = 0) -> UnitPool:
        """A pool of units, all bytes of it ``fill``."""
        nbytes = unit_bytes(group, block_size)
        return UnitPool(self.tensor(np.full((slots, nbytes), fill, np.uint8)), group, block_size)

    def blocks(self, group: LayerGroup, block_size: int, slots: int, fill: int = 0) -> BlockPool:
        """A pool of blocks, all bytes of it ``fill``."""
        nbytes = -(-group.kv_heads * unit_bytes(group, block_size) // 4096) * 4096
        return BlockPool(self.tensor(np.full((slots, nbytes), fill, np.uint8)), group, block_size)

    def cache(
        self,
        rng: np.random.Generator,
        group: LayerGroup,
        block_size: int,
        tokens: list[int],
        *,
        key_scale: float = 1.0,
    ) -> Cache:
        """Sequences of ``tokens`` tokens in units in random slots."""
        most = max(tokens, default=0)
        heads, count = group.kv_heads, len(tokens)
        keys = random_codes(rng, (count, most, heads, group.head_dim), key_scale, group.dtype)
        values = random_codes(rng, (count, most, heads, group.value_dim), 1.0, group.dtype)
        parts: list[NDArray[Any]] = [keys, values]
        if group.kv_dtype == "e4m3":
            halves = [e4m3_oracle.quantised(oracle.decode(part)) for part in parts]
            parts = [*(codes for codes, _ in halves), *(scales[..., None] for _, scales in halves)]
            keys, values = (e4m3_oracle.numbers(*half) for half in halves)
        blocks = -(-most // block_size)
        pool_slots = count * heads * blocks + 3
        order = rng.permutation(pool_slots).astype(np.int32)
        slots = np.full((count, heads, blocks), -1, np.int32)
        content = np.full((pool_slots, unit_bytes(group, block_size) // 2), NAN_CODE, np.uint16)
        content_bytes = content.view(np.uint8)
        taken = iter(order)
        for s, length in enumerate(tokens):
            for h in range(heads):
                for b in range(-(-length // block_size)):
                    slots[s, h, b] = slot = next(taken)
                    rows = slice(b * block_size, min(length, (b + 1) * block_size))
                    start = 0
                    for source in parts:
                        flat = source[s, rows, h].ravel().view(np.uint8)
                        content_bytes[slot, start : start + len(flat)] = flat
                        start += block_size * source.shape[3] * source.itemsize
        memory = self.tensor(content.view(np.uint8))
        return Cache(keys, values, UnitPool(memory, group, block_size), slots)

    def attend(
        self,
        cache: Cache,
        queries: NDArray[Any],
        lengths: list[int],
        *,
        tile_spans: int | None = None,
        span_blocks: int | None = None,
        slots: I32 | None = None,
        positions: I32 | None = None,
        block_lse: bool = False,
        sinks: F32 | None = None,
        fused: bool = False,
    ) -> Attended:
        """Attend in tiles of ``tile_spans`` spans (None: in one), and finalize; ``fused``: with the
        last tile, which leaves the state undefined.
        """
        group = cache.units.group
        slots = cache.slots if slots is None else slots
        shape = queries.shape[:3]
        value_dim = group.value_dim
        poison = np.full((*shape, value_dim), np.nan, np.float32)
        state = AttentionState(
            self.tensor(poison[..., 0]), self.tensor(poison[..., 0]), self.tensor(poison)
        )
        span = span_blocks or 256 // cache.units.block_size
        blocks = slots.shape[2]
        step = max(1, blocks) if tile_spans is None else tile_spans * span
        step = -(-step // span) * span
        asked = self.tensor(queries)
        pieces: list[Tensor] = []
        out = self.tensor(np.full((*shape, value_dim), NAN_CODE, np.uint16).view(queries.dtype))
        total_lse = self.tensor(poison[..., 0])
        given = None if sinks is None else self.tensor(sinks)
        end = FinalizeWork(state, out, total_lse, sinks=given)
        for first in range(0, max(1, blocks), step):
            part = np.ascontiguousarray(slots[:, :, first : first + step])
            lse = None
            if block_lse:
                lse = self.tensor(np.full((*shape, part.shape[2]), np.nan, np.float32))
                pieces.append(lse)
            places = None
            if positions is not None:
                places = np.ascontiguousarray(positions[:, :, first : first + step])
            self.device.attend(
                self.stream,
                AttendWork(
                    asked,
                    np.array(lengths, np.int64),
                    cache.units,
                    part,
                    first if positions is None else 0,
                    places,
                    span,
                    state,
                    first == 0,
                    lse,
                    end=end if fused and first + step >= blocks else None,
                ),
            )
        if not fused:
            self.device.finalize(self.stream, end)
        self.stream.synchronize()
        joined = None
        if block_lse:
            joined = np.concatenate([piece.array() for piece in pieces], axis=-1)
        return Attended(
            out.array().copy(),
            state.maximum.array().copy(),
            state.total.array().copy(),
            state.weighted.array().copy(),
            total_lse.array().copy(),
            joined,
        )
