"""E4M3 caches on every device: rows are rounded or kept, attended and scored as what they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hsswap.config import LayerGroup
from hsswap.driver.operations import (
    AppendAtWork,
    AppendWork,
    BlockPool,
    EncodeWork,
    ProjectionCodes,
    ScoreWork,
    UnitPool,
    host_unit,
)
from hsswap.driver.tensor import Tensor, tensor_of
from hsswap.errors import ArgumentError
from tests import e4m3_oracle
from tests.driver import oracle
from tests.driver.rig import Cache, Rig, random_codes, unit_bytes

FILL = 0xA5
GROUPS = [
    LayerGroup(1, 6, 2, 16, kv_dtype="e4m3"),
    LayerGroup(1, 4, 4, 24, 40, kv_dtype="e4m3", soft_cap=5.0),
    LayerGroup(1, 9, 3, 64, kv_dtype="e4m3", window=300),
    LayerGroup(1, 8, 2, 128, kv_dtype="e4m3"),
    LayerGroup(1, 17, 1, 72, kv_dtype="e4m3", aux_bytes=8, scale=-0.1),
    LayerGroup(1, 8, 2, 128, dtype="f16", kv_dtype="e4m3"),
    LayerGroup(1, 2, 1, 192, 256, dtype="f16", kv_dtype="e4m3"),
]
U8 = NDArray[np.uint8]


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("rows", [1, 4, 70])
def test_attention_of_what_the_codes_stand_for(rig: Rig, group: LayerGroup, rows: int) -> None:
    rng = np.random.default_rng(8)
    lengths = [1300, 77]
    cache = rig.cache(rng, group, 16, lengths)
    queries = random_codes(rng, (2, rows, group.q_heads, group.head_dim), 1.0, group.dtype)
    got = rig.attend(cache, queries, lengths, span_blocks=64, block_lse=True)
    assert got.out.dtype == queries.dtype
    heads = oracle.Heads(group.group_size, group.logit_scale, group.window, group.soft_cap)
    for s, length in enumerate(lengths):
        wanted = oracle.attend(queries[s], cache.keys[s], cache.values[s], length, heads)
        error = oracle.relative_error(oracle.decode(got.out[s]), wanted.exact)
        assert error <= wanted.tolerance()
        np.testing.assert_allclose(got.lse[s], wanted.lse, rtol=1e-4, atol=1e-4)
    tiled = rig.attend(cache, queries, lengths, span_blocks=64, tile_spans=1)
    assert tiled.bits() == got.bits()
    alone = rig.attend(cache, queries[:, -1:], lengths, span_blocks=64)
    assert alone.out[:, 0].tobytes() == got.out[:, -1].tobytes()


def filled(rig: Rig, group: LayerGroup, size: int, parts: list[NDArray[Any]]) -> UnitPool:
    """One unit for each head, of parts ``[H, T, ...]``."""
    pool = rig.units(group, size, group.kv_heads)
    for head, unit in enumerate(pool.memory.array()):
        raw = b"".join(part[head].tobytes() for part in parts)
        unit[: len(raw)] = np.frombuffer(raw, np.uint8)
    return pool


def test_every_code_as_a_value_and_as_a_key(rig: Rig) -> None:
    """A token that is attended alone gives its V; NaN codes give NaN, in their dims alone."""
    group = LayerGroup(1, 1, 1, 256, dtype="f16", kv_dtype="e4m3")
    codes = np.arange(256, dtype=np.uint8)
    scales = np.array([[2.0]], np.float32)
    parts: list[NDArray[Any]] = [codes[None, None] & 0x3F, codes[None, None], scales, scales]
    pool = filled(rig, group, 1, parts)
    cache = Cache(codes, codes, pool, np.zeros((1, 1, 1), np.int32))
    got = rig.attend(cache, np.ones((1, 1, 1, 256), np.float16), [1])
    np.testing.assert_array_equal(got.out[0, 0, 0], 2 * e4m3_oracle.NUMBERS)
    # Every dim's key alone: the logit is the key.
    for code in range(256):
        query = np.zeros((1, 1, 1, 256), np.float16)
        query[..., code] = 16.0  # times the logit scale, 1/16
        parts[0] = codes[None, None]
        if code & 0x7F == 0x7F:
            continue  # NaN
        parts[0] = np.where(codes & 0x7F == 0x7F, 0, codes)[None, None].astype(np.uint8)
        pool = filled(rig, group, 1, parts) if code == 0 else pool
        got = rig.attend(replace(cache, units=pool), query, [1])
        assert got.lse[0, 0, 0] == pytest.approx(2 * e4m3_oracle.NUMBERS[code], rel=1e-6)


@pytest.mark.parametrize("key_power", [-40, 0, 20])
@pytest.mark.parametrize("value_power", [-120, -20, 0, 100])
def test_scales_of_any_size(rig: Rig, key_power: int, value_power: int) -> None:
    """Rows whose scales are far apart, and queries that make up for it."""
    group = LayerGroup(1, 8, 2, 64, kv_dtype="e4m3")
    rng = np.random.default_rng(3)
    size, blocks = 16, 20
    tokens, heads = size * blocks, group.kv_heads
    apart = 2.0 ** rng.integers(-6, 7, (tokens, heads))
    rows = rng.standard_normal((2, tokens, heads, 64))
    rows[0] *= 2.0**key_power
    rows[1] *= 2.0**value_power * apart[..., None]
    halves = [e4m3_oracle.quantised(part) for part in rows]
    numbers = [e4m3_oracle.numbers(*half) for half in halves]
    parts: list[NDArray[Any]] = [half[part] for part in range(2) for half in halves]
    shaped = [
        part.reshape(blocks, size, heads, *part.shape[2:]).swapaxes(1, 2).reshape(
            blocks * heads, size, *part.shape[2:]
        )
        for part in parts
    ]  # fmt: skip
    pool = rig.units(group, size, blocks * heads)
    for slot, unit in enumerate(pool.memory.array()):
        raw = b"".join(part[slot].tobytes() for part in shaped)
        unit[: len(raw)] = np.frombuffer(raw, np.uint8)
    slots = np.arange(blocks * heads, dtype=np.int32).reshape(blocks, heads).T[None].copy()
    cache = Cache(numbers[0], numbers[1], pool, slots)
    queries = random_codes(rng, (1, 3, 8, 64), 2.0**-key_power)
    length = tokens - 5
    got = rig.attend(cache, queries, [length])
    wanted = oracle.attend(
        queries[0], numbers[0], numbers[1], length, oracle.Heads(4, group.logit_scale)
    )
    error = oracle.relative_error(oracle.decode(got.out[0]), wanted.exact)
    assert error <= wanted.tolerance()


def engine_rows(rig: Rig, codes: NDArray[Any], dtype: str, layout: str) -> Tensor:
    """Rows ``[rows, H, ...]`` as an engine might hold them."""
    if layout == "contiguous":
        held = rig.tensor(codes)
        return tensor_of(held.array(), dtype, codes.shape, "rows")
    held = rig.tensor(np.ascontiguousarray(codes.swapaxes(0, 1)))
    return tensor_of(held.array().swapaxes(0, 1), dtype, codes.shape, "rows")


def put(unit: U8, group: LayerGroup, size: int, token: int, row: list[NDArray[Any]]) -> None:
    """Write codes of K and V, and their scales, of one token into the bytes of a unit."""
    values = size * group.head_dim
    scales = values + size * group.value_dim
    starts = (
        token * group.head_dim,
        values + token * group.value_dim,
        scales + 4 * token,
        scales + 4 * size + 4 * token,
    )
    for start, part in zip(starts, row, strict=True):
        raw = np.frombuffer(part.tobytes(), np.uint8)
        unit[start : start + len(raw)] = raw


def odd_rows(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """Rows of any size, with zeros and what is not finite among them."""
    rows = random_codes(rng, shape, 1.0, "f16").astype(np.float32)
    rows *= 2.0 ** rng.integers(-12, 8, (*shape[:-1], 1))
    rows[rng.random(shape) < 0.1] = 0
    rows[rng.random(shape[:-1]) < 0.1] = 0
    rows[rng.random(shape) < 0.02] = np.nan
    rows[rng.random(shape) < 0.02] = np.inf
    rows[rng.random(shape) < 0.02] = -np.inf
    if dtype == "f16":
        return rows.astype(np.float16)
    return (rows.view(np.uint32) >> 16).astype(np.uint16) | (np.isnan(rows) * np.uint16(0x7FC0))


def random_group(rng: np.random.Generator, dtype: str) -> LayerGroup:
    """Small odd dims."""
    kv_heads = int(rng.integers(1, 5))
    dims = (8 * int(rng.integers(1, 33)), 8 * int(rng.integers(1, 33)))
    aux = int(rng.choice([0, 8]))
    return LayerGroup(1, kv_heads, kv_heads, *dims, dtype=dtype, kv_dtype="e4m3", aux_bytes=aux)


@pytest.mark.parametrize("layout", ["contiguous", "head-major"])
@pytest.mark.parametrize("given", ["bf16", "f16", "e4m3"])
@pytest.mark.parametrize("seed", range(6))
def test_append(rig: Rig, seed: int, given: str, layout: str) -> None:
    rng = np.random.default_rng(seed)
    dtype = "bf16" if given == "e4m3" else given
    group, size = random_group(rng, dtype), 1 << int(rng.integers(0, 6))
    rows, first = int(rng.integers(0, 3 * size + 2)), int(rng.integers(0, size))
    count, heads = -(-(first + rows) // size), group.kv_heads
    units = rig.units(group, size, count * heads + 2, FILL)
    blocks = rig.blocks(group, size, count + 2, FILL)
    slots = rng.permutation(count * heads + 2)[: count * heads].astype(np.int32)
    slots = slots.reshape(count, heads)
    slots[rng.random((count, heads)) < 0.2] = -1
    host_slots = rng.permutation(count + 2)[:count].astype(np.int32)
    host_slots[rng.random(count) < 0.3] = -1
    keys = odd_rows(rng, (rows, heads, group.head_dim), dtype)
    values = odd_rows(rng, (rows, heads, group.value_dim), dtype)
    halves = [e4m3_oracle.quantised(oracle.decode(part)) for part in (keys, values)]
    scales: list[Tensor | None] = [None, None]
    if given == "e4m3":
        halves = [
            (rng.integers(0, 256, part.shape, np.uint8), rng.random(part.shape[:2], np.float32))
            for part in (keys, values)
        ]
        keys, values = halves[0][0], halves[1][0]
        scales = [engine_rows(rig, half[1], "f32", layout) for half in halves]
    wanted_units, wanted_blocks = units.memory.array().copy(), blocks.memory.array().copy()
    nbytes = unit_bytes(group, size)
    for i, h in np.ndindex(rows, heads):
        block, token = divmod(first + i, size)
        row = [half[part][i, h] for part in range(2) for half in halves]
        if slots[block, h] >= 0:
            put(wanted_units[slots[block, h]], group, size, token, row)
        if host_slots[block] >= 0:
            unit = wanted_blocks[host_slots[block], h * nbytes : (h + 1) * nbytes]
            put(unit, group, size, token, row)
    work = AppendWork(
        engine_rows(rig, keys, given, layout),
        engine_rows(rig, values, given, layout),
        first,
        units,
        slots,
        blocks,
        host_slots,
        *scales,
    )
    rig.device.append(rig.stream, work)
    rig.stream.synchronize()
    # NaN has no sign that counts.
    for got, wanted in ((units, wanted_units), (blocks, wanted_blocks)):
        assert_equal_codes(got, wanted, group, size)


def assert_equal_codes(
    pool: UnitPool | BlockPool, wanted: U8, group: LayerGroup, size: int
) -> None:
    got = pool.memory.array().copy()
    if isinstance(pool, BlockPool):
        used = group.kv_heads * unit_bytes(group, size)
        np.testing.assert_array_equal(got[:, used:], wanted[:, used:])
        shape = (-1, unit_bytes(group, size))
        got, wanted = got[:, :used].reshape(shape), wanted[:, :used].reshape(shape)
    codes = size * (group.head_dim + group.value_dim)
    for part in (got, wanted):
        part[:, :codes][part[:, :codes] == 0xFF] = 0x7F
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("given", ["bf16", "e4m3"])
def test_append_at_positions_of_the_device(rig: Rig, given: str) -> None:
    rng = np.random.default_rng(5)
    group, size, sequences, rows, count = LayerGroup(1, 4, 2, 24, 40, kv_dtype="e4m3"), 4, 3, 6, 4
    heads = group.kv_heads
    units = rig.units(group, size, sequences * count * heads, FILL)
    blocks = rig.blocks(group, size, sequences * count, FILL)
    slots = rng.permutation(sequences * count * heads).astype(np.int32)
    slots = slots.reshape(sequences, heads, count)
    host_slots = rng.permutation(sequences * count).astype(np.int32).reshape(sequences, count)
    in_place = host_unit(host_slots[:, None], np.arange(heads, dtype=np.int32)[:, None], heads)
    slots = np.where(rng.random(slots.shape) < 0.3, in_place, slots)
    host_slots[:, ::2] = -1
    positions = np.array([0, 3, 12], np.int64)
    keys = random_codes(rng, (sequences, rows, heads, 24))
    values = random_codes(rng, (sequences, rows, heads, 40))
    halves = [e4m3_oracle.quantised(oracle.decode(part)) for part in (keys, values)]
    scales: list[Tensor | None] = [None, None]
    tensors = [rig.tensor(keys), rig.tensor(values)]
    if given == "e4m3":
        tensors = [engine_rows(rig, half[0], "e4m3", "contiguous") for half in halves]
        scales = [rig.tensor(half[1]) for half in halves]
    wanted_units, wanted_blocks = units.memory.array().copy(), blocks.memory.array().copy()
    nbytes = unit_bytes(group, size)
    for s, i, h in np.ndindex(sequences, rows, heads):
        block, token = divmod(int(positions[s]) + i, size)
        if block >= count:
            continue
        row = [half[part][s, i, h] for part in range(2) for half in halves]
        places = [(int(host_slots[s, block]), h)] if host_slots[s, block] >= 0 else []
        if slots[s, h, block] >= 0:
            put(wanted_units[slots[s, h, block]], group, size, token, row)
        else:
            places.append(divmod(-2 - int(slots[s, h, block]), heads))
        for to, head in places:
            put(wanted_blocks[to, head * nbytes : (head + 1) * nbytes], group, size, token, row)
    work = AppendAtWork(
        keys=tensors[0],
        values=tensors[1],
        positions=rig.tensor(positions),
        units=units,
        slots=rig.tensor(slots),
        blocks=blocks,
        host_slots=rig.tensor(host_slots),
        key_scales=scales[0],
        value_scales=scales[1],
    )
    rig.device.append_at(rig.stream, work)
    rig.stream.synchronize()
    np.testing.assert_array_equal(units.memory.array(), wanted_units)
    np.testing.assert_array_equal(blocks.memory.array(), wanted_blocks)


def test_the_projection_takes_what_the_codes_stand_for(rig: Rig) -> None:
    group = LayerGroup(1, 4, 2, 32, kv_dtype="e4m3")
    rng = np.random.default_rng(10)
    halves = e4m3_oracle.quantised(rng.standard_normal((3, 2, 16, 32)))
    pool = rig.blocks(group, 16, 3, 0xFF)
    nbytes = unit_bytes(group, 16)
    for block, head in np.ndindex(3, 2):
        unit = pool.memory.array()[block, head * nbytes : (head + 1) * nbytes]
        for token in range(16):
            code, scale = halves[0][block, head, token], halves[1][block, head, token]
            put(unit, group, 16, token, [code, code, scale, scale])
    matrix = random_codes(rng, (32, 8), 0.2)
    codes = rig.tensor(np.zeros((3, 2, 16, 8), np.uint16))
    into = ProjectionCodes(codes, rig.tensor(matrix), group)
    index = np.arange(3, dtype=np.int32)
    rig.device.encode(rig.stream, EncodeWork(into, pool, index, index))
    queries = random_codes(rng, (4, 32))
    scores = rig.tensor(np.full((2, 3), np.nan, np.float32))
    rig.device.score(rig.stream, ScoreWork(into, rig.tensor(queries), index, scores))
    rig.stream.synchronize()
    wanted = e4m3_oracle.numbers(*halves) @ oracle.decode(matrix)
    got = oracle.decode(codes.array())
    assert oracle.relative_error(got, wanted) < 2.0**-8
    projected = oracle.decode(queries) @ oracle.decode(matrix) * group.logit_scale
    logits = np.einsum("hgr,bhtr->hgbt", projected.reshape(2, 2, 8), got)
    np.testing.assert_allclose(scores.array(), logits.max((1, 3)), rtol=1e-4, atol=1e-4)


def test_scales_come_with_codes_and_not_without(rig: Rig) -> None:
    group = GROUPS[0]
    rows = rig.tensor(np.zeros((2, 2, 16), np.uint16))
    codes = tensor_of(rig.tensor(np.zeros((2, 2, 16), np.uint8)).array(), "e4m3", (2, 2, 16), "c")
    scales = rig.tensor(np.ones((2, 2), np.float32))
    units, blocks = rig.units(group, 4, 2), rig.blocks(group, 4, 1)
    slots, none = np.array([[0, 1]], np.int32), np.full(1, -1, np.int32)
    good = AppendWork(codes, codes, 0, units, slots, blocks, none, scales, scales)
    plain = replace(group, kv_dtype="bf16")
    refused: list[tuple[dict[str, object], str]] = [
        ({"key_scales": None}, "key_scales is None; E4M3 comes with its scales"),
        ({"keys": rows, "values": rows}, "key_scales is given; scales go with E4M3"),
        ({"values": rows}, "values has dtype bf16; e4m3 is needed"),
        ({"value_scales": rig.tensor(np.ones((2, 1), np.float32))}, "value_scales has shape"),
        (
            {"units": rig.units(plain, 4, 2), "blocks": rig.blocks(plain, 4, 1)},
            "keys has dtype e4m3; bf16 is needed",
        ),
    ]
    for change, message in refused:
        with pytest.raises(ArgumentError, match=message):
            rig.device.append(rig.stream, replace(good, **change))  # type: ignore[arg-type]
    rig.device.append(rig.stream, good)
    rig.stream.synchronize()
