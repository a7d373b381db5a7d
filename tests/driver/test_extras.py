"""What attention gives beside its output, and where it can read from: masses and host units."""

from __future__ import annotations

import numpy as np
import pytest

from hsswap.config import LayerGroup
from hsswap.driver.operations import AttendWork, AttentionState, FinalizeWork, GatherWork, host_unit
from hsswap.errors import ArgumentError
from tests.driver import oracle
from tests.driver.rig import NAN_CODE, Rig, random_codes

GROUPS = [LayerGroup(1, 6, 2, 16), LayerGroup(1, 4, 4, 24, 40), LayerGroup(1, 5, 1, 64)]


@pytest.mark.parametrize("group", GROUPS)
def test_block_mass_is_the_share_of_the_attention(rig: Rig, group: LayerGroup) -> None:
    rng = np.random.default_rng(3)
    size, length, rows = 16, 300, 2
    cache = rig.cache(rng, group, size, [length])
    queries = random_codes(rng, (1, rows, group.q_heads, group.head_dim))
    shape = (1, rows, group.q_heads)
    poison = np.full((*shape, group.value_dim), np.nan, np.float32)
    state = AttentionState(
        rig.tensor(poison[..., 0]), rig.tensor(poison[..., 0]), rig.tensor(poison)
    )
    block_lse = rig.tensor(np.full((*shape, cache.blocks), np.nan, np.float32))
    mass = rig.tensor(np.full((1, group.kv_heads, cache.blocks), np.nan, np.float32))
    out = rig.tensor(np.full((*shape, group.value_dim), NAN_CODE, np.uint16))
    rig.device.attend(
        rig.stream,
        AttendWork(
            rig.tensor(queries),
            np.array([length], np.int64),
            cache.units,
            cache.slots,
            0,
            None,
            16,
            state,
            True,
            block_lse,
        ),
    )
    rig.device.finalize(rig.stream, FinalizeWork(state, out, block_lse=block_lse, block_mass=mass))
    rig.stream.synchronize()
    heads = oracle.Heads(group.group_size, group.logit_scale)
    wanted = oracle.attend(queries[0], cache.keys[0], cache.values[0], length, heads)
    share = np.exp(wanted.logits - wanted.lse[..., None])
    padded = np.zeros((rows, group.q_heads, cache.blocks * size))
    padded[..., :length] = share
    by_block = padded.reshape(rows, group.kv_heads, group.group_size, cache.blocks, size)
    expected = by_block.sum(-1).mean((0, 2))
    np.testing.assert_allclose(mass.array()[0], expected, rtol=2e-5, atol=1e-7)
    np.testing.assert_allclose(mass.array()[0].sum(-1), 1, rtol=1e-5)


def test_block_mass_needs_block_lse(rig: Rig) -> None:
    group = GROUPS[0]
    zeros = rig.tensor(np.zeros((1, 1, 6, 16), np.float32))
    row = rig.tensor(np.zeros((1, 1, 6), np.float32))
    state = AttentionState(row, row, zeros)
    out = rig.tensor(np.zeros((1, 1, 6, 16), np.uint16))
    mass = rig.tensor(np.zeros((1, group.kv_heads, 3), np.float32))
    with pytest.raises(ArgumentError, match="block_mass needs block_lse"):
        rig.device.finalize(rig.stream, FinalizeWork(state, out, block_mass=mass))


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("away", [0.0, 0.4, 1.0])
def test_units_read_in_host_slots_give_the_same_bits(
    rig: Rig, group: LayerGroup, away: float
) -> None:
    """A block may be read where it lies in the host tier; nothing but its address changes."""
    rng = np.random.default_rng(4)
    size, length = 16, 777
    cache = rig.cache(rng, group, size, [length])
    queries = random_codes(rng, (1, 3, group.q_heads, group.head_dim))
    wanted = rig.attend(cache, queries, [length])
    blocks = rig.blocks(group, size, cache.blocks + 2, fill=0x7F)
    host_slots = rng.permutation(cache.blocks + 2)[: cache.blocks].astype(np.int32)
    unit = cache.units.unit_bytes
    source, target = cache.units.memory.array(), blocks.memory.array()
    for block in range(cache.blocks):
        for head in range(group.kv_heads):
            at = slice(head * unit, (head + 1) * unit)
            target[host_slots[block], at] = source[cache.slots[0, head, block]]
    moved = rng.random(cache.blocks) < away
    slots = cache.slots.copy()
    heads = np.arange(group.kv_heads, dtype=np.int32)[:, None]
    slots[0][:, moved] = host_unit(host_slots[moved], heads, group.kv_heads)
    shape = (1, 3, group.q_heads)
    poison = np.full((*shape, group.value_dim), np.nan, np.float32)
    state = AttentionState(
        rig.tensor(poison[..., 0]), rig.tensor(poison[..., 0]), rig.tensor(poison)
    )
    out = rig.tensor(np.full((*shape, group.value_dim), NAN_CODE, np.uint16))
    work = AttendWork(
        rig.tensor(queries),
        np.array([length], np.int64),
        cache.units,
        slots,
        0,
        None,
        16,
        state,
        True,
        blocks=blocks,
    )
    rig.device.attend(rig.stream, work)
    rig.device.finalize(rig.stream, FinalizeWork(state, out))
    rig.stream.synchronize()
    assert (out.array() == wanted.out).all()


def test_host_units_need_their_pool_and_stay_inside_it(rig: Rig) -> None:
    group = GROUPS[0]
    rng = np.random.default_rng(5)
    cache = rig.cache(rng, group, 16, [64])
    queries = rig.tensor(random_codes(rng, (1, 1, 6, 16)))
    row = rig.tensor(np.zeros((1, 1, 6), np.float32))
    state = AttentionState(row, row, rig.tensor(np.zeros((1, 1, 6, 16), np.float32)))
    blocks = rig.blocks(group, 16, 5)

    def work(entry: int, pool: object) -> AttendWork:
        slots = np.full_like(cache.slots, entry)
        lengths = np.array([64], np.int64)
        return AttendWork(
            queries,
            lengths,
            cache.units,
            slots,
            0,
            None,
            16,
            state,
            True,
            None,
            pool,  # type: ignore[arg-type]
        )

    last = int(host_unit(np.int32(4), np.int32(1), 2))  # type: ignore[arg-type]
    rig.device.attend(rig.stream, work(last, blocks))
    for entry, pool in ((-2, None), (last - 1, blocks)):
        with pytest.raises(ArgumentError, match="slots"):
            rig.device.attend(rig.stream, work(entry, pool))
    rig.stream.synchronize()


def test_gathered_units_are_those_of_the_host_slots(rig: Rig) -> None:
    """Gathering first and attending then is the same as reading in place."""
    group = GROUPS[1]
    rng = np.random.default_rng(6)
    blocks = rig.blocks(group, 16, 4)
    content = rng.integers(0, 256, blocks.memory.shape, np.uint8)
    blocks.memory.array()[...] = content
    units = rig.units(group, 16, 10)
    rig.device.gather(
        rig.stream,
        GatherWork(
            blocks,
            units,
            np.array([3, 0], np.int32),
            np.array([1, 2], np.int32),
            np.array([9, 4], np.int32),
        ),
    )
    rig.stream.synchronize()
    unit = units.unit_bytes
    assert (units.memory.array()[9] == content[3, unit : 2 * unit]).all()
    assert (units.memory.array()[4] == content[0, 2 * unit : 3 * unit]).all()
