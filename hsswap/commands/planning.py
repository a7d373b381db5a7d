"""Slots, tile and k for one run of ``hsswap generate``."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from hsswap.commands.generate_args import GenerateOptions
from hsswap.commands.words import size
from hsswap.config import CUDA_SPAN_TOKENS, SPAN_TOKENS, ModelDims, PredictorConfig, SwapConfig
from hsswap.errors import ConfigError
from hsswap.topk import TopK

CACHE_SHARE = 8
"""Without numbers of slots, device and host slots together are this fraction of the cache."""

TOP_K_SHARE = 0.03
"""Share of the blocks that top-k chooses by default; and at least ``TOP_K_MIN`` blocks."""
TOP_K_MIN = 4

TILE_TOKENS = (4 * SPAN_TOKENS, 2 * SPAN_TOKENS, SPAN_TOKENS)
"""Tiles to choose from, the better first: larger ones mean fewer launches and longer reads. SmolLM2
at 2,200 tokens with 256 device and 256 host slots made 5.7, 4.8 and 2.9 tokens/s (2 cores)."""

RING_SHARE_MAX = 2
"""A tile is taken if the ring of two tiles is at most this part (a half) of the slots of a tier."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How to run: the swap's settings, and the top-k settings in mode ``topk``."""

    config: SwapConfig
    top_k: TopK | None


def make_plan(
    options: GenerateOptions,
    dims: ModelDims,
    tokens: int,
    *,
    capacity_tokens: int | None = None,
    fingerprint: str = "",
) -> Plan:
    """Slots, tile and k for a sequence of ``tokens`` tokens.

    ``capacity_tokens`` (the tokens alone, if None) and ``fingerprint`` are of the store, which must
    be opened with the same ones again. Raises ConfigError, with the number needed, when the slots
    asked for are too few.
    """
    # A sequence of its own fills the capacity: whole blocks, and nothing to spare.
    cache_blocks = dims.layers * dims.blocks_of(tokens)
    least_tile = SPAN_TOKENS if options.device == "host" else CUDA_SPAN_TOKENS
    top_k = None
    slots, host_slots = options.slots, options.host_slots
    if options.mode == "topk":
        # The proof is of attention over what was chosen.
        top_k = replace(_top_k(dims, tokens, slots, least_tile), stand_in=not options.verify)
        slots = slots or _top_k_slots(dims, top_k, least_tile)
    if slots is None:
        slots = max(_least_slots(dims, least_tile), cache_blocks // (2 * CACHE_SHARE))
    if host_slots is None:
        host_slots = max(_ring(dims, least_tile), cache_blocks // (2 * CACHE_SHARE))
    spare = slots if top_k is None else slots - dims.layers * top_k.cache_blocks(dims.block_size)
    tile_tokens = best_tile(dims, spare, host_slots, least_tile)
    tiles = f"{_ring(dims, least_tile)} for two tiles of {least_tile} tokens"
    each = f"{tiles} and 1 for each of {dims.layers} layers"
    _check(slots, _least_slots(dims, tile_tokens), "--slots", each)
    _check(host_slots, _ring(dims, tile_tokens), "--host-slots", tiles)
    least = SwapConfig(
        dims,
        capacity_tokens or tokens,
        device_slots=_least_slots(dims, tile_tokens),
        host_slots=_ring(dims, tile_tokens),
        directory=options.directory,
        device=options.device,
        io=options.io,
        tile_tokens=tile_tokens,
        look_ahead=options.look_ahead,
        predictor=None if top_k is None else PredictorConfig(metadata_ratio=1 / options.codes),
        persist=options.persist,
        fingerprint=fingerprint,
    )
    check_memory(least, slots, host_slots, physical_bytes())
    return Plan(replace(least, device_slots=slots, host_slots=host_slots), top_k)


def physical_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_memory(config: SwapConfig, slots: int, host_slots: int, memory_bytes: int) -> None:
    """Raise ConfigError, with the most that fits, when ``slots`` and ``host_slots`` with the rest
    of ``config`` exceed ``memory_bytes``.

    Slots of a GPU are not counted: what it has free shows when they are allocated.
    """
    dims = config.dims
    host_bytes = host_slots * max(dims.block_bytes(group) for group in dims.groups)
    if host_bytes > memory_bytes:
        most = host_slots * memory_bytes // host_bytes
        raise ConfigError(_too_many("--host-slots", host_slots, host_bytes, most))
    if config.device != "host":
        return
    left = memory_bytes - host_bytes - config.code_bytes
    slot_bytes = max(group.kv_heads * dims.unit_bytes(group) for group in dims.groups)
    device_bytes = slots * slot_bytes
    if device_bytes > left:
        most = max(0, left // slot_bytes)
        raise ConfigError(_too_many("--slots", slots, device_bytes, most))


def _too_many(name: str, slots: int, nbytes: int, most: int) -> str:
    return (
        f"{name} is {slots}, which takes {size(nbytes)}, and this machine has "
        f"{size(physical_bytes())} of memory; at most {most} fit"
    )


def best_tile(dims: ModelDims, slots: int, host_slots: int, least_tile: int = SPAN_TOKENS) -> int:
    """Tokens of the largest tile that leaves half of each tier to the cache, else the smallest."""
    for tile_tokens in TILE_TOKENS:
        if tile_tokens < least_tile:
            break
        ring = _ring(dims, tile_tokens)
        fits = _least_slots(dims, tile_tokens) <= slots
        if fits and ring * RING_SHARE_MAX <= min(slots, host_slots):
            return tile_tokens
    return least_tile


def _ring(dims: ModelDims, tile_tokens: int) -> int:
    """Blocks of two tiles."""
    return 2 * (tile_tokens // dims.block_size) * len(dims.groups)


def _least_slots(dims: ModelDims, tile_tokens: int) -> int:
    """Device slots that exact mode needs: the ring, and a block being filled in each layer."""
    return _ring(dims, tile_tokens) + dims.layers


def _top_k_slots(dims: ModelDims, top_k: TopK, least_tile: int) -> int:
    """Device slots that top-k mode needs; the ring is there for prefill, which is exact."""
    return _least_slots(dims, least_tile) + dims.layers * top_k.cache_blocks(dims.block_size)


def _top_k(dims: ModelDims, tokens: int, slots: int | None, least_tile: int) -> TopK:
    """The default k, or with ``slots`` the largest that fits. Raises ConfigError if none does."""
    if slots is None:
        return TopK(max(TOP_K_MIN, round(TOP_K_SHARE * dims.blocks_of(tokens))))
    smallest = TopK(1)
    need = _top_k_slots(dims, smallest, least_tile)
    if slots < need:
        pinned = smallest.pinned_blocks(dims.block_size)
        raise ConfigError(
            f"--slots is {slots}; topk needs {need} for k = 1: {_ring(dims, least_tile)} for two "
            f"tiles of {least_tile} tokens, and for each of {dims.layers} layers 1 being filled, "
            f"{pinned} always attended and {smallest.cache_factor} for each of the k best"
        )
    return TopK(1 + (slots - need) // (dims.layers * smallest.cache_factor))


def _check(value: int, need: int, name: str, purpose: str) -> None:
    if value < need:
        raise ConfigError(
            f"{name} is {value}; {need} are needed: {purpose}; give {name} {need} or more"
        )
