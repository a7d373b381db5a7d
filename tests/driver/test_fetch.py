"""Fetch, and attention that fetches, against plain loops."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hsswap.config import LayerGroup
from hsswap.driver.choice_operations import FetchWork
from hsswap.driver.host import HostDevice
from hsswap.driver.operations import (
    AttendWork,
    AttentionState,
    FinalizeWork,
    UnitCache,
)
from hsswap.driver.tensor import Tensor
from hsswap.errors import ArgumentError, DeviceError
from tests.driver.rig import NAN_CODE, Rig, random_codes

GONE = -9


class Fetched:
    """A random fetch, and by plain loops what it must do."""

    def __init__(self, rig: Rig, seed: int, *, absent: float = 0.3, dim: int | None = None) -> None:
        """``dim``: of units that attention takes, whose bytes are numbers; None: any bytes."""
        rng = np.random.default_rng(seed)
        heads, size = int(rng.integers(1, 5)), 1 << int(rng.integers(0, 5))
        dims = [8 * int(n) for n in rng.integers(1, 20, 2)]
        kv_dtype = "e4m3" if seed % 3 == 0 else "bf16"
        aux = int(rng.choice([0, 10])) and (8 if kv_dtype == "e4m3" else 10)
        group = LayerGroup(1, heads, heads, dims[0], dims[1], aux_bytes=aux, kv_dtype=kv_dtype)
        if dim is not None:
            size, group = 16, LayerGroup(1, 3 * heads, heads, dim)
        count, places, tail = (int(n) for n in rng.integers((0, 0, 0), (300, 40, 4)))
        places += count
        blocks = count + int(rng.integers(0, 50))
        self.units = rig.units(group, size, heads * (places + tail) + 3, 0xA5)
        self.blocks = rig.blocks(group, size, blocks + 2)
        content = self.blocks.memory.array()
        content[...] = rng.integers(0, 256, content.shape, np.uint8)
        if dim is not None:
            content[...] = random_codes(rng, content.view(np.uint16).shape).view(np.uint8)
            self.units.memory.array()[...] = 0
        order = rng.permutation(len(self.units.memory.array())).astype(np.int32)
        self.cache_slots = order[: heads * places].reshape(heads, places)
        tail_slots = order[heads * places :][: heads * tail].reshape(heads, tail)
        self.owner = np.full((heads, places), -1, np.int32)
        chosen = np.zeros((heads, count), np.int32)
        slots = np.zeros_like(chosen)
        for h in range(heads):
            chosen[h] = np.sort(rng.permutation(blocks)[:count])
            at = rng.permutation(places)[:count]
            slots[h] = self.cache_slots[h, at]
            self.owner[h, at] = chosen[h]
        self.missing = (rng.random(chosen.shape) < 0.4).astype(np.uint8)
        host_slots = rng.permutation(blocks + 2)[:blocks].astype(np.int32)
        host_slots[rng.random(blocks) < absent] = -1
        self.host_slots, self.chosen, self.chosen_slots = host_slots, chosen, slots
        self.tail_slots = tail_slots
        self.tail_positions = rng.integers(0, 1000, tail).astype(np.int32)
        zeros = np.zeros((heads, places), np.float32)
        listed = np.full((heads, count + tail), GONE, np.int32)
        tensor = rig.tensor
        self.work = FetchWork(
            units=self.units,
            blocks=self.blocks,
            chosen=tensor(chosen),
            chosen_slots=tensor(slots),
            missing=tensor(self.missing),
            cache=UnitCache(
                tensor(self.cache_slots), tensor(self.owner), tensor(zeros), tensor(zeros).row(0)
            ),
            host_slots=tensor(host_slots),
            tail_slots=tensor(tail_slots),
            tail_positions=tensor(self.tail_positions),
            slots=tensor(listed),
            positions=tensor(listed),
            absent=tensor(np.full_like(chosen, GONE)),
            absent_count=tensor(np.full(heads, GONE, np.int32)),
        )

    def check(self, *, listed: bool = True, before: int = 0xA5) -> None:
        """Compare with the loops. ``listed``: the lists for attention, too."""
        heads, count = self.chosen.shape
        size = self.units.unit_bytes
        wanted = np.full(self.units.memory.shape, before, np.uint8)
        owner = self.owner.copy()
        work = self.work
        for h in range(heads):
            absent = []
            for n in range(count):
                block, slot = int(self.chosen[h, n]), int(self.chosen_slots[h, n])
                away = int(self.host_slots[block])
                lost = bool(self.missing[h, n]) and away < 0
                if listed:
                    assert work.positions.array()[h, n] == block
                    assert work.slots.array()[h, n] == (-1 if lost else slot)
                if lost:
                    absent.append(block)
                    owner[h, self.cache_slots[h].tolist().index(slot)] = -1
                elif self.missing[h, n]:
                    wanted[slot] = self.blocks.memory.array()[away, h * size : (h + 1) * size]
            assert work.absent_count.array()[h] == len(absent)
            assert work.absent.array()[h, : len(absent)].tolist() == absent
            assert (work.absent.array()[h, len(absent) :] == GONE).all()
            if listed:
                assert (work.slots.array()[h, count:] == self.tail_slots[h]).all()
                assert (work.positions.array()[h, count:] == self.tail_positions).all()
        assert (work.cache.owner.array() == owner).all()
        assert (self.units.memory.array() == wanted).all()


@pytest.mark.parametrize("seed", range(16))
def test_fetch(rig: Rig, seed: int) -> None:
    fetched = Fetched(rig, seed, absent=[0.3, 0.0, 1.0][seed % 3])
    rig.device.fetch(rig.stream, fetched.work)
    rig.stream.synchronize()
    fetched.check()


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("seed", range(8))
def test_attention_that_fetches(rig: Rig, seed: int, dim: int) -> None:
    """The same bits as after a fetch. What is missing is brought although no row sees it."""
    rng = np.random.default_rng(seed)
    length = int(rng.integers(0, 16 * 300))
    results = []
    for fused in (False, True):
        fetched = Fetched(rig, seed, absent=0.1, dim=dim)
        work, group = fetched.work, fetched.units.group
        heads, entries = work.slots.shape
        queries = random_codes(np.random.default_rng(seed), (1, 1, group.q_heads, dim))
        poison = np.full((1, 1, group.q_heads, dim), np.nan, np.float32)
        state = AttentionState(
            rig.tensor(poison[..., 0]), rig.tensor(poison[..., 0]), rig.tensor(poison)
        )
        out = rig.tensor(np.full(poison.shape, NAN_CODE, np.uint16))
        block_lse = rig.tensor(np.full((1, 1, group.q_heads, entries), np.nan, np.float32))
        mass = rig.tensor(np.full((1, heads, entries), np.nan, np.float32))
        attend = AttendWork(
            queries=rig.tensor(queries),
            lengths=rig.tensor(np.array([length])),
            units=work.units,
            slots=work.slots.as_batch(),
            first_block=0,
            positions=work.positions.as_batch(),
            span_blocks=64,
            state=state,
            begin=True,
            block_lse=block_lse,
            blocks=work.blocks,
            end=FinalizeWork(state, out, block_lse=block_lse, block_mass=mass),
        )
        if fused:
            attend = replace(attend, fetch=work)
        else:
            rig.device.fetch(rig.stream, work)
        rig.device.attend(rig.stream, attend)
        rig.stream.synchronize()
        fetched.check(listed=not fused, before=0)
        assert not np.isnan(mass.array()).any()
        results.append([t.array().tobytes() for t in (out, block_lse, mass)])
    assert results[0] == results[1]


def test_fetch_refuses_what_does_not_fit(rig: Rig) -> None:
    work = Fetched(rig, 1).work
    heads, count = work.chosen.shape
    short = rig.tensor(np.zeros((heads, count), np.int32))
    apart = Tensor(short.address, short.shape, (4, 8), "i32", short.on_device, short)
    wrong: list[tuple[str, dict[str, Tensor]]] = [
        ("slots has shape", {"slots": short}),
        ("chosen_slots must be contiguous", {"chosen_slots": apart}),
        ("missing has dtype i32", {"missing": short}),
        ("host_slots must be a Tensor with 1 axes", {"host_slots": short}),
        ("absent_count has shape", {"absent_count": rig.tensor(np.zeros(heads + 1, np.int32))}),
    ]
    for message, changes in wrong:
        with pytest.raises(ArgumentError, match=message):
            rig.device.fetch(rig.stream, replace(work, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["chosen", "chosen_slots", "host_slots"])
def test_the_host_checks_what_fetch_reads(name: str) -> None:
    with HostDevice() as device, Rig(device) as rig:
        work = Fetched(rig, 2).work
        getattr(work, name).array()[...] = 1 << 20
        device.fetch(rig.stream, work)
        with pytest.raises(DeviceError, match=f"{name}, held by the device"):
            rig.stream.synchronize()
