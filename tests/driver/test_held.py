"""Arguments that the device holds: the same bits as held by the host, read when the work runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hsswap.config import LayerGroup
from hsswap.driver.host import HostDevice
from hsswap.driver.operations import (
    AppendAtWork,
    AttendWork,
    AttentionState,
    FinalizeWork,
    host_unit,
)
from hsswap.driver.round_operations import CopyWork
from hsswap.driver.tensor import Tensor, tensor_of
from hsswap.errors import ArgumentError, DeviceError
from tests.driver.rig import I32, NAN_CODE, U16, Cache, Rig, random_codes
from tests.driver.test_operations import FILL, content, put_row, random_group, unit_bytes

SPAN_TOKENS = 1024  # a span on every device


class Call:
    """One attend over a cache, with poisoned results."""

    def __init__(self, rig: Rig, cache: Cache, queries: U16) -> None:
        shape, group = queries.shape[:3], cache.units.group
        poison = np.full((*shape, group.value_dim), np.nan, np.float32)
        self.rig = rig
        self.state = AttentionState(
            rig.tensor(poison[..., 0]), rig.tensor(poison[..., 0]), rig.tensor(poison)
        )
        self.out = rig.tensor(np.full((*shape, group.value_dim), NAN_CODE, np.uint16))
        self.work = AttendWork(
            queries=rig.tensor(queries),
            lengths=np.zeros(shape[0], np.int64),
            units=cache.units,
            slots=cache.slots,
            first_block=0,
            positions=None,
            span_blocks=SPAN_TOKENS // cache.units.block_size,
            state=self.state,
            begin=True,
        )

    def run(self, **changes: object) -> tuple[bytes, bytes, bytes]:
        """Output and carried state."""
        self.rig.device.attend(self.rig.stream, replace(self.work, **changes))  # type: ignore[arg-type]
        self.rig.device.finalize(self.rig.stream, FinalizeWork(self.state, self.out))
        self.rig.stream.synchronize()
        kept = (self.out, self.state.total, self.state.weighted)
        return tuple(t.array().tobytes() for t in kept)  # type: ignore[return-value]


def in_a_longer_table(rig: Rig, table: I32, more: int) -> Tensor:
    """The table as the first columns of one for longer sequences, which hold no unit."""
    wide = np.full((*table.shape[:2], table.shape[2] + more), -1, np.int32)
    wide[..., : table.shape[2]] = table
    held = rig.tensor(wide)
    return Tensor(held.address, table.shape, held.strides, "i32", held.on_device, held)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize(("rows", "dim"), [(1, 64), (1, 128), (1, 24), (5, 64), (70, 128)])
def test_attention_by_tables_of_the_device(rig: Rig, rows: int, dim: int, dtype: type) -> None:
    rng = np.random.default_rng(rows + dim)
    group = LayerGroup(1, 6, 2, dim)
    lengths = [2300, 1, 0, 1500] if rows == 1 else [900, 70]
    cache = rig.cache(rng, group, 16, lengths)
    call = Call(rig, cache, random_codes(rng, (len(lengths), rows, 6, dim)))
    wanted = call.run(lengths=np.array(lengths, np.int64))
    counters = rig.tensor(np.array(lengths).astype(dtype))
    slots = in_a_longer_table(rig, cache.slots, 7)
    assert call.run(lengths=counters) == wanted
    assert call.run(lengths=counters, slots=slots) == wanted
    before = rig.tensor(np.array(lengths).astype(dtype) - rows)
    assert call.run(lengths=before, slots=slots, added_tokens=rows) == wanted
    # A table as long as the sequences can become: blocks that no row sees change nothing.
    more = rng.integers(0, cache.units.memory.shape[0], (*cache.slots.shape[:2], 150))
    longer = np.concatenate((cache.slots, more.astype(np.int32)), axis=2)
    assert call.run(lengths=counters, slots=rig.tensor(longer)) == wanted
    places = np.broadcast_to(np.arange(longer.shape[2], dtype=np.int32), longer.shape)
    listed = call.run(lengths=counters, slots=longer, positions=rig.tensor(places))
    assert listed == wanted
    positions = in_a_longer_table(rig, places[..., : cache.blocks], 7)
    assert call.run(lengths=counters, slots=slots, positions=positions) == wanted
    assert call.run(lengths=counters, slots=slots, positions=places[..., : cache.blocks]) == wanted


@pytest.mark.parametrize("dim", [24, 64, 128])
@pytest.mark.parametrize("masses", [False, True])
def test_attention_that_ends_in_its_launch(rig: Rig, dim: int, masses: bool) -> None:
    """The same output, logsumexp and masses as by two calls."""
    rng = np.random.default_rng(dim)
    group = LayerGroup(1, 6, 2, dim)
    cache = rig.cache(rng, group, 16, [2300, 1, 0])
    call = Call(rig, cache, random_codes(rng, (3, 1, 6, dim)))
    results = []
    for apart in (True, False):
        block_lse = rig.tensor(np.full((3, 1, 6, cache.blocks), np.nan, np.float32))
        end = FinalizeWork(
            call.state,
            rig.tensor(np.full((3, 1, 6, dim), NAN_CODE, np.uint16)),
            lse=rig.tensor(np.full((3, 1, 6), np.nan, np.float32)),
            block_lse=block_lse if masses else None,
            block_mass=rig.tensor(np.full((3, 2, cache.blocks), np.nan, np.float32))
            if masses
            else None,
        )
        lengths = np.array([2300, 1, 0], np.int64)
        work = replace(call.work, lengths=lengths, block_lse=block_lse if masses else None)
        rig.device.attend(rig.stream, replace(work, end=None if apart else end))
        if apart:
            rig.device.finalize(rig.stream, end)
        rig.stream.synchronize()
        written = (end.out, end.lse, end.block_mass, end.block_lse)
        results.append([t.array().tobytes() for t in written if t is not None])
    assert results[0] == results[1]
    other = rig.tensor(np.zeros((3, 1, 6), np.float32))
    state = replace(call.state, total=other)
    with pytest.raises(ArgumentError, match="another state"):
        rig.device.attend(rig.stream, replace(work, end=replace(end, state=state)))


def test_counters_are_read_when_the_work_runs(rig: Rig) -> None:
    """A counter that earlier work of the stream sets: here by an append of its bytes."""
    rng = np.random.default_rng(4)
    group = LayerGroup(1, 2, 1, 8)
    cache = rig.cache(rng, group, 16, [300])
    call = Call(rig, cache, random_codes(rng, (1, 1, 2, 8)))
    wanted = call.run(lengths=np.array([217], np.int64))
    pool = rig.units(group, 1, 1)
    counter = Tensor(pool.memory.address, (1,), (4,), "i32", pool.memory.on_device, pool.memory)
    number = np.array([217], np.int32).view(np.uint16)
    keys = np.zeros((1, 1, 1, 8), np.uint16)
    keys[..., :2] = number
    append = AppendAtWork(
        keys=rig.tensor(keys),
        values=rig.tensor(keys),
        positions=rig.tensor(np.zeros(1, np.int64)),
        units=pool,
        slots=rig.tensor(np.zeros((1, 1, 1), np.int32)),
        blocks=rig.blocks(group, 1, 1),
    )
    rig.device.append_at(rig.stream, append)
    assert call.run(lengths=counter) == wanted


@pytest.mark.parametrize("in_host_slots", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_append_at(rig: Rig, seed: int, in_host_slots: bool) -> None:
    rng = np.random.default_rng(seed)
    group, size = random_group(rng), 1 << int(rng.integers(0, 6))
    sequences, rows, count = (int(n) for n in rng.integers(1, (4, 2 * size + 2, 5)))
    heads = group.kv_heads
    units = rig.units(group, size, sequences * count * heads + 2, FILL)
    blocks = rig.blocks(group, size, sequences * count + 2, FILL)
    order = rng.permutation(sequences * count * heads + 2)[: sequences * count * heads]
    slots = order.astype(np.int32).reshape(sequences, heads, count)
    order = rng.permutation(sequences * count + 2)[: sequences * count]
    host_slots = order.astype(np.int32).reshape(sequences, count)
    away = rng.random(slots.shape) < 0.3
    if in_host_slots:
        in_place = host_unit(host_slots[:, None], np.arange(heads, dtype=np.int32)[:, None], heads)
        slots = np.where(away, in_place, slots)
    else:
        slots[away] = -1
    host_slots[rng.random(host_slots.shape) < 0.3] = -1
    in_both = seed % 3 != 0
    positions = rng.integers(-3, count * size + 3, sequences)
    keys = random_codes(rng, (sequences, rows, heads, group.head_dim))
    values = random_codes(rng, (sequences, rows, heads, group.value_dim))
    wanted_units, wanted_blocks = content(units), content(blocks)
    nbytes = unit_bytes(group, size)
    for s, i, h in np.ndindex(sequences, rows, heads):
        block, token = divmod(int(positions[s]) + i, size)
        if not 0 <= block < count:
            continue
        pair = keys[s, i, h], values[s, i, h]
        slot, host_slot = int(slots[s, h, block]), int(host_slots[s, block])
        if slot >= 0:
            put_row(wanted_units[slot], group, size, token, *pair)
        places = [divmod(-2 - slot, heads)] if slot < -1 else []
        places += [(host_slot, h)] if in_both and host_slot >= 0 else []
        for to, head in places:
            unit = wanted_blocks[to, head * nbytes : (head + 1) * nbytes]
            put_row(unit, group, size, token, *pair)
    held = rig.tensor(np.ascontiguousarray(keys.transpose(2, 0, 1, 3)))
    work = AppendAtWork(
        keys=tensor_of(held.array().transpose(1, 2, 0, 3), "bf16", keys.shape, "keys"),
        values=rig.tensor(values),
        positions=rig.tensor(positions.astype([np.int32, np.int64][seed % 2])),
        units=units,
        slots=in_a_longer_table(rig, slots, 3),
        blocks=blocks,
        host_slots=rig.tensor(host_slots) if in_both else None,
    )
    rig.device.append_at(rig.stream, work)
    rig.stream.synchronize()
    assert (content(units) == wanted_units).all()
    assert (content(blocks) == wanted_blocks).all()


def test_tables_of_the_wrong_kind_are_refused(rig: Rig) -> None:
    rng = np.random.default_rng(5)
    cache = rig.cache(rng, LayerGroup(1, 4, 2, 16), 16, [64, 64])
    call = Call(rig, cache, random_codes(rng, (2, 1, 4, 16)))
    slots = rig.tensor(cache.slots)
    transposed = Tensor(slots.address, (2, 2, 4), (32, 4, 8), "i32", slots.on_device, slots)
    apart = Tensor(slots.address, (2, 2, 2), (16, 16, 4), "i32", slots.on_device, slots)
    wrong: list[tuple[str, dict[str, object]]] = [
        ("lengths has dtype f32", {"lengths": rig.tensor(np.zeros(2, np.float32))}),
        ("lengths has shape", {"lengths": rig.tensor(np.zeros(3, np.int32))}),
        ("slots has dtype i64", {"slots": rig.tensor(cache.slots.astype(np.int64))}),
        ("contiguous along its last axis", {"slots": transposed}),
        ("2 lists apart", {"slots": apart}),
        ("added_tokens", {"added_tokens": -1}),
        ("the same strides", {"slots": slots, "positions": in_a_longer_table(rig, cache.slots, 1)}),
        ("positions has shape", {"positions": rig.tensor(np.zeros((2, 2, 3), np.int32))}),
    ]
    for message, changes in wrong:
        with pytest.raises(ArgumentError, match=message):
            call.run(**changes)
    call.run()


@pytest.mark.parametrize("entry", [99, -2])
def test_the_host_checks_what_it_reads(entry: int) -> None:
    with HostDevice() as device, Rig(device) as rig:
        rng = np.random.default_rng(6)
        cache = rig.cache(rng, LayerGroup(1, 2, 1, 8), 16, [64])
        call = Call(rig, cache, random_codes(rng, (1, 1, 2, 8)))
        slots = cache.slots.copy()
        slots[0, 0, 2] = entry
        with pytest.raises(DeviceError, match="slots, held by the device"):
            call.run(lengths=np.array([64], np.int64), slots=rig.tensor(slots))


@pytest.mark.parametrize("count", [0, 1, 255, 100_003])
def test_copy_words(rig: Rig, count: int) -> None:
    rng = np.random.default_rng(count)
    words = rng.integers(0, 1 << 32, count, np.uint32)
    source, target = rig.tensor(words), rig.tensor(np.zeros(count, np.uint32))
    rig.device.copy_words(rig.stream, CopyWork(source, target, -5))
    rig.device.copy_words(rig.stream, CopyWork(source, source, 3))
    rig.stream.synchronize()
    assert (target.array() == words - np.uint32(5)).all()
    assert (source.array() == words + np.uint32(3)).all()
    wrong = rig.tensor(np.zeros(count + 1, np.uint32))
    with pytest.raises(ArgumentError, match="target has shape"):
        rig.device.copy_words(rig.stream, CopyWork(source, wrong))
