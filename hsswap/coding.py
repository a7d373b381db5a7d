"""Encoding full blocks that have no code: out of host slots, read from disk where they must be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hsswap.driver.base import Stream
from hsswap.exact import LayerCache
from hsswap.loads import Blocks
from hsswap.tiers import I32, I64

if TYPE_CHECKING:
    from hsswap.swap_state import SwapState
    from hsswap.topk import TopKLayer


def enqueue_codes(swap: SwapState, stream: Stream, blocks: Blocks, host_slots: I32) -> None:
    """Launch the encoding of full blocks out of host slots ``[n]``, if there is a basis.

    Under the lock.
    """
    predictor, layer, indices = swap.predictor, blocks.layer, blocks.indices
    if predictor is None or not predictor.ready or not len(indices):
        return
    work = predictor.encode_work(layer, blocks.pool.blocks, host_slots, indices)
    swap.device.encode(stream, work)
    predictor.mark(layer, indices)


async def code_blocks(
    swap: SwapState,
    stream: Stream,
    cache: LayerCache,
    indices: I64,
    *,
    layer: TopKLayer | None = None,
    scan: bool = False,
) -> None:
    """Have codes of full blocks of block indices ``[n]``, if there is a basis or can be one.

    ``layer``: who knows of how many of the first that they have one. The caller keeps the order of
    the sequence's work on ``stream``. Raises BlockIOError for a block that cannot be read.
    """
    assert swap.predictor is not None  # a sequence with top-k has one
    if swap.calibration is not None:
        await swap.calibration.basis()
    with swap.lock:
        start = 0 if layer is None else min(layer.coded(swap.predictor), len(indices))
        places = start + swap.predictor.missing(cache.layer, indices[start:])
    step = swap.config.tile_blocks
    for start in range(0, len(places), step):
        part = indices[places[start : start + step]]
        blocks = Blocks(cache.pool, cache.layer, part)
        loaded = await swap.prefetcher.load(blocks)
        with swap.lock:
            try:
                swap.check_open()
                enqueue_codes(swap, stream, blocks, loaded.slots)
                encoded = stream.record()
            except BaseException:
                swap.release_now(cache.pool, loaded.slots)
                raise
            swap.release_after(encoded, cache.pool, loaded.slots, scan=scan)
