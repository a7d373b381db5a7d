"""The kernels of common dims against each other and the oracle: same bits whatever kernel runs.

A call of one row of d 64 or 128, blocks of 16 and a group of up to 8 runs attend_decode, in one of
three ways by its size; several rows run attend_tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from hsswap.config import LayerGroup
from hsswap.driver import open_device
from tests.driver import oracle
from tests.driver.rig import Cache, Rig, random_codes

pytestmark = pytest.mark.gpu

GROUPS = {
    "llama": LayerGroup(1, 32, 8, 128),
    "smol": LayerGroup(1, 9, 3, 64),
    "wide": LayerGroup(1, 8, 1, 128),
    "one": LayerGroup(1, 2, 2, 64),
    "window": LayerGroup(1, 8, 2, 128, window=700),
    "scale": LayerGroup(1, 8, 2, 128, scale=0.9),
    "aux": LayerGroup(1, 4, 2, 64, aux_bytes=16),
    "e4m3": LayerGroup(1, 8, 2, 128, kv_dtype="e4m3"),
    "e4m3 64": LayerGroup(1, 9, 3, 64, kv_dtype="e4m3", window=700),
}
SPAN_BLOCKS = 64


@pytest.fixture
def rig() -> Iterator[Rig]:
    """Memory and a stream on the GPU."""
    with open_device("cuda:0") as device, Rig(device) as opened:
        yield opened


def make(
    rig: Rig, group: LayerGroup, lengths: list[int], rows: int, seed: int = 1
) -> tuple[Cache, np.ndarray]:
    """A random cache and queries over it."""
    rng = np.random.default_rng(seed)
    cache = rig.cache(rng, group, 16, lengths)
    return cache, random_codes(rng, (len(lengths), rows, group.q_heads, group.head_dim))


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("length", [1, 5, 17, 127, 128, 130, 1000, 1025, 2050, 5003])
def test_a_row_alone_equals_the_row_among_others(rig: Rig, name: str, length: int) -> None:
    """Decode against tiles, and across a boundary of 1,024 tokens."""
    group = GROUPS[name]
    cache, queries = make(rig, group, [length], 3)
    together = rig.attend(cache, queries, [length], span_blocks=SPAN_BLOCKS)
    for row in range(3):
        end = length - 2 + row
        if end < 0:
            continue
        alone = rig.attend(cache, queries[:, row : row + 1], [end], span_blocks=SPAN_BLOCKS)
        assert alone.out[0, 0].tobytes() == together.out[0, row].tobytes()
        assert alone.weighted[0, 0].tobytes() == together.weighted[0, row].tobytes()
        assert alone.total[0, 0].tobytes() == together.total[0, row].tobytes()
        assert alone.maximum[0, 0].tobytes() == together.maximum[0, row].tobytes()


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("key_scale", [1.0, 6.0, 1e3, 1e30])
def test_decode_is_exact(rig: Rig, name: str, key_scale: float) -> None:
    group = GROUPS[name]
    rng = np.random.default_rng(2)
    lengths = [1003, 37, 512, 0]
    cache = rig.cache(rng, group, 16, lengths, key_scale=key_scale)
    queries = random_codes(rng, (4, 1, group.q_heads, group.head_dim))
    got = rig.attend(cache, queries, lengths, span_blocks=SPAN_BLOCKS)
    heads = oracle.Heads(group.group_size, group.logit_scale, group.window)
    for s, length in enumerate(lengths):
        wanted = oracle.attend(queries[s], cache.keys[s], cache.values[s], length, heads)
        error = oracle.relative_error(oracle.decode(got.out[s]), wanted.exact)
        assert error <= wanted.tolerance()
        np.testing.assert_allclose(got.lse[s], wanted.lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "smol", "window", "e4m3", "e4m3 64"])
def test_batches_tiles_and_lists_change_no_bit(rig: Rig, name: str) -> None:
    """Ragged sequences together (whole spans a warp) and alone (spans or leaves shared out)."""
    group = GROUPS[name]
    lengths = [9100, 1, 1024, 8191, 0, 4097] * (2 if group.kv_heads > 4 else 4)
    cache, queries = make(rig, group, lengths, 1)
    together = rig.attend(cache, queries, lengths, span_blocks=SPAN_BLOCKS)
    for tile_spans in (1, 2, 5):
        tiled = rig.attend(cache, queries, lengths, span_blocks=SPAN_BLOCKS, tile_spans=tile_spans)
        assert tiled.bits() == together.bits()
    shape = cache.slots.shape
    positions = np.broadcast_to(np.arange(shape[2], dtype=np.int32), shape).copy()
    listed = rig.attend(cache, queries, lengths, span_blocks=SPAN_BLOCKS, positions=positions)
    assert listed.bits() == together.bits()
    for s, length in enumerate(lengths[:6]):
        blocks = -(-length // 16)
        only = replace(cache, slots=np.ascontiguousarray(cache.slots[s : s + 1, :, :blocks]))
        alone = rig.attend(only, queries[s : s + 1], [length], span_blocks=SPAN_BLOCKS)
        assert alone.out[0].tobytes() == together.out[s].tobytes()
        assert alone.weighted[0].tobytes() == together.weighted[s].tobytes()


@pytest.mark.parametrize("missing", range(1, 16))
@pytest.mark.parametrize("name", ["llama", "smol", "window", "e4m3 64"])
def test_a_leaf_that_misses_a_few_tokens(rig: Rig, name: str, missing: int) -> None:
    """There some lanes of a warp see all their tokens and others do not: their steps stay one's.

    One length for each way to share leaves out; with a window, a leaf that misses its first tokens.
    """
    group = GROUPS[name]
    ends = [128, 2048, 8192, 32768] if missing < 9 else [128]
    lengths = [[end - missing] for end in ends] + [[1024 - missing] * 70]
    lengths += [[700 + 128 + missing], [700 + 8192 + missing]] if group.window else []
    for each in lengths:
        cache, queries = make(rig, group, each, 2)
        together = rig.attend(cache, queries, each, span_blocks=SPAN_BLOCKS)
        alone = rig.attend(cache, queries[:, 1:], each, span_blocks=SPAN_BLOCKS)
        assert alone.out[:, 0].tobytes() == together.out[:, 1].tobytes()
        assert alone.weighted[:, 0].tobytes() == together.weighted[:, 1].tobytes()
        assert alone.total[:, 0].tobytes() == together.total[:, 1].tobytes()


@pytest.mark.parametrize("span_blocks", [16, 32, 64, 128])
def test_spans_of_any_size(rig: Rig, span_blocks: int) -> None:
    group = GROUPS["llama"]
    cache, queries = make(rig, group, [3000], 2)
    together = rig.attend(cache, queries, [3000], span_blocks=span_blocks)
    alone = rig.attend(cache, queries[:, 1:], [3000], span_blocks=span_blocks, tile_spans=1)
    assert alone.weighted[0, 0].tobytes() == together.weighted[0, 1].tobytes()


@pytest.mark.parametrize(("name", "length"), [("llama", 4200), ("llama", 2048), ("smol", 2500)])
def test_long_prefill_equals_decode(rig: Rig, name: str, length: int) -> None:
    """Whole spans by attend_wide where the dims allow it, the rest by attend_tile."""
    group = GROUPS[name]
    cache, queries = make(rig, group, [length], 1500)
    together = rig.attend(cache, queries, [length], span_blocks=SPAN_BLOCKS)
    again = rig.attend(cache, queries, [length], span_blocks=SPAN_BLOCKS, tile_spans=1)
    assert again.bits() == together.bits()
    for row in (0, 1, 23, 24, 127, 128, 475, 476, 700, 1499):
        end = length - 1499 + row
        alone = rig.attend(cache, queries[:, row : row + 1], [end], span_blocks=SPAN_BLOCKS)
        assert alone.out[0, 0].tobytes() == together.out[0, row].tobytes()
        assert alone.weighted[0, 0].tobytes() == together.weighted[0, row].tobytes()
    picked = [0, 700, 1499]
    heads = oracle.Heads(group.group_size, group.logit_scale)
    for row in picked:
        end = length - 1499 + row
        wanted = oracle.attend(
            queries[0, row : row + 1], cache.keys[0], cache.values[0], end, heads
        )
        error = oracle.relative_error(oracle.decode(together.out[0, row : row + 1]), wanted.exact)
        assert error <= wanted.tolerance()


def test_a_ragged_prefill_of_two_sequences(rig: Rig) -> None:
    group = GROUPS["llama"]
    cache, queries = make(rig, group, [3100, 1200], 100)
    together = rig.attend(cache, queries, [3100, 1200], span_blocks=SPAN_BLOCKS)
    for s, length in enumerate([3100, 1200]):
        only = replace(cache, slots=cache.slots[s : s + 1, :, : -(-length // 16)].copy())
        for row in (0, 50, 99):
            alone = rig.attend(
                only,
                queries[s : s + 1, row : row + 1],
                [length - 99 + row],
                span_blocks=SPAN_BLOCKS,
            )
            assert alone.out[0, 0].tobytes() == together.out[s, row].tobytes()


@pytest.mark.parametrize(("length", "back"), [(2500, 5), (1030, 9), (1024, 1), (300, 299)])
def test_infinite_values_reach_only_rows_that_see_them(rig: Rig, length: int, back: int) -> None:
    """0 times infinity is NaN: attend_wide leaves such leaves to attend_tile."""
    group = LayerGroup(1, 8, 2, 128)
    cache, queries = make(rig, group, [length], 300)
    token = length - back
    units = cache.units.memory.array().view(np.uint16)
    for head in range(2):
        units[cache.slots[0, head, token // 16], (16 + token % 16) * 128 + 3] = 0x7F80
    together = rig.attend(cache, queries, [length], span_blocks=SPAN_BLOCKS)
    first = token - (length - 300)  # the first row that sees it
    assert np.isfinite(oracle.decode(together.out[0, :first])).all()
    for row in {0, max(0, first - 1), first, 150, 299}:
        end = length - 299 + row
        alone = rig.attend(cache, queries[:, row : row + 1], [end], span_blocks=SPAN_BLOCKS)
        assert alone.out[0, 0].tobytes() == together.out[0, row].tobytes()


@pytest.mark.parametrize(("length", "rows"), [(100, 100), (40, 40), (1023, 200), (1025, 64)])
def test_short_prompts_equal_decode(rig: Rig, length: int, rows: int) -> None:
    group = GROUPS["llama"]
    cache, queries = make(rig, group, [length], rows)
    together = rig.attend(cache, queries, [length], span_blocks=SPAN_BLOCKS)
    for row in {0, rows // 3, rows - 2, rows - 1}:
        end = length - rows + 1 + row
        alone = rig.attend(cache, queries[:, row : row + 1], [end], span_blocks=SPAN_BLOCKS)
        assert alone.out[0, 0].tobytes() == together.out[0, row].tobytes()
        assert alone.weighted[0, 0].tobytes() == together.weighted[0, row].tobytes()


@pytest.mark.parametrize("rows", [1, 100])
def test_the_end_in_the_same_launch_changes_no_bit(rig: Rig, rows: int) -> None:
    """Whichever kernel writes the output."""
    group = GROUPS["llama"]
    for length in (100, 1500, 9000, 30000):
        cache, queries = make(rig, group, [length], rows)
        sinks = np.linspace(-3, 3, 32).astype(np.float32)
        wanted = rig.attend(cache, queries, [length], span_blocks=SPAN_BLOCKS, sinks=sinks)
        fused = rig.attend(
            cache, queries, [length], span_blocks=SPAN_BLOCKS, sinks=sinks, fused=True
        )
        assert fused.out.tobytes() == wanted.out.tobytes()
        assert fused.lse.tobytes() == wanted.lse.tobytes()


def block_logsumexps(wanted: oracle.Reference, blocks: int) -> np.ndarray:
    """Of logits ``[R, Q, tokens]``, in float64; -inf where nothing of a block is seen."""
    rows, heads, tokens = wanted.logits.shape
    logits = np.full((rows, heads, 16 * blocks), -np.inf)
    logits[..., :tokens] = wanted.logits
    by_block = logits.reshape(rows, heads, blocks, 16)
    top = by_block.max(-1)
    base = np.where(np.isfinite(top), top, 0)
    with np.errstate(divide="ignore"):
        lse: np.ndarray = base + np.log(np.exp(by_block - base[..., None]).sum(-1))
    return lse


@pytest.mark.parametrize("tokens", [100, 200, 500, 900, 1300, 2300, 4200, 8000, 9100])
@pytest.mark.parametrize("name", ["llama", "smol", "wide", "window"])
def test_logsumexps_of_blocks_by_every_kernel(rig: Rig, name: str, tokens: int) -> None:
    """Each way to share a list out, whole spans a warp, and tiles; outputs do not change by it."""
    group = GROUPS[name]
    many = -(-132 // group.kv_heads) if tokens < 2000 else 2
    lengths = [tokens - 3, 33] + [17] * (many - 2)
    cache, queries = make(rig, group, lengths, 2)
    last = np.ascontiguousarray(queries[:, 1:])
    alone = replace(cache, slots=np.ascontiguousarray(cache.slots[:1]))
    heads = oracle.Heads(group.group_size, group.logit_scale, group.window)
    blocks = cache.slots.shape[2]
    one = rig.attend(alone, last[:1], lengths[:1], span_blocks=SPAN_BLOCKS, block_lse=True)
    together = rig.attend(cache, last, lengths, span_blocks=SPAN_BLOCKS, block_lse=True)
    tiles = rig.attend(cache, queries, lengths, span_blocks=SPAN_BLOCKS, block_lse=True)
    assert one.block_lse is not None
    assert together.block_lse is not None
    assert tiles.block_lse is not None
    assert one.block_lse[0].tobytes() == together.block_lse[0].tobytes()
    for s in range(2):
        keys, values = cache.keys[s], cache.values[s]
        exact = oracle.attend(queries[s], keys, values, lengths[s], heads)
        wanted = block_logsumexps(exact, blocks)
        for got in (together.block_lse[s, 0], tiles.block_lse[s, 1]):
            np.testing.assert_allclose(got, wanted[1], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(tiles.block_lse[s, 0], wanted[0], rtol=1e-5, atol=1e-5)
    for got, which, asked, ends in (
        (one, alone, last[:1], lengths[:1]),
        (together, cache, last, lengths),
    ):
        without = rig.attend(which, asked, ends, span_blocks=SPAN_BLOCKS)
        assert without.bits() == got.bits()
