"""What a layer will probably choose, from an approximate query, before its own query is known.

The choice is made as the step will make it, but on copies of the cache's tables and without what
earlier steps showed, so that the step itself does not change. Only blocks with a unit that the
cache does not hold are read ahead: a prefetch by the last token's query would bring nothing that
is not there already, an approximate query of this token does (previous layer's input through this
layer's weights, as InfiniGen, arXiv 2406.19707: cosine 0.91 to the true one on a small Llama).
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from hsswap.capturing import Capturing
from hsswap.carving import carve, words_of
from hsswap.coding import code_blocks
from hsswap.driver.base import Device, Stream
from hsswap.driver.codes_operations import ScoreMemory
from hsswap.driver.operations import SelectWork, UnitCache
from hsswap.driver.round_operations import CopyWork
from hsswap.driver.tensor import Tensor, tensor_of
from hsswap.errors import HsswapError
from hsswap.forked import awaited
from hsswap.loads import Blocks
from hsswap.predictor import Predictor, ScoreRequest
from hsswap.tiers import I64
from hsswap.topk import MASS_DECAY, Choice, TopKLayer

if TYPE_CHECKING:
    from hsswap.swap_state import SwapState


class LookingAhead(Capturing):
    """The call of :class:`hsswap.Sequence` that reads ahead of a top-k step."""

    async def look_ahead(self, layer: int, queries: object, *, stream: object | None = None) -> int:
        """Begin to read what a layer's next top-k attend will probably choose.

        ``queries`` ``[1, q_heads, head_dim]``, as :meth:`attend` takes them: about what the layer
        will be asked, say its weights on the input of the layer before. Reads go to the host tier,
        in line with others; outputs do not depend on them. Call it before the layer's append or
        behind it.
        Returns how many blocks will be read; does nothing where the layer attends exactly.

        Raises what :meth:`attend` raises.
        """
        self._swap.check_loop()
        with self._exclusive("look_ahead"):
            cache = self._cache(layer)
            group = cache.pool.group
            taken = tensor_of(queries, group.dtype, (1, group.q_heads, group.head_dim), "queries")
            cache.pool.check_reachable(taken, "queries")
            raw_stream = self._swap.stream_of(stream)
            ranked = self._top_k_layers[layer] if self.top_k is not None else None
            if ranked is None or not ranked.applies():
                return 0
            full = self._indices[: cache.length // cache.pool.block_size]
            with self._ordered(raw_stream):
                await code_blocks(self._swap, raw_stream, cache, full)
                places = await _probable(self._swap, raw_stream, ranked, taken.row(0), full)
            if len(places):
                blocks = Blocks(cache.pool, layer, full[places])
                self._swap.retiring.keep(_read(self._swap, blocks, self.ids[places]))
            return len(places)


class _Glance:
    """One choice on copies of a layer's tables, and the memory it is made in."""

    def __init__(self, device: Device, ranked: TopKLayer, blocks: int) -> None:
        heads, queries = ranked.cache.pool.group.kv_heads, ranked.cache.pool.group.q_heads
        places, count = ranked.cache_tables.owner.shape[1], ranked.chosen_count
        self._memory, self.tensors = carve(
            device.allocate,
            {
                "scores": ("f32", (heads, blocks)),
                "shares": ("f32", (heads, blocks)),
                "remembered": ("f32", (2, queries, blocks)),
                "owner": ("i32", (heads, places)),
                "mass": ("f32", (heads, places)),
                "used": ("i32", (heads, places)),
            },
        )
        shape = (heads, count)
        try:
            self._host_memory, found = carve(
                device.allocate_host,
                {
                    "chosen": ("i32", shape),
                    "slots": ("i32", shape),
                    "missing": ("u8", shape),
                    "left_out": ("f32", (heads,)),
                },
            )
        except BaseException:
            self._memory.close()
            raise
        self.choice = Choice(found["chosen"], found["slots"], found["missing"], found["left_out"])

    def close(self) -> None:
        """Free the memory; nothing enqueued may use it."""
        self._memory.close()
        self._host_memory.close()


async def _probable(
    swap: SwapState, stream: Stream, ranked: TopKLayer, query: Tensor, full: I64
) -> I64:
    """Which of the full blocks would be read for one query row ``[Q, dk]``: their places."""
    found: asyncio.Future[I64] = awaited(asyncio.get_running_loop().create_future())
    with swap.lock:
        swap.check_open()
        assert swap.predictor is not None  # a sequence with top-k has one
        glance = _Glance(swap.device, ranked, len(full))
        try:
            _enqueue(swap.device, stream, swap.predictor, ranked, glance, query, full)
            event = stream.record()
        except BaseException:
            swap.free_at_close(glance)  # some of it may be under way
            raise

    def take() -> None:
        try:
            event.is_done()
            if not found.done():
                found.set_result(glance.choice.blocks_to_load())
        except HsswapError as error:
            if not found.done():
                found.set_exception(error)
        finally:  # also when nobody waits any more: the device has ended with it
            glance.close()

    event.call_when_done(lambda: swap.mailbox.post(take))
    return await found


async def _read(swap: SwapState, blocks: Blocks, ids: I64) -> None:
    """Bring blocks into the host tier, a tile at a time, where they stay as others do.

    Nothing waits for it, so the sequence may be gone, and its ids another's, before a part's turn.
    """
    step = swap.config.tile_blocks
    with suppress(HsswapError):  # an attend that needs such a block will meet it and say so
        for start in range(0, len(blocks.indices), step):
            part = replace(blocks, indices=blocks.indices[start : start + step])
            swap.check_ids(ids[start : start + step])
            loaded = await swap.prefetcher.load(part)
            with swap.lock:
                blocks.pool.tier.release(loaded.slots, scan=False)
            swap.prefetcher.pump_soon()


def _enqueue(
    device: Device,
    stream: Stream,
    predictor: Predictor,
    ranked: TopKLayer,
    glance: _Glance,
    query: Tensor,
    full: I64,
) -> None:
    """Launch score and select."""
    blocks, real, tensors = len(full), ranked.cache_tables, glance.tensors
    copy = UnitCache(real.slots, tensors["owner"], tensors["mass"], tensors["used"])
    pairs = ((real.owner, copy.owner), (real.mass, copy.mass), (real.used, copy.used))
    for source, target in pairs:
        device.copy_words(stream, CopyWork(words_of(source), words_of(target)))
    remembered, choice = tensors["remembered"], glance.choice
    index = predictor.code_index(ranked.cache.layer, full)
    predictor.hide(index, ranked.cache.first_visible(1) // ranked.cache.pool.block_size)
    request = ScoreRequest(
        queries=query,
        code_index=index,
        scores=tensors["scores"],
        resident=ranked.resident(blocks),
        memory=ScoreMemory(remembered.row(0), remembered.row(1)),
        first=True,
        last=None,
        uncorrected=tensors["shares"],
    )
    device.score(stream, predictor.score_work(ranked.cache.layer, request))
    device.select(
        stream,
        SelectWork(
            scores=tensors["scores"],
            shares=tensors["scores"],  # nobody asks what this choice leaves out
            k=ranked.settings.k,
            pinned=ranked.pinned(blocks),
            cache=copy,
            step=ranked.step,
            decay=MASS_DECAY,
            last_chosen=None,
            last_mass=None,
            chosen=choice.chosen,
            chosen_slots=choice.slots,
            missing=choice.missing,
            left_out=choice.left_out,
        ),
    )
