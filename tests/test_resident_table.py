"""Tables of resident blocks: right after any change, never changed under a reader, O(1) a step."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hsswap import ModelDims
from hsswap.driver.host import HostDevice
from hsswap.driver.tensor import Tensor
from hsswap.resident_table import LEAST_BLOCKS, ResidentTable, TableMemory
from tests.swap_actors import roomy
from tests.swap_cases import config_for, random_case
from tests.swap_watch import watched

HEADS = 3


@settings(max_examples=60)
@given(st.lists(st.integers(1, 90) | st.integers(-8, -1), max_size=40))
def test_room_is_never_given_twice(steps: list[int]) -> None:
    with HostDevice() as device:
        memory = TableMemory(device, 100, HEADS)
        taken: list[tuple[int, int]] = []
        for step in steps:
            if step > 0:
                first = memory.take(step)
                if first is not None:
                    taken.append((first, step))
            elif taken:
                memory.give_back(*taken.pop(step % len(taken)))
            used = sorted(n for first, count in taken for n in range(first, first + count))
            assert len(set(used)) == len(used)
            assert not used or used[-1] < 200
        for place in taken:
            memory.give_back(*place)
        assert memory.take(200) == 0
        memory.memory.close()


CHANGES = st.lists(
    st.tuples(st.sampled_from(("grow", "grow", "lose", "cut", "move")), st.integers(0, 200)),
    max_size=30,
)


@settings(max_examples=80)
@given(CHANGES)
def test_a_table_says_what_the_slots_say(changes: list[tuple[str, int]]) -> None:
    with HostDevice() as device:
        memory = TableMemory(device, 600, HEADS)
        table = ResidentTable(memory)
        slots: list[int] = []
        readers: list[tuple[Tensor, np.ndarray]] = []
        following = 0
        for what, size in changes:
            if what == "grow":
                table.changed(max(0, len(slots) - 1))
                slots += range(following, following + size)
                following += size
            elif slots:
                at = size % len(slots)
                table.changed(at)
                if what == "cut":
                    del slots[at:]
                else:
                    slots[at] = -1 if what == "lose" else following
                    following += 1
            array = np.array([*slots, *[-1] * 9], np.int32)
            table.settle(array, len(slots))
            assert table.missing == slots.count(-1)
            if not table.missing and slots and len(slots) < 400:
                start = size % len(slots)
                units = table.units(start, len(slots))
                if units is not None:
                    wanted = array[None, start : len(slots)] * HEADS + np.arange(HEADS)[:, None]
                    assert (units.array()[0] == wanted).all()
                    readers.append((units, wanted))
            for read, wanted in readers:  # launches that have not run yet
                assert (read.array()[0] == wanted).all()
        table.leave()
        table.give_back(table.left)
        assert memory.take(1200) == 0
        memory.memory.close()


class Seen(np.ndarray):
    """Remembers how much of it was looked at."""

    most = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        if isinstance(found, np.ndarray):
            Seen.most = max(Seen.most, found.size)
        return found

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        Seen.most = max(Seen.most, *(i.size for i in inputs if isinstance(i, Seen)))
        plain = [i.view(np.ndarray) if isinstance(i, Seen) else i for i in inputs]
        return getattr(ufunc, method)(*plain, **options)


async def test_a_step_looks_at_what_changed_and_no_more() -> None:
    """Of a sequence of 2,000 resident blocks a step of decoding sees a handful."""
    dims = ModelDims.uniform(layers=2, q_heads=2, kv_heads=2, head_dim=8, block_size=1)
    case = random_case(dims, 2100, 4)
    async with watched(roomy(case)) as swap:
        sequence = swap.sequence()
        for layer in range(2):
            await sequence.append(layer, case.keys[layer][:2000], case.values[layer][:2000])
        await swap.flush()
        answers = []
        for row in range(2000, 2040):
            if row == 2010:  # once the tables are there
                for cache in sequence._layers:
                    cache.device_slot = cache.device_slot.view(Seen)
                sequence._indices = sequence._indices.view(Seen)
                Seen.most = 0
            for layer in range(2):
                part = slice(row, row + 1)
                keys, values = case.keys[layer][part], case.values[layer][part]
                assert sequence.try_append(layer, keys, values) or row == 2000
                result = sequence.try_attend(layer, case.queries[layer][part])
                assert result is not None
                await result.done()
                answers.append(np.asarray(result.out).copy())
            if row == 2010:
                sequence._indices = sequence._indices.view(Seen)
        assert 0 < Seen.most <= 2 * LEAST_BLOCKS
    async with watched(config_for(case)) as swap:
        sequence = swap.sequence()
        for layer in range(2):
            await sequence.append(layer, case.keys[layer][:2040], case.values[layer][:2040])
        result = await sequence.attend(1, case.queries[1][2039:2040])
        await result.done()
        assert (np.asarray(result.out) == answers[-1]).all()
