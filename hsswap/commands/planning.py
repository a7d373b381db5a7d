"""Slots, tile and k for one run of ``hsswap generate``."""

from __future__ import annotations

from dataclasses import dataclass

from hsswap.commands.generate_args import GenerateOptions
from hsswap.config import SPAN_TOKENS, ModelDims, SwapConfig
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


def make_plan(options: GenerateOptions, dims: ModelDims, tokens: int) -> Plan:
    """Slots, tile and k for a sequence of ``tokens`` tokens.

    Raises ConfigError, with the number needed, when the slots asked for are too few.
    """
    # A sequence of its own fills the capacity: whole blocks, and nothing to spare.
    cache_blocks = dims.layers * dims.blocks_of(tokens)
    top_k = None
    slots, host_slots = options.slots, options.host_slots
    if options.mode == "topk":
        top_k = _top_k(dims, tokens, slots)
        slots = slots or _top_k_slots(dims, top_k)
    if slots is None:
        slots = max(_least_slots(dims, SPAN_TOKENS), cache_blocks // (2 * CACHE_SHARE))
    if host_slots is None:
        host_slots = max(_ring(dims, SPAN_TOKENS), cache_blocks // (2 * CACHE_SHARE))
    spare = slots if top_k is None else slots - dims.layers * top_k.cache_blocks(dims.block_size)
    tile_tokens = best_tile(dims, spare, host_slots)
    _check(
        slots,
        _least_slots(dims, tile_tokens),
        "--slots",
        f"and one in each of {dims.layers} layers",
    )
    _check(host_slots, _ring(dims, tile_tokens), "--host-slots", "for what is read")
    config = SwapConfig(
        dims,
        tokens,
        device_slots=slots,
        host_slots=host_slots,
        directory=options.directory,
        device=options.device,
        io=options.io,
        tile_tokens=tile_tokens,
        look_ahead=options.look_ahead,
    )
    return Plan(config, top_k)


def best_tile(dims: ModelDims, slots: int, host_slots: int) -> int:
    """Tokens of the largest tile that leaves half of each tier to the cache, else the smallest."""
    for tile_tokens in TILE_TOKENS:
        ring = _ring(dims, tile_tokens)
        fits = _least_slots(dims, tile_tokens) <= slots
        if fits and ring * RING_SHARE_MAX <= min(slots, host_slots):
            return tile_tokens
    return SPAN_TOKENS


def _ring(dims: ModelDims, tile_tokens: int) -> int:
    """Blocks of two tiles."""
    return 2 * (tile_tokens // dims.block_size) * len(dims.groups)


def _least_slots(dims: ModelDims, tile_tokens: int) -> int:
    """Device slots that exact mode needs: the ring, and a block being filled in each layer."""
    return _ring(dims, tile_tokens) + dims.layers


def _top_k_slots(dims: ModelDims, top_k: TopK) -> int:
    """Device slots that top-k mode needs; the ring is there for prefill, which is exact."""
    return _least_slots(dims, SPAN_TOKENS) + dims.layers * top_k.cache_blocks(dims.block_size)


def _top_k(dims: ModelDims, tokens: int, slots: int | None) -> TopK:
    """The default k, or with ``slots`` the largest that fits. Raises ConfigError if none does."""
    if slots is None:
        return TopK(max(TOP_K_MIN, round(TOP_K_SHARE * dims.blocks_of(tokens))))
    smallest = TopK(1)
    need = _top_k_slots(dims, smallest)
    if slots < need:
        pinned = smallest.pinned_blocks(dims.block_size)
        raise ConfigError(
            f"--slots is {slots}; topk needs {need} for k = 1: two tiles of "
            f"{_ring(dims, SPAN_TOKENS) // 2} blocks, and in each of {dims.layers} layers the one "
            f"being filled, {pinned} that are always attended and {smallest.cache_factor} for each "
            "of the k best"
        )
    return TopK(1 + (slots - need) // (dims.layers * smallest.cache_factor))


def _check(value: int, need: int, name: str, purpose: str) -> None:
    if value < need:
        raise ConfigError(
            f"{name} is {value}; {need} are needed: two tiles of {SPAN_TOKENS} tokens, {purpose}; "
            f"give {name} {need} or more"
        )
