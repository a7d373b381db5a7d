"""Append, gather, scatter, encode, score and checksum against plain loops."""

from __future__ import annotations

import zlib
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from hsswap.config import LayerGroup
from hsswap.driver.operations import (
    AppendWork,
    BlockPool,
    ChecksumWork,
    EncodeWork,
    GatherWork,
    ProjectionCodes,
    ScatterWork,
    ScoreWork,
    UnitPool,
)
from hsswap.driver.tensor import Tensor, tensor_of
from hsswap.errors import ArgumentError, ClosedError
from tests.driver.oracle import decode
from tests.driver.rig import I32, U16, Rig, random_codes

U8 = NDArray[np.uint8]
FILL = 0xA5


def random_group(rng: np.random.Generator) -> LayerGroup:
    """Small odd dims."""
    kv_heads = int(rng.integers(1, 5))
    return LayerGroup(
        layers=1,
        q_heads=kv_heads * int(rng.integers(1, 4)),
        kv_heads=kv_heads,
        head_dim=8 * int(rng.integers(1, 12)),
        value_dim=8 * int(rng.integers(1, 12)),
        aux_bytes=int(rng.choice([0, 10])),
    )


def unit_bytes(group: LayerGroup, block_size: int) -> int:
    """K, V and aux of a unit."""
    return 2 * block_size * (group.head_dim + group.value_dim) + group.aux_bytes


def put_row(unit: U8, group: LayerGroup, block_size: int, token: int, key: U16, value: U16) -> None:
    """Write one token into the bytes of a unit."""
    start = 2 * token * group.head_dim
    unit[start : start + 2 * group.head_dim] = key.view(np.uint8)
    start = 2 * block_size * group.head_dim + 2 * token * group.value_dim
    unit[start : start + 2 * group.value_dim] = value.view(np.uint8)


def content(pool: UnitPool | BlockPool) -> U8:
    """A copy of a pool's bytes."""
    copied: U8 = pool.memory.array().copy()
    return copied


def engine_rows(rig: Rig, codes: U16, layout: str) -> Tensor:
    """The rows as an engine might hold them: strided views of larger memory."""
    rows, heads, dim = codes.shape
    if layout == "contiguous":
        return rig.tensor(codes)
    if layout == "head-major":
        held = rig.tensor(np.ascontiguousarray(codes.transpose(1, 0, 2)))
        view = held.array().transpose(1, 0, 2)
    else:  # fused: rows of [other, this, other]
        wide = np.zeros((rows, 3 * heads, dim + 8), np.uint16)
        wide[:, heads : 2 * heads, :dim] = codes
        view = rig.tensor(wide).array()[:, heads : 2 * heads, :dim]
    return tensor_of(view, "bf16", codes.shape, "rows")


@pytest.mark.parametrize("layout", ["contiguous", "head-major", "fused"])
@pytest.mark.parametrize("seed", range(10))
def test_append(rig: Rig, seed: int, layout: str) -> None:
    rng = np.random.default_rng(seed)
    group, block_size = random_group(rng), 1 << int(rng.integers(0, 6))
    rows = int(rng.integers(0, 3 * block_size + 2))
    first = int(rng.integers(0, block_size))
    count = -(-(first + rows) // block_size)
    heads = group.kv_heads
    units = rig.units(group, block_size, count * heads + 2, FILL)
    blocks = rig.blocks(group, block_size, count + 2, FILL)
    device_slots = rng.permutation(count * heads + 2)[: count * heads].astype(np.int32)
    device_slots = device_slots.reshape(count, heads)
    device_slots[rng.random((count, heads)) < 0.2] = -1
    host_slots = rng.permutation(count + 2)[:count].astype(np.int32)
    host_slots[rng.random(count) < 0.3] = -1
    keys = random_codes(rng, (rows, heads, group.head_dim))
    values = random_codes(rng, (rows, heads, group.value_dim))
    wanted_units, wanted_blocks = content(units), content(blocks)
    nbytes = unit_bytes(group, block_size)
    for i in range(rows):
        block, token = divmod(first + i, block_size)
        for h in range(heads):
            pair = keys[i, h], values[i, h]
            if device_slots[block, h] >= 0:
                put_row(wanted_units[device_slots[block, h]], group, block_size, token, *pair)
            if host_slots[block] >= 0:
                unit = wanted_blocks[host_slots[block], h * nbytes : (h + 1) * nbytes]
                put_row(unit, group, block_size, token, *pair)
    work = AppendWork(
        engine_rows(rig, keys, layout),
        engine_rows(rig, values, layout),
        first,
        units,
        device_slots,
        blocks,
        host_slots,
    )
    rig.device.append(rig.stream, work)
    rig.stream.synchronize()
    np.testing.assert_array_equal(content(units), wanted_units)
    np.testing.assert_array_equal(content(blocks), wanted_blocks)


def random_move(rig: Rig, seed: int) -> GatherWork:
    """Pools with random bytes and a random list of units; the order of the list is random too."""
    rng = np.random.default_rng(seed)
    group, block_size = random_group(rng), 1 << int(rng.integers(0, 6))
    slots = int(rng.integers(1, 9))
    units = rig.units(group, block_size, slots * group.kv_heads + 3)
    blocks = rig.blocks(group, block_size, slots)
    for pool in (units, blocks):
        pool.memory.array()[...] = rng.integers(0, 256, pool.memory.shape, np.uint8)
    pairs = rng.permutation(slots * group.kv_heads)
    pairs = pairs[: int(rng.integers(0, len(pairs) + 1))].astype(np.int32)
    device_slots = rng.permutation(slots * group.kv_heads + 3)[: len(pairs)].astype(np.int32)
    block, head = np.divmod(pairs, np.int32(group.kv_heads))
    return GatherWork(blocks, units, block, head, device_slots)


@pytest.mark.parametrize("seed", range(12))
def test_gather(rig: Rig, seed: int) -> None:
    work = random_move(rig, seed)
    nbytes = unit_bytes(work.units.group, work.units.block_size)
    source, wanted = content(work.blocks), content(work.units)
    assert work.heads is not None
    for b, h, s in zip(work.host_slots, work.heads, work.device_slots, strict=True):
        wanted[s] = source[b, h * nbytes : (h + 1) * nbytes]
    rig.device.gather(rig.stream, work)
    rig.stream.synchronize()
    np.testing.assert_array_equal(content(work.units), wanted)
    np.testing.assert_array_equal(content(work.blocks), source)


@pytest.mark.parametrize("seed", range(12))
def test_scatter(rig: Rig, seed: int) -> None:
    move = random_move(rig, seed)
    assert move.heads is not None
    work = ScatterWork(move.blocks, move.units, move.host_slots, move.heads, move.device_slots)
    nbytes = unit_bytes(work.units.group, work.units.block_size)
    source, wanted = content(work.units), content(work.blocks)
    for b, h, s in zip(work.host_slots, work.heads, work.device_slots, strict=True):
        wanted[b, h * nbytes : (h + 1) * nbytes] = source[s]
    rig.device.scatter(rig.stream, work)
    rig.stream.synchronize()
    np.testing.assert_array_equal(content(work.blocks), wanted)
    np.testing.assert_array_equal(content(work.units), source)


def random_codes_of_blocks(rig: Rig, seed: int) -> EncodeWork:
    """Blocks with random keys, and a random matrix."""
    rng = np.random.default_rng(seed)
    group, block_size = random_group(rng), 1 << int(rng.integers(0, 6))
    rank, slots, ids = int(rng.integers(1, 40)), int(rng.integers(1, 9)), 11
    blocks = rig.blocks(group, block_size, slots)
    raw = blocks.memory.array().view(np.uint16)
    raw[...] = random_codes(rng, raw.shape)
    into = ProjectionCodes(
        rig.tensor(np.zeros((ids, group.kv_heads, block_size, rank), np.uint16)),
        rig.tensor(random_codes(rng, (group.head_dim, rank), group.head_dim**-0.5)),
        group,
    )
    return EncodeWork(
        into,
        blocks,
        rng.permutation(slots).astype(np.int32),
        rng.permutation(ids)[:slots].astype(np.int32),
    )


def keys_of(pool: BlockPool, slot: int, head: int) -> NDArray[np.float64]:
    """K ``[T, dk]`` of a unit in a block."""
    start = head * unit_bytes(pool.group, pool.block_size)
    raw = pool.memory.array()[slot, start : start + 2 * pool.block_size * pool.group.head_dim]
    return decode(raw.copy().view(np.uint16)).reshape(pool.block_size, -1)


@pytest.mark.parametrize("seed", range(10))
def test_encode(rig: Rig, seed: int) -> None:
    work = random_codes_of_blocks(rig, seed)
    rig.device.encode(rig.stream, work)
    rig.stream.synchronize()
    matrix, codes = decode(work.into.matrix.array()), work.into.codes.array()
    for slot, index in zip(work.host_slots, work.code_index, strict=True):
        for h in range(work.into.group.kv_heads):
            wanted = keys_of(work.blocks, int(slot), h) @ matrix
            # Half a unit in the last place of BF16, and float32 sums that cancel.
            np.testing.assert_allclose(decode(codes[index, h]), wanted, rtol=2.0**-8, atol=1e-5)
    unused = np.setdiff1d(np.arange(len(codes)), work.code_index)
    assert not codes[unused].any()


def test_encode_does_not_depend_on_the_number_of_blocks(rig: Rig) -> None:
    work = random_codes_of_blocks(rig, 3)
    rig.device.encode(rig.stream, work)
    rig.stream.synchronize()
    together = work.into.codes.array().copy()
    work.into.codes.array()[...] = 0
    for i in range(len(work.host_slots)):
        one = replace(
            work, host_slots=work.host_slots[i : i + 1], code_index=work.code_index[i : i + 1]
        )
        rig.device.encode(rig.stream, one)
    rig.stream.synchronize()
    np.testing.assert_array_equal(work.into.codes.array(), together)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("count", [0, 1, 5, 300])
def test_score(rig: Rig, seed: int, count: int) -> None:
    encoded = random_codes_of_blocks(rig, seed)
    rng = np.random.default_rng(seed + 1000)
    group = encoded.into.group
    codes = encoded.into.codes.array()
    codes[...] = random_codes(rng, codes.shape)
    queries = random_codes(rng, (group.q_heads, group.head_dim))
    index = rng.integers(0, len(codes), count).astype(np.int32)
    scores = rig.tensor(np.full((group.kv_heads, count), np.nan, np.float32))
    rig.device.score(rig.stream, ScoreWork(encoded.into, rig.tensor(queries), index, scores))
    rig.stream.synchronize()
    projected = decode(queries) @ decode(encoded.into.matrix.array()) * group.logit_scale
    for h in range(group.kv_heads):
        mine = projected[h * group.group_size : (h + 1) * group.group_size]
        wanted = [float((decode(codes[i, h]) @ mine.T).max()) for i in index]
        np.testing.assert_allclose(scores.array()[h], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("rank", "size", "group_size"), [(32, 16, 4), (64, 32, 8), (96, 16, 1), (128, 16, 3)]
)
def test_score_of_whole_tiles(rig: Rig, rank: int, size: int, group_size: int) -> None:
    """Ranks and blocks for matrix steps, with NaN and blocks that are none."""
    rng = np.random.default_rng(rank)
    group = LayerGroup(1, 2 * group_size, 2, 64)
    codes = random_codes(rng, (19, 2, size, rank))
    codes[3, 0, 5, 7] = 0x7FC1
    matrix = random_codes(rng, (64, rank), 0.125)
    into = ProjectionCodes(rig.tensor(codes), rig.tensor(matrix), group)
    queries = random_codes(rng, (2 * group_size, 64))
    index = rng.integers(-1, 19, 333).astype(np.int32)
    scores = rig.tensor(np.full((2, 333), np.nan, np.float32))
    rig.device.score(rig.stream, ScoreWork(into, rig.tensor(queries), rig.tensor(index), scores))
    rig.stream.synchronize()
    projected = decode(queries) @ decode(matrix) * group.logit_scale
    for h in range(2):
        mine = projected[h * group_size : (h + 1) * group_size]
        with np.errstate(invalid="ignore"):
            wanted = [
                float((decode(codes[i, h]) @ mine.T).max()) if i >= 0 else -np.inf for i in index
            ]
        np.testing.assert_allclose(scores.array()[h], wanted, rtol=1e-4, atol=1e-4)


def test_score_does_not_depend_on_the_number_of_blocks(rig: Rig) -> None:
    encoded = random_codes_of_blocks(rig, 5)
    rng = np.random.default_rng(7)
    group = encoded.into.group
    encoded.into.codes.array()[...] = random_codes(rng, encoded.into.codes.shape)
    queries = rig.tensor(random_codes(rng, (group.q_heads, group.head_dim)))
    index = rng.integers(0, 11, 700).astype(np.int32)
    whole = rig.tensor(np.zeros((group.kv_heads, 700), np.float32))
    rig.device.score(rig.stream, ScoreWork(encoded.into, queries, index, whole))
    fewer = rig.tensor(np.zeros((group.kv_heads, 601), np.float32))
    rig.device.score(rig.stream, ScoreWork(encoded.into, queries, index[:601], fewer))
    rig.stream.synchronize()
    np.testing.assert_array_equal(fewer.array(), whole.array()[:, :601])


@pytest.mark.parametrize("seed", range(4))
def test_checksum(rig: Rig, seed: int) -> None:
    rng = np.random.default_rng(seed)
    blocks = rig.blocks(random_group(rng), 16, 7)
    blocks.memory.array()[...] = rng.integers(0, 256, blocks.memory.shape, np.uint8)
    slots = rng.integers(0, 7, seed * 5).astype(np.int32)
    seeds = rng.integers(0, 1 << 32, len(slots), np.uint32)
    out = rig.tensor(np.zeros(len(slots), np.uint32))
    rig.device.checksum(rig.stream, ChecksumWork(blocks, slots, seeds, out))
    rig.stream.synchronize()
    memory = blocks.memory.array()
    wanted = [zlib.crc32(memory[s].tobytes(), int(x)) for s, x in zip(slots, seeds, strict=True)]
    assert out.array().tolist() == wanted


def test_index_arrays_may_be_reused_at_once(rig: Rig) -> None:
    """They are copied when the work is enqueued."""
    work = random_move(rig, 4)
    nbytes = unit_bytes(work.units.group, work.units.block_size)
    source, wanted = content(work.blocks), content(work.units)
    assert work.heads is not None
    for b, h, s in zip(work.host_slots, work.heads, work.device_slots, strict=True):
        wanted[s] = source[b, h * nbytes : (h + 1) * nbytes]
    rig.device.gather(rig.stream, work)
    for indices in (work.host_slots, work.heads, work.device_slots):
        indices[...] = 0
    rig.stream.synchronize()
    np.testing.assert_array_equal(content(work.units), wanted)


def test_bad_arguments_are_refused(rig: Rig) -> None:
    work = random_move(rig, 4)

    def wrong(values: list[int]) -> I32:
        return np.array(values, np.int32)

    one = replace(work, host_slots=wrong([0]), heads=wrong([0]), device_slots=wrong([0]))
    for changes, message in (
        ({"host_slots": wrong([99])}, "host_slots holds 99"),
        ({"device_slots": wrong([-1])}, "device_slots holds -1"),
        ({"heads": wrong([work.units.group.kv_heads])}, "heads holds"),
        ({"heads": wrong([0, 0])}, "heads has shape"),
        ({"heads": np.zeros(1, np.int64)}, "int32"),
        ({"units": replace(work.units, block_size=work.units.block_size * 2)}, "block size"),
    ):
        with pytest.raises(ArgumentError, match=message):
            rig.device.gather(rig.stream, replace(one, **changes))


def test_read_only_targets_and_closed_buffers_are_refused(rig: Rig) -> None:
    blocks = rig.blocks(LayerGroup(1, 1, 1, 8), 16, 2)
    slots, seeds = np.zeros(1, np.int32), np.zeros(1, np.uint32)
    out = np.zeros(1, np.uint32)
    out.flags.writeable = False
    with pytest.raises(ArgumentError, match="read-only"):
        rig.device.checksum(
            rig.stream, ChecksumWork(blocks, slots, seeds, tensor_of(out, "u32", (1,), "out"))
        )
    good = rig.tensor(np.zeros(1, np.uint32))
    assert hasattr(blocks.memory.owner, "close")
    blocks.memory.owner.close()
    with pytest.raises(ClosedError, match="memory is closed"):
        rig.device.checksum(rig.stream, ChecksumWork(blocks, slots, seeds, good))
