"""Actors with tables of ids of their own: offload, grow, share, attend, free, cancel."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hsswap import HighSpeedSwap
from hsswap.driver.base import Stream
from hsswap.errors import OutOfSlots, StaleBlockId
from tests.branch_actors import MOST, Kind, rows_of_kind
from tests.named_cases import block_of
from tests.storming import CALM, Raging
from tests.swap_cases import U16, Case
from tests.swap_watch import turns


@dataclass(eq=False)
class Table:
    """Ids of a list of blocks that holds the first ``tokens`` rows of a base."""

    base: int
    ids: list[int] = field(default_factory=list)
    tokens: int = 0

    @property
    def kind(self) -> Kind:
        return (self.base, 0, self.base)


@dataclass(eq=False)
class Tabler(Raging):
    """One task of a storm. ``calls`` counts answers that were compared, ``shared`` tables that
    began with blocks of another."""

    swap: HighSpeedSwap
    case: Case
    right: Mapping[Kind, list[U16]]
    seed: int
    calls: int = 0
    shared: int = 0
    done: int = 0
    tables: list[Table] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.size = self.case.dims.block_size
        self.streams: list[Stream | None] = [None, self.swap.device.stream()]

    async def end(self) -> None:
        for table in list(self.tables):
            await self.drop(table)
        stream = self.streams[1]
        assert stream is not None
        await asyncio.to_thread(stream.close)

    async def act(self) -> None:
        """Something, for one of the tables."""
        if not self.tables or (self.pick(12) == 0 and len(self.tables) < 3):
            self.tables.append(Table(self.pick(self.case.tokens // MOST)))
        table, what = self.tables[self.pick(len(self.tables))], self.pick(10)
        if what < 4:
            await self.grow(table, min(MOST, table.tokens + 1 + self.pick(40)))
        elif what < 8:
            await self.ask(table)
        elif what == 8 and len(self.tables) < 4:
            await self.share(table)
        elif what == 9 and self.pick(2):
            await self.ask_while_it_grows(table)
        elif self.pick(3) == 0:
            await self.drop(table)
        else:
            await self.swap.flush()

    async def grow(self, table: Table, stop: int) -> None:
        """Offload block by block, the last one again as it fills; without room give up."""
        while table.tokens < stop:
            number, begun = divmod(table.tokens, self.size)
            end = min(stop, (number + 1) * self.size)
            if not begun:
                table.ids.append(await self.swap.alloc_disk_block_id())
            try:
                for layer in range(self.case.dims.layers):
                    await self.offload(table, layer, number, end - number * self.size)
            except OutOfSlots:
                await self.drop(table)
                return
            table.tokens = end

    async def offload(self, table: Table, layer: int, number: int, valid: int) -> None:
        """One block of a layer, tried again for a while."""
        first = rows_of_kind(table.kind, 0, 1)[0] // self.size
        block: dict[str, Any] = block_of(self.case, layer, first + number, valid)
        for _ in range(60):
            with suppress(*CALM):
                await self.swap.offload_block_on_stream(
                    stream=self.streams[self.pick(2)], layer=layer, block=table.ids[number], **block
                )
                return
            await turns(5)
        raise OutOfSlots("for long")

    async def share(self, table: Table) -> None:
        """Another table with the full blocks of this one."""
        full = table.tokens // self.size
        for block in table.ids[:full]:
            await self.swap.inc_disk_ref(block=block)
        if full:
            self.tables.append(Table(table.base, table.ids[:full], full * self.size))
            self.shared += 1

    async def ask(self, table: Table) -> None:
        """A row of a layer, the last one or one before."""
        if not table.tokens:
            return
        row = (table.tokens if self.pick(2) else 1 + self.pick(table.tokens)) - 1
        layer = self.pick(self.case.dims.layers)
        group = self.case.dims.group(layer)
        out = np.full((group.q_heads, group.value_dim), 0x7FC0, np.uint16)
        result = await self.maybe_cancelled(
            self.swap.attend_layer_on_stream_with_q_pos(
                stream=self.streams[self.pick(2)],
                layer=layer,
                seq_block_ids=table.ids[: row // self.size + 1],
                q_dev=self.case.queries[layer][rows_of_kind(table.kind, row, row + 1)[0]],
                output_dev=out,
                last_block_valid_slots=row % self.size + 1,
            )
        )
        if result is not None:
            await result.done()
            wanted = self.right[table.kind][layer][row]
            assert (out == wanted).all(), f"tabler {self.seed}: a wrong answer in layer {layer}"
            self.calls += 1

    async def ask_while_it_grows(self, table: Table) -> None:
        """Calls on one block that overlap; without room the table is freed meanwhile."""
        grown = self.grow(table, min(MOST, table.tokens + 1 + self.pick(20)))
        ends = await asyncio.gather(self.ask(table), grown, return_exceptions=True)
        for end in ends:
            if isinstance(end, BaseException) and not isinstance(end, StaleBlockId):
                raise end

    async def drop(self, table: Table) -> None:
        """Let go of every id, whatever fails meanwhile."""
        if table in self.tables:
            self.tables.remove(table)
        for block in table.ids:
            for _ in range(200):
                with suppress(*CALM):
                    await self.swap.dec_disk_ref(block=block)
                    break
                await turns(3)
            else:
                raise AssertionError(f"block id {block} cannot be let go")
        table.ids = []

    async def maybe_cancelled(self, call: Coroutine[Any, Any, Any]) -> Any:
        """The result, or None for a call that was cancelled after a moment, as some are."""
        task = asyncio.ensure_future(call)
        if self.pick(8) == 0:
            await turns(self.pick(20))
            task.cancel()
            await asyncio.wait([task])
        return None if task.cancelled() else await task
