"""Which kernels a swap can launch on a GPU, and with what constants. Pure.

Launch code asks the same functions for its constants, so that what is compiled here is what is
launched later; ``tests/driver/test_cuda_prepare.py`` compares the two without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

from hsswap.config import LayerGroup
from hsswap.driver.cuda_attention import span_tokens, tile_constants, wide_takes
from hsswap.driver.cuda_attention_decode import (
    FEW_SPANS,
    UNITS_A_LEAF,
    Extras,
    decode_plans,
    decode_takes,
)
from hsswap.driver.cuda_attention_e4m3 import e4m3_constants, e4m3_takes
from hsswap.driver.cuda_attention_params import (
    LEAF_TOKENS,
    Shape,
    dim_constants,
    span_constants,
    unit_bytes_of,
)
from hsswap.driver.cuda_codes import is_tiled
from hsswap.driver.cuda_operations import BY_2, BY_16, chunk_of
from hsswap.driver.cuda_seam import Chip, format_constants, unit_constants
from hsswap.driver.cuda_top_k import FEW_SHAPES, code_chunk, fits_tiles
from hsswap.driver.preparing import PrepareWork
from hsswap.predictor_config import PredictorConfig
from hsswap.ptx import Constants

Launchable = tuple[str, Constants]

_MOST_CLUSTERED = 16 * UNITS_A_LEAF  # leaves of a list up to which each number has its own plan


def kernels_of(chip: Chip, work: PrepareWork) -> list[Launchable]:
    """Every kernel that can be launched, each once."""
    found: dict[tuple[str, frozenset[tuple[str, int | str]]], Launchable] = {}
    for kernel, constants in _all_of(chip, work):
        found.setdefault((kernel, frozenset(constants.items())), (kernel, constants))
    return list(found.values())


def _all_of(chip: Chip, work: PrepareWork) -> Iterator[Launchable]:
    yield "copy_words", {}
    yield "checksum", {}
    for group in work.groups:
        kinds = [BY_16, BY_2]  # by where an engine's rows lie
        of_e4m3 = "_e4m3" if group.is_e4m3 else ""
        for kind in [format_constants(group.dtype)] if group.is_e4m3 else kinds:
            yield f"append{of_e4m3}", kind
            yield f"append_at{of_e4m3}", kind
        chunk = chunk_of(unit_bytes_of(group, work.block_size))
        yield "gather", chunk
        yield "scatter", chunk
        yield from _attention(chip, group, work)
        if work.predictor is not None:
            most = -(-work.most_tokens // work.block_size)
            yield from _choosing(most)
            yield from _top_k(group, work.block_size, chunk, work.predictor)


def _choosing(most_blocks: int) -> Iterator[Launchable]:
    yield "select", {}  # also of few blocks, where very many are chosen
    yield "trim", {}
    for threads, keys in FEW_SHAPES:
        yield "select_few", {"THREADS": threads, "KEYS": keys}
        if most_blocks <= threads * keys:
            break


def _top_k(
    group: LayerGroup, block_size: int, chunk: Constants, predictor: PredictorConfig
) -> Iterator[Launchable]:
    by_format, by_unit = format_constants(group.dtype), unit_constants(group)
    yield "fetch", chunk
    yield "block_logsumexp", span_constants(group, block_size)
    yield "block_masses", by_format
    if predictor.kind == "codes":
        yield "codes_encode", {**chunk, **by_unit}
        kernel = "codes_mass" if is_tiled(block_size) else "codes_mass_any"
        yield kernel, {**chunk, **by_unit}
        yield "codes_rank", {}
        yield "make_up", by_format
        yield "append", BY_16  # what a swap keeps of exact attention, and shows calibration
        yield "append", BY_2
        yield "learn", by_format
        return
    codes = code_chunk(predictor.rank)
    yield "encode", {**chunk, **by_unit}
    if codes["CHUNK"] == 8 and fits_tiles(group, block_size, predictor.rank):
        yield "score_tiled", {"RANK": predictor.rank, "DIM": group.head_dim}
        return
    yield "project", {**codes, **by_format}
    yield "score", codes


def _attention(chip: Chip, group: LayerGroup, work: PrepareWork) -> Iterator[Launchable]:
    size = work.block_size
    is_wide = unit_bytes_of(group, size) % (8 if group.is_e4m3 else 16) == 0
    yield "attend_tile", tile_constants(chip, group, size, is_wide)
    yield "finalize", format_constants(group.dtype)
    if work.most_tokens > span_tokens(work.most_tokens):
        yield "merge_spans", span_constants(group, size)
    if is_wide and wide_takes(chip, group, size):
        yield "attend_wide", span_constants(group, size)
    if e4m3_takes(chip, group, size):
        leaves_a_span = span_tokens(work.most_tokens) // LEAF_TOKENS
        yield "attend_decode_e4m3", e4m3_constants(group, size, leaves_a_span)
        yield "merge_decode", dim_constants(group, size)
    if is_wide and decode_takes(chip, group, size):
        dims = dim_constants(group, size)
        for shape in _shapes(chip, group, work):
            for extras in _extras(group, work, shape):
                for plan in decode_plans(chip, group, shape, extras):
                    yield "attend_decode", dims | plan.constants()
                    if not plan.cluster:
                        yield "merge_decode", dims


def _extras(group: LayerGroup, work: PrepareWork, shape: Shape) -> Iterator[Extras]:
    yield Extras.NONE
    if work.predictor is not None:
        yield Extras.BLOCK_LSE
        if shape.sequences == 1 and not group.aux_bytes:
            yield Extras.FETCH


def _shapes(chip: Chip, group: LayerGroup, work: PrepareWork) -> Iterator[Shape]:
    """A call of one row for each size of which the plan may be another."""
    size = work.block_size
    span = span_tokens(work.most_tokens)
    most = -(-work.most_tokens // LEAF_TOKENS)
    # Beyond these more spans, or more sequences, change nothing.
    spans = min(-(-work.most_tokens // span), max(FEW_SPANS, chip.sm_count) + 1)
    sequences = min(work.most_sequences, -(-chip.sm_count // group.kv_heads) + 1)
    leaves = {*range(1, min(most, _MOST_CLUSTERED) + 1)}
    leaves |= {min(most, count * span // LEAF_TOKENS) for count in range(1, spans + 1)}
    for together in range(1, sequences + 1):
        for count in sorted(leaves):
            entries = -(-count * LEAF_TOKENS // size)
            yield Shape.of_sizes(group, size, span // size, (together, 1, entries))
