"""A captured top-k step of one layer: score, select, attend that fetches, with no look back.

The blocks that were full when the steps began are ranked. Those behind them are attended always:
their codes are made when the sequence is taken back.
"""

from __future__ import annotations

import numpy as np

from hsswap.captured_layer import CapturedLayer, Held, TableMemory
from hsswap.carving import first_columns
from hsswap.driver.base import Device, Stream
from hsswap.driver.choice_operations import FetchWork, TrimWork
from hsswap.driver.codes_operations import Attended, Resident, ScoreMemory
from hsswap.driver.operations import (
    AttendWork,
    AttentionState,
    FinalizeWork,
    SelectWork,
    UnitCache,
)
from hsswap.driver.tensor import Tensor
from hsswap.exact import LayerCache
from hsswap.predictor import Predictor, ScoreRequest
from hsswap.tiers import I64
from hsswap.topk import MASS_DECAY, TopKLayer


class CapturedTopK(CapturedLayer):
    """Launches of one layer that attend what the predictor chooses."""

    def __init__(
        self,
        device: Device,
        cache: LayerCache,
        held: Held,
        memory: TableMemory,
        ranked: TopKLayer,
        predictor: Predictor,
        indices: I64,
    ) -> None:
        """``indices`` ``[first]``: the block indices of the full blocks."""
        super().__init__(device, cache, held, memory)
        ranked.settle()
        self._ranked = ranked
        self._pinned = ranked.pinned(held.first)
        self._predictor = predictor
        index = predictor.code_index(cache.layer, indices)
        predictor.hide(index, cache.first_visible(1) // cache.pool.block_size)
        group, heads, count = cache.pool.group, cache.pool.group.kv_heads, ranked.chosen_count
        tail = np.arange(held.first, held.end, dtype=np.int32)
        listed = np.zeros((1, heads, count + len(tail)), np.int32)
        chosen = np.full((heads, count), -1, np.int32)
        tables = {
            "host slots": held.leased,
            "index": index,
            "pinned": self._pinned,
            "step": np.full(heads, ranked.step, np.int32),
            "cache slots": cache.pool.slots.units(ranked.slots),
            "tail": tail,
            "chosen": chosen,
            "chosen slots": chosen,
            "attended": listed,
            "positions": listed,
            "absent": chosen,
            "absent count": np.zeros(heads, np.int32),
        }
        for name, table in tables.items():
            memory.add(self._name + name, "i32", table)
        measures = {
            "scores": (heads, held.first),
            "shares": (heads, held.first),
            "left out": (heads,),
            "remembered": (2, group.q_heads, held.first if predictor.remembers else 1),
            "block lse": (1, 1, group.q_heads, listed.shape[2]),
            "mass": listed.shape,
        }
        for name, shape in measures.items():
            memory.add(self._name + name, "f32", np.zeros(shape, np.float32))
        memory.add(self._name + "missing", "u8", np.zeros((heads, count), np.uint8))

    @property
    def left_out(self) -> Tensor:
        """The share of predicted mass that the last step left out, f32 ``[H]``."""
        return self._tensor("left out")

    def attend(
        self, stream: Stream, counter: Tensor, queries: Tensor, state: AttentionState, out: Tensor
    ) -> None:
        """One row ``[1, Q, dk]`` over what is chosen for it and all blocks that came later."""
        device, tensor, pool = self.device, self._tensor, self.cache.pool
        fetch = self._choose(stream, queries.row(0))
        mass = tensor("mass")
        span = device.span_tokens(mass.shape[2] * pool.block_size)
        block_lse = tensor("block lse")
        device.attend(
            stream,
            AttendWork(
                queries=queries.as_batch(),
                lengths=counter,
                units=pool.units,
                slots=tensor("attended"),
                first_block=0,
                positions=tensor("positions"),
                span_blocks=span // pool.block_size,
                state=state,
                begin=True,
                block_lse=block_lse,
                blocks=pool.blocks,
                added_tokens=1,
                end=FinalizeWork(state, out.as_batch(), block_lse=block_lse, block_mass=mass),
                fetch=fetch,
            ),
        )

    def _choose(self, stream: Stream, query: Tensor) -> FetchWork:
        """Rank and choose for one row ``[Q, dk]``; what is to be fetched and attended."""
        device, tensor, pool = self.device, self._tensor, self.cache.pool
        ranked = self._ranked
        owned = ranked.cache_tables
        cache = UnitCache(tensor("cache slots"), owned.owner, owned.mass, owned.used)
        chosen, mass = tensor("chosen"), tensor("mass")
        remembered, lse = tensor("remembered"), tensor("block lse").row(0).row(0)
        request = ScoreRequest(
            queries=query,
            code_index=tensor("index"),
            scores=tensor("scores"),
            # The blocks of the tail count neither by codes nor exactly: they are no choice.
            resident=Resident(
                units=pool.units,
                cache=cache if ranked.step else None,
                pinned=tensor("pinned"),
                active=np.zeros(pool.group.kv_heads, np.int32),
                active_tokens=0,
            ),
            memory=ScoreMemory(remembered.row(0), remembered.row(1)),
            first=False,  # memory is zero and nothing was chosen: as if
            last=Attended(chosen, first_columns(lse, chosen.shape[1])),
            uncorrected=tensor("shares"),
        )
        device.score(stream, self._predictor.score_work(self.cache.layer, request))
        select = SelectWork(
            scores=tensor("scores"),
            shares=tensor("shares" if self._predictor.remembers else "scores"),
            k=ranked.settings.k,
            pinned=tensor("pinned"),
            cache=cache,
            step=tensor("step"),
            decay=MASS_DECAY,
            last_chosen=chosen,
            last_mass=first_columns(mass.row(0), chosen.shape[1]),
            chosen=chosen,
            chosen_slots=tensor("chosen slots"),
            missing=tensor("missing"),
            left_out=tensor("left out"),
        )
        device.select(stream, select)
        return self._bring(stream, select)

    def _bring(self, stream: Stream, select: SelectWork) -> FetchWork:
        """Give up what the bound allows; what brings the rest."""
        device, tensor, pool = self.device, self._tensor, self.cache.pool
        settings, cache, chosen = self._ranked.settings, select.cache, select.chosen
        if settings.left_out_bound is not None:
            trim = TrimWork(
                scores=select.scores,
                shares=select.shares,
                pinned=self._pinned,
                bound=settings.left_out_bound,
                least=settings.least_k,
                cache=cache,
                chosen=chosen,
                chosen_slots=select.chosen_slots,
                missing=select.missing,
                left_out=select.left_out,
            )
            device.trim(stream, trim)
        first = self.held.first
        slots = self.memory.tensor(self._name + "slots").row(0)
        tail = Tensor(
            slots.address + first * slots.strides[1],
            (slots.shape[0], self.held.end - first),
            slots.strides,
            "i32",
            slots.on_device,
            slots,
        )
        return FetchWork(
            units=pool.units,
            blocks=pool.blocks,
            chosen=chosen,
            chosen_slots=select.chosen_slots,
            missing=select.missing,
            cache=cache,
            host_slots=tensor("host slots"),
            tail_slots=tail,
            tail_positions=tensor("tail"),
            slots=tensor("attended").row(0),
            positions=tensor("positions").row(0),
            absent=tensor("absent"),
            absent_count=tensor("absent count"),
        )

    def _tensor(self, name: str) -> Tensor:
        return self.memory.tensor(self._name + name)
