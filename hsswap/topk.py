"""Top-k attention: the device ranks a sequence's blocks and keeps a small cache of units.

Two stages with one host decision between them: *choose* (score, select) says which units must come,
*use* gathers them and attends. The block being filled is always attended, next to what is chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hsswap.carving import carve, first_columns, first_of
from hsswap.driver.base import Buffer, Device, Stream
from hsswap.driver.choice_operations import TrimWork
from hsswap.driver.codes_operations import Attended, Resident, ScoreMemory
from hsswap.driver.operations import (
    I32,
    AttendWork,
    AttentionState,
    FinalizeWork,
    GatherWork,
    SelectWork,
    UnitCache,
)
from hsswap.driver.tensor import Tensor, tensor_in
from hsswap.exact import LayerCache
from hsswap.late import Late
from hsswap.lessons import Lesson, Lessons
from hsswap.predictor import Predictor, ScoreRequest
from hsswap.tiers import I64
from hsswap.top_k_config import PINNED_RECENT_TOKENS
from hsswap.top_k_config import TopK as TopK

LEAST_REMEMBERED = 512
"""Blocks that a layer's memory of scores has room for at first."""

MASS_DECAY = 0.9
"""What a step leaves of a unit's earlier attention mass: about ten steps of memory."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What ``select`` wrote: chosen blocks and their unit slots ``[H, N]``, which units must be
    gathered, and the share of predicted mass left out ``[H]``.
    """

    chosen: Tensor
    slots: Tensor
    missing: Tensor
    left_out: Tensor

    def blocks_to_load(self) -> NDArray[np.int64]:
        """Distinct logical blocks of which some head's unit must come. Once select has run."""
        return np.unique(self.chosen.array()[self.missing.array() != 0]).astype(np.int64)


class TopKLayer:
    """The unit cache and the buffers of one (sequence, layer); made and closed by the sequence."""

    def __init__(
        self,
        device: Device,
        cache: LayerCache,
        settings: TopK,
        slots: I32,
        max_blocks: int,
        *,
        learns: bool,
    ) -> None:
        """``learns``: the predictor is one that knows how much a choice leaves out."""
        self.cache = cache
        self._settings = settings
        self.slots = slots
        pool = cache.pool
        heads, queries, count = pool.group.kv_heads, pool.group.q_heads, len(slots)
        self._most = settings.pinned_blocks(pool.block_size) + settings.k
        # Results alternate between two sets: a step reads the last one's while it writes its own.
        shapes = {
            "owner": ("i32", (heads, count)),
            "mass": ("f32", (heads, count)),
            "used": ("i32", (heads, count)),
            "scores": ("f32", (heads, max_blocks)),
            "shares": ("f32", (heads, max_blocks)),
            "block_lse": ("f32", (1, 1, queries, self._most + 1)),
            "block_mass0": ("f32", (1, heads, self._most + 1)),
            "block_mass1": ("f32", (1, heads, self._most + 1)),
        }
        self._device_memory, self._on_device = carve(device.allocate, shapes)
        shapes = {"slots": ("i32", (heads, count)), "index": ("i32", (max(1, max_blocks),))}
        for turn in "01":
            shapes["chosen" + turn] = ("i32", (heads, self._most))
            shapes["chosen_slots" + turn] = ("i32", (heads, self._most))
            shapes["missing" + turn] = ("u8", (heads, self._most))
            shapes["left_out" + turn] = ("f32", (heads,))
        try:
            self._host_memory, self._on_host = carve(device.allocate_host, shapes)
        except BaseException:
            self._device_memory.close()
            raise
        self.late: Late | None = None
        # Elsewhere masses are not those of a plain softmax over everything.
        learns &= settings.stand_in and pool.group.window is None and pool.group.soft_cap is None
        try:
            if settings.late_mass > 0:
                self.late = Late(device, settings.late_mass, heads, max_blocks)
            cache.lessons = Lessons(device, pool) if learns else None
        except BaseException:
            self._device_memory.close()
            self._host_memory.close()
            if self.late is not None:
                self.late.close()
            raise
        self._on_host["slots"].array()[...] = pool.slots.units(slots)
        self.step = 0
        self._coded = 0  # so many of the first blocks have codes for certain
        self._version = 0
        self._turn = 0
        self._last: tuple[Tensor, Tensor] | None = None
        self._last_lse: Attended | None = None
        none = first_of(self._on_device["scores"], (pool.group.q_heads, 0))
        self._memory = ScoreMemory(none, none)
        self._remembered: list[Buffer] = []

    def applies(self) -> bool:
        """Whether there is anything to leave out; with fewer blocks attention is exact."""
        return self.cache.length // self.cache.pool.block_size > self._most

    def reset(self) -> None:
        """Take the cache as empty: what select announced did not all arrive, or blocks are gone."""
        self.step = 0
        self._coded = 0
        if self.late is not None:
            self.late.forget()
        self._last = None
        self._last_lse = None

    def coded(self, predictor: Predictor) -> int:
        """How many of the first blocks have codes for certain, as long as their ids are held."""
        if predictor.version != self._version:
            self._version, self._coded = predictor.version, 0
        return self._coded

    def _code_index(self, predictor: Predictor, indices: I64) -> Tensor:
        """Where the codes of the full blocks are. Looks at those only of which it was not known;
        no launch reads the list now, since each step's choice is waited for.
        """
        start = self.coded(predictor)
        found = predictor.code_index(self.cache.layer, indices[start:])
        index = self._on_host["index"].array()
        index[start : len(indices)] = found
        predictor.hide(index, self.cache.first_visible(1) // self.cache.pool.block_size)
        unknown = np.flatnonzero(found < 0)
        self._coded = start + (int(unknown[0]) if len(unknown) else len(found))
        return first_of(self._on_host["index"], (len(indices),))

    def settle(self) -> None:
        """Before steps that the host does not see: no unit of the cache may be owed."""
        if self.late is not None and self.late.owes:
            self.reset()

    @property
    def settings(self) -> TopK:
        """What the sequence asked for."""
        return self._settings

    @property
    def chosen_count(self) -> int:
        """Blocks a KV head that are chosen in all, where top-k applies."""
        return self._most

    @property
    def cache_tables(self) -> UnitCache:
        """What the device knows of the cache, with the slots in host memory."""
        on_device = self._on_device
        return UnitCache(
            self._on_host["slots"], on_device["owner"], on_device["mass"], on_device["used"]
        )

    def pinned(self, blocks: int) -> I32:
        """Those always chosen of so many: the first in sight, and those of the last tokens."""
        size = self.cache.pool.block_size
        recent = blocks - -(-PINNED_RECENT_TOKENS // size)
        first = min(self.cache.first_visible(1) // size, recent - 1)
        return np.array([first, *range(recent, blocks)], np.int32)

    def resume(self, steps: int) -> None:
        """Go on behind at most so many steps of which the host saw nothing.

        A cache that was empty before them is taken as empty: perhaps none of them ran.
        """
        self.step += steps + 1 if self.step else 0
        self._last = None
        self._last_lse = None

    def _make_memory(self, device: Device, blocks: int) -> bool:
        """Room to remember the scores of so many blocks; whether it is new, and so empty."""
        if self._memory.predicted.shape[1] >= blocks:
            return False
        room = 2 * max(blocks, LEAST_REMEMBERED)
        queries = self.cache.pool.group.q_heads
        # The smaller ones stay until close: work may use them, and all are less than the last.
        self._remembered.append(device.allocate(8 * queries * room))
        both = tensor_in(self._remembered[-1], "f32", (2, queries, room))
        self._memory = ScoreMemory(both.row(0), both.row(1))
        return True

    def resident(self, blocks: int) -> Resident:
        """The pinned ones of so many blocks that the cache holds, and the one being filled."""
        cache = self.cache
        return Resident(
            units=cache.pool.units,
            cache=self.cache_tables if self.step else None,
            pinned=self.pinned(blocks),
            active=cache.pool.slots.units(np.array([cache.active], np.int32)).ravel(),
            active_tokens=cache.length % cache.pool.block_size,
        )

    def enqueue_choice(
        self,
        device: Device,
        stream: Stream,
        predictor: Predictor,
        queries: Tensor,
        indices: I64,
    ) -> Choice:
        """Launch score and select for one query row ``[Q, dk]``; ``indices``: the full blocks."""
        cache = self.cache
        blocks = len(indices)
        heads = cache.pool.group.kv_heads
        scores = first_of(self._on_device["scores"], (heads, blocks))
        shares = first_of(self._on_device["shares"], (heads, blocks))
        fresh = self._make_memory(device, blocks) if predictor.remembers else True
        request = ScoreRequest(
            queries=queries,
            code_index=self._code_index(predictor, indices),
            scores=scores,
            resident=self.resident(blocks),
            memory=self._memory,
            first=fresh or self.step == 0,
            last=None if fresh else self._last_lse,
            uncorrected=shares,
        )
        device.score(stream, predictor.score_work(cache.layer, request))
        shares = shares if predictor.remembers else scores
        names = ("chosen", "chosen_slots", "missing", "left_out")
        choice = Choice(*(self._on_host[f"{name}{self._turn}"] for name in names))
        last_chosen, last_mass = self._last or (None, None)
        device.select(
            stream,
            SelectWork(
                scores=scores,
                shares=shares,
                k=self._settings.k,
                pinned=self.pinned(blocks),
                cache=self.cache_tables,
                step=self.step,
                decay=MASS_DECAY,
                last_chosen=last_chosen,
                last_mass=last_mass,
                chosen=choice.chosen,
                chosen_slots=choice.slots,
                missing=choice.missing,
                left_out=choice.left_out,
            ),
        )
        if self._settings.left_out_bound is not None:
            device.trim(
                stream,
                TrimWork(
                    scores=scores,
                    shares=shares,
                    pinned=self.pinned(blocks),
                    bound=self._settings.left_out_bound,
                    least=self._settings.least_k,
                    cache=self.cache_tables,
                    chosen=choice.chosen,
                    chosen_slots=choice.slots,
                    missing=choice.missing,
                    left_out=choice.left_out,
                ),
            )
        if self.late is not None:
            self.late.enqueue(device, stream, shares)
        self.step += 1
        return choice

    def enqueue_gather(
        self, device: Device, stream: Stream, choice: Choice, blocks: I64, host_slots: I32
    ) -> None:
        """Launch the gather of the chosen units of ``blocks`` out of their host slots."""
        chosen = choice.chosen.array()
        heads, entries = np.nonzero((choice.missing.array() != 0) & np.isin(chosen, blocks))
        pool = self.cache.pool
        order = np.argsort(blocks)
        at = order[np.searchsorted(blocks[order], chosen[heads, entries])]
        device.gather(
            stream,
            GatherWork(
                pool.blocks,
                pool.units,
                host_slots[at],
                heads.astype(np.int32),
                choice.slots.array()[heads, entries],
            ),
        )

    def enqueue_attend(
        self,
        device: Device,
        stream: Stream,
        predictor: Predictor,
        choice: Choice,
        queries: Tensor,
        state: AttentionState,
        out: Tensor,
        lse: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Launch attention over what was chosen and the block being filled, and finalize."""
        length = self.cache.length
        block_lse, mass = self._attend(device, stream, choice, queries, state, length)
        # What stands in was learned where no sink takes a share.
        left_out = None
        if self._settings.stand_in and sinks is None:
            cache = self.cache
            predicted = first_columns(self._memory.predicted, length // cache.pool.block_size)
            learned = None if cache.lessons is None else cache.lessons.learned
            left_out = predictor.left_out(cache.layer, predicted, choice.chosen, learned)
        device.finalize(stream, FinalizeWork(state, out, lse, block_lse, mass, sinks, left_out))
        self._attended(choice, block_lse, mass)

    def enqueue_lesson(
        self, device: Device, stream: Stream, choice: Choice, lesson: Lesson, state: AttentionState
    ) -> None:
        """Launch attention of a row again over what was chosen for it, and what it teaches."""
        assert self.cache.lessons is not None
        queries = lesson.queries.as_batch()
        block_lse, mass = self._attend(device, stream, choice, queries, state, lesson.length)
        self.cache.lessons.learn(device, stream, lesson, state)
        device.finalize(stream, FinalizeWork(state, lesson.out, None, block_lse, mass))
        self._attended(choice, block_lse, mass)

    def _attend(
        self,
        device: Device,
        stream: Stream,
        choice: Choice,
        queries: Tensor,
        state: AttentionState,
        length: int,
    ) -> tuple[Tensor, Tensor]:
        """Launch attention of a row that sees ``length`` tokens; where logsumexps and masses of
        blocks are and go.
        """
        cache, pool = self.cache, self.cache.pool
        full = cache.length // pool.block_size
        positions, slots = choice.chosen.array(), choice.slots.array()
        if cache.length % pool.block_size:
            active = pool.slots.units(np.array([cache.active], np.int32))
            positions = np.hstack((positions, np.full((len(positions), 1), full, np.int32)))
            slots = np.hstack((slots, active))
        entries = positions.shape[1]
        block_lse = first_of(self._on_device["block_lse"], (1, 1, queries.shape[2], entries))
        mass = first_of(self._on_device[f"block_mass{self._turn}"], (1, len(positions), entries))
        device.attend(
            stream,
            AttendWork(
                queries=queries,
                lengths=np.array([length], np.int64),
                units=pool.units,
                slots=slots[None].copy(),
                first_block=0,
                positions=positions[None].copy(),
                span_blocks=device.span_tokens(entries * pool.block_size) // pool.block_size,
                state=state,
                begin=True,
                block_lse=block_lse,
            ),
        )
        return block_lse, mass

    def _attended(self, choice: Choice, block_lse: Tensor, mass: Tensor) -> None:
        """The next step's choice learns from this one's."""
        self._last = (choice.chosen, first_columns(mass.row(0), self._most))
        self._last_lse = Attended(choice.chosen, first_columns(block_lse.row(0).row(0), self._most))
        self._turn = 1 - self._turn

    def close(self) -> I32:
        """Free the buffers; returns the device slots. No enqueued work may use them."""
        self._device_memory.close()
        self._host_memory.close()
        if self.late is not None:
            self.late.close()
        if self.cache.lessons is not None:
            self.cache.lessons.close()
        for buffer in self._remembered:
            buffer.close()
        return self.slots
