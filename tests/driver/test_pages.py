"""Attention over an engine's own pages, where they lie: the same bits as over units."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hsswap.config import LayerGroup
from hsswap.driver.operations import AttendWork, AttentionState, FinalizeWork, PagePool
from hsswap.driver.tensor import Tensor
from hsswap.errors import ArgumentError
from tests.driver.rig import NAN_CODE, Cache, Rig, random_codes
from tests.test_odd_arguments import ODD

GROUPS = [
    LayerGroup(1, 6, 2, 16),
    LayerGroup(1, 9, 3, 24, 40, soft_cap=5.0),
    LayerGroup(1, 8, 2, 128, window=200),
    LayerGroup(1, 4, 4, 64, dtype="f16"),
    LayerGroup(1, 4, 2, 64, kv_dtype="e4m3"),
    LayerGroup(1, 6, 2, 24, 40, dtype="f16", kv_dtype="e4m3", window=300),
]
# Axes of [pages, tokens, heads, dim] in the order they lie in memory.
LAYOUTS = {"NHD": (0, 1, 2, 3), "HND": (0, 2, 1, 3), "heads first": (2, 0, 1, 3)}


def pages_of(rig: Rig, cache: Cache, layout: tuple[int, ...], seed: int = 1) -> tuple[Any, Any]:
    """Pages in random order that hold what the cache's units hold, and slots ``[S, H, B]``."""
    group, size = cache.units.group, cache.units.block_size
    sequences, heads, blocks = cache.slots.shape
    count = sequences * blocks + 2
    order = np.random.default_rng(seed).permutation(count).astype(np.int32)
    slots = np.full(cache.slots.shape, -1, np.int32)
    is_e4m3 = group.kv_dtype == "e4m3"
    dtype: type = np.uint8 if is_e4m3 else np.float16 if group.dtype == "f16" else np.uint16
    kinds: list[tuple[type, str, tuple[int, ...]]] = [
        (dtype, group.kv_dtype, (group.head_dim,)),
        (dtype, group.kv_dtype, (group.value_dim,)),
    ]
    kinds += [(np.float32, "f32", ())] * 2 if is_e4m3 else []
    units = cache.units.memory.array()
    parts: list[Tensor] = []
    start = 0
    for item, name, dims in kinds:
        shape = (count, size, heads, *dims)
        content = np.empty(shape, item)
        content.view(np.uint8)[...] = 0xFF  # NaN of every format
        nbytes = size * content[0, 0, 0].nbytes
        for s in range(sequences):
            for b in range(blocks):
                if (cache.slots[s, :, b] < 0).all():
                    continue
                page = order[s * blocks + b]
                slots[s, :, b] = page
                for h in range(heads):
                    unit = units[cache.slots[s, h, b], start : start + nbytes]
                    content[page, :, h] = unit.view(item).reshape(size, *dims)
        start += nbytes
        order_of_axes = [axis for axis in layout if axis < content.ndim]
        turned = rig.tensor(np.ascontiguousarray(content.transpose(order_of_axes)))
        strides = [0] * content.ndim
        for axis, stride in zip(order_of_axes, turned.strides, strict=True):
            strides[axis] = stride
        parts.append(Tensor(turned.address, shape, tuple(strides), name, False, turned.owner))
    return PagePool(parts[0], parts[1], group, *parts[2:]), slots


def attend(
    rig: Rig, pool: Any, slots: np.ndarray, queries: np.ndarray, lengths: list[int]
) -> tuple[list[bytes], NDArray[np.float32]]:
    """Output and carried state, and logsumexps of blocks."""
    group = pool.group
    shape = queries.shape[:3]
    poison = np.full((*shape, group.value_dim), np.nan, np.float32)
    state = AttentionState(
        rig.tensor(poison[..., 0]), rig.tensor(poison[..., 0]), rig.tensor(poison)
    )
    lse = rig.tensor(np.full((*shape, slots.shape[2]), np.nan, np.float32))
    span = 256 // pool.block_size
    rig.device.attend(
        rig.stream,
        AttendWork(
            rig.tensor(queries),
            np.array(lengths, np.int64),
            pool,
            slots,
            0,
            None,
            span,
            state,
            True,
            lse,
        ),
    )
    out = rig.tensor(np.full((*shape, group.value_dim), NAN_CODE, np.uint16).view(queries.dtype))
    rig.device.finalize(rig.stream, FinalizeWork(state, out))
    rig.stream.synchronize()
    tensors = (out, state.maximum, state.total, state.weighted)
    return [t.array().tobytes() for t in tensors], lse.array().copy()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(("size", "rows"), [(16, 1), (16, 5), (4, 2), (256, 3)])
def test_pages_give_the_same_bits_as_units(
    rig: Rig, group: LayerGroup, layout: str, size: int, rows: int
) -> None:
    rng = np.random.default_rng(2)
    lengths = [700, 33]
    cache = rig.cache(rng, group, size, lengths)
    queries = random_codes(rng, (2, rows, group.q_heads, group.head_dim), 1.0, group.dtype)
    pool, slots = pages_of(rig, cache, LAYOUTS[layout])
    wanted, lse = attend(rig, cache.units, cache.slots, queries, lengths)
    got, of_pages = attend(rig, pool, slots, queries, lengths)
    assert got == wanted
    # Kernels add a block's tokens up in orders of their own.
    np.testing.assert_allclose(of_pages, lse, rtol=1e-5, atol=1e-5)


def test_heads_may_take_pages_of_their_own(rig: Rig) -> None:
    """A table names a page for each head."""
    group = GROUPS[0]
    rng = np.random.default_rng(3)
    cache = rig.cache(rng, group, 16, [100])
    queries = random_codes(rng, (1, 1, group.q_heads, group.head_dim))
    pool, slots = pages_of(rig, cache, LAYOUTS["NHD"])
    swapped = slots.copy()
    swapped[0, 1, [0, 1]] = slots[0, 1, [1, 0]]  # softmax over the same tokens
    first, lse = attend(rig, pool, slots, queries, [100])
    second, of_swapped = attend(rig, pool, swapped, queries, [100])
    half = len(first[0]) // 2
    assert first[0][:half] == second[0][:half]
    assert (lse != of_swapped).any()


def test_pages_that_cannot_be_read_are_refused(rig: Rig) -> None:
    group = GROUPS[0]
    rng = np.random.default_rng(4)
    cache = rig.cache(rng, group, 16, [40])
    queries = random_codes(rng, (1, 1, group.q_heads, group.head_dim))
    pool, slots = pages_of(rig, cache, LAYOUTS["NHD"])
    three = Tensor(
        pool.keys.address, (1, 3, 2, 16), (192, 64, 32, 2), "bf16", False, pool.keys.owner
    )
    apart = Tensor(
        pool.keys.address, pool.keys.shape, (*pool.keys.strides[:3], 4), "bf16", False, None
    )
    bad: list[tuple[PagePool, np.ndarray, str]] = [
        (pool, slots + 1000, "slots holds"),
        (PagePool(pool.keys, pool.keys.rows(0, 1), group), slots, "units.values"),
        (PagePool(three, three, group), slots, "pages have 3 tokens"),
        (PagePool(apart, pool.values, group), slots, "contiguous along the dims"),
    ]
    for wrong, table, message in bad:
        with pytest.raises(ArgumentError, match=message):
            attend(rig, wrong, table, queries, [40])


@pytest.mark.parametrize("group", [GROUPS[0], GROUPS[4]], ids=["bf16", "e4m3"])
@pytest.mark.parametrize("name", [field.name for field in fields(PagePool)])
def test_pages_of_odd_things_are_refused(rig: Rig, group: LayerGroup, name: str) -> None:
    """A typed error, and the output of the call before stays."""
    rng = np.random.default_rng(6)
    cache = rig.cache(rng, group, 16, [40])
    queries = rig.tensor(random_codes(rng, (1, 1, group.q_heads, group.head_dim)))
    pool, slots = pages_of(rig, cache, LAYOUTS["NHD"])
    shape = (1, 1, group.q_heads)
    poison = np.full((*shape, group.value_dim), 7.0, np.float32)
    parts = [rig.tensor(array) for array in (poison[..., 0], poison[..., 0], poison)]
    lengths = np.array([40], np.int64)
    given = 0
    for value in ODD:
        if value is None and getattr(pool, name) is None:
            continue
        work = AttendWork(
            queries, lengths, replace(pool, **{name: value}), slots, 0, None, 16,
            AttentionState(*parts), True, None,
        )  # fmt: skip
        with pytest.raises(ArgumentError, match=f"units.{name}|{name}"):
            rig.device.attend(rig.stream, work)
        given += 1
    assert given >= len(ODD) - 1
    rig.stream.synchronize()
    assert all((part.array() == 7.0).all() for part in parts)


def test_pages_of_e4m3_with_one_scale_for_all(rig: Rig) -> None:
    """An array broadcast to the shape: its strides are 0."""
    group = GROUPS[4]
    rng = np.random.default_rng(5)
    cache = rig.cache(rng, group, 16, [100])
    queries = random_codes(rng, (1, 1, group.q_heads, group.head_dim))
    pool, slots = pages_of(rig, cache, LAYOUTS["NHD"])
    shape = pool.keys.shape[:3]
    whole = [rig.tensor(np.full(shape, scale, np.float32)) for scale in (0.25, 3.0)]
    one = [rig.tensor(np.array([scale], np.float32)) for scale in (0.25, 3.0)]
    broad = [Tensor(t.address, shape, (0, 0, 0), "f32", False, t.owner) for t in one]
    (wanted, lse), (got, of_broad) = (
        attend(rig, replace(pool, key_scales=k, value_scales=v), slots, queries, [100])
        for k, v in (whole, broad)
    )
    assert got == wanted
    assert of_broad.tobytes() == lse.tobytes()
    with pytest.raises(ArgumentError, match=r"units\.value_scales is None; E4M3 comes with"):
        attend(rig, replace(pool, value_scales=None), slots, queries, [100])
