"""Attention against the float64 oracle, and bit for bit against itself in other circumstances."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from hsswap.config import LayerGroup
from hsswap.driver.operations import UnitPool
from hsswap.errors import ArgumentError
from tests.driver import oracle
from tests.driver.rig import NAN_CODE, U16, Attended, Cache, Rig, random_codes

INF_CODE = 0x7F80


@dataclass(frozen=True)
class Case:
    """A random cache and queries over it."""

    cache: Cache
    queries: U16
    lengths: list[int]

    @property
    def group(self) -> LayerGroup:
        """The layer group of the cache."""
        return self.cache.units.group

    def reference(self, s: int) -> oracle.Reference:
        """The oracle's answer for one sequence."""
        group = self.group
        heads = oracle.Heads(group.group_size, group.logit_scale, group.window, group.soft_cap)
        return oracle.attend(
            self.queries[s], self.cache.keys[s], self.cache.values[s], self.lengths[s], heads
        )


def random_case(
    rig: Rig, seed: int, *, rows: int | None = None, scale: float = 1.0, kv_dtype: str = ""
) -> Case:
    """Odd shapes: everything drawn from the seed but what is given."""
    rng = np.random.default_rng(seed)
    kv_heads = int(rng.integers(1, 5))
    group = LayerGroup(
        layers=1,
        q_heads=kv_heads * int(rng.choice([1, 2, 3, 4, 5, 7, 8, 12, 17])),
        kv_heads=kv_heads,
        head_dim=8 * int(rng.integers(1, 33)),
        value_dim=8 * int(rng.integers(1, 33)),
        window=int(rng.integers(1, 500)) if rng.random() < 0.3 else None,
        soft_cap=float(rng.uniform(1, 30)) if rng.random() < 0.3 else None,
        scale=float(rng.uniform(0.02, 0.4)) if rng.random() < 0.3 else None,
        aux_bytes=int(rng.choice([0, 0, 8 if kv_dtype else 6])),
        kv_dtype=kv_dtype,
    )
    block_size = 1 << int(rng.integers(0, 9))
    longest = 300 if block_size < 4 else 800
    lengths = rng.integers(0, longest, int(rng.integers(1, 4))).tolist()
    cache = rig.cache(rng, group, block_size, lengths, key_scale=scale)
    if rows is None:
        rows = int(rng.integers(1, 10 if group.q_heads < 20 else 4))
    queries = random_codes(rng, (len(lengths), rows, group.q_heads, group.head_dim))
    return Case(cache, queries, lengths)


def seeds(first: int, end: int) -> list[tuple[int, str]]:
    """Seeds of caches of 16 bits an element, and half as many of E4M3."""
    return [(seed, "") for seed in range(first, end)] + [
        (seed, "e4m3") for seed in range(first, end, 2)
    ]


def plain_case(rig: Rig, tokens: list[int], rows: int, **changes: int) -> Case:
    """9 query heads, 3 KV heads, blocks of 16 tokens, unless changed."""
    rng = np.random.default_rng(1)
    group = replace(LayerGroup(1, 9, 3, 32), **changes)  # type: ignore[arg-type]
    queries = random_codes(rng, (len(tokens), rows, group.q_heads, group.head_dim))
    return Case(rig.cache(rng, group, 16, tokens), queries, tokens)


def run(rig: Rig, case: Case, tile_spans: int | None = None) -> Attended:
    """Attend as the case says."""
    return rig.attend(case.cache, case.queries, case.lengths, tile_spans=tile_spans)


@pytest.mark.parametrize(("seed", "kv_dtype"), seeds(0, 48))
def test_random_shapes_keep_promise_1(rig: Rig, seed: int, kv_dtype: str) -> None:
    case = random_case(rig, seed, scale=[1.0, 1.0, 4.0, 0.0][seed % 4], kv_dtype=kv_dtype)
    got = rig.attend(case.cache, case.queries, case.lengths, block_lse=True)
    assert got.block_lse is not None
    block_size = case.cache.units.block_size
    for s in range(len(case.lengths)):
        wanted = case.reference(s)
        error = oracle.relative_error(oracle.decode(got.out[s]), wanted.exact)
        assert error <= wanted.tolerance()
        np.testing.assert_allclose(got.lse[s], wanted.lse, rtol=1e-4, atol=1e-4)
        pad = case.cache.blocks * block_size - wanted.logits.shape[2]
        logits = np.pad(wanted.logits, ((0, 0), (0, 0), (0, pad)), constant_values=-np.inf)
        by_block = logits.reshape(*logits.shape[:2], case.cache.blocks, block_size)
        top = by_block.max(-1, initial=-np.inf)
        finite = np.where(np.isfinite(top), top, 0)
        with np.errstate(divide="ignore"):
            block_lse = finite + np.log(np.exp(by_block - finite[..., None]).sum(-1))
        np.testing.assert_allclose(got.block_lse[s], block_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("seed", "kv_dtype"), seeds(100, 124))
def test_random_shapes_do_not_depend_on_tiles(rig: Rig, seed: int, kv_dtype: str) -> None:
    case = random_case(rig, seed, kv_dtype=kv_dtype)
    whole = run(rig, case)
    assert run(rig, case, tile_spans=1).bits() == whole.bits()
    assert run(rig, case, tile_spans=2).bits() == whole.bits()


@pytest.mark.parametrize(("seed", "kv_dtype"), seeds(200, 224))
def test_rows_alone_equal_rows_together(rig: Rig, seed: int, kv_dtype: str) -> None:
    """Any batch, any neighbours, any chunking: each row as if it had been alone."""
    case = random_case(rig, seed, rows=11, kv_dtype=kv_dtype)
    together = run(rig, case)
    for s, length in enumerate(case.lengths):
        only = replace(case.cache, slots=case.cache.slots[s : s + 1])
        for first, last in ((0, 1), (1, 2), (2, 7), (7, 11), (10, 11)):
            end = length - (11 - last)
            if end < 0:
                continue
            queries = case.queries[s : s + 1, first:last]
            alone = rig.attend(only, queries, [end])
            assert alone.out[0].tobytes() == together.out[s, first:last].tobytes()
            assert alone.total[0].tobytes() == together.total[s, first:last].tobytes()
            assert alone.weighted[0].tobytes() == together.weighted[s, first:last].tobytes()


@pytest.mark.parametrize(("seed", "kv_dtype"), seeds(300, 312))
def test_a_list_of_all_blocks_equals_the_contiguous_call(
    rig: Rig, seed: int, kv_dtype: str
) -> None:
    case = random_case(rig, seed, kv_dtype=kv_dtype)
    shape = case.cache.slots.shape
    positions = np.broadcast_to(np.arange(shape[2], dtype=np.int32), shape).copy()
    listed = rig.attend(case.cache, case.queries, case.lengths, positions=positions)
    assert listed.bits() == run(rig, case).bits()


def test_other_slots_give_the_same_bits(rig: Rig) -> None:
    case = plain_case(rig, [700, 431], 5)
    memory = case.cache.units.memory.array()
    order = np.random.default_rng(2).permutation(len(memory)).astype(np.int32)
    moved = np.empty_like(memory)
    moved[order] = memory
    slots = case.cache.slots
    elsewhere = Cache(
        case.cache.keys,
        case.cache.values,
        UnitPool(rig.tensor(moved), case.group, 16),
        np.where(slots < 0, np.int32(-1), order[slots]),
    )
    assert run(rig, replace(case, cache=elsewhere)).bits() == run(rig, case).bits()


def test_long_prefill_equals_decode(rig: Rig) -> None:
    """Rows enough for several row tiles at a time, over spans that only later ones see."""
    case = plain_case(rig, [1100], 900, layers=1, q_heads=4, kv_heads=2, head_dim=8, value_dim=8)
    together = run(rig, case)
    for row in (0, 1, 55, 56, 57, 255, 256, 640, 899):
        alone = rig.attend(case.cache, case.queries[:, row : row + 1], [1100 - 899 + row])
        assert alone.out[0, 0].tobytes() == together.out[0, row].tobytes()
        assert alone.weighted[0, 0].tobytes() == together.weighted[0, row].tobytes()
    wanted = case.reference(0)
    error = oracle.relative_error(oracle.decode(together.out[0]), wanted.exact)
    assert error <= wanted.tolerance()


@pytest.mark.parametrize("window", [1, 5, 256, 300])
def test_windows_in_tiles(rig: Rig, window: int) -> None:
    case = plain_case(rig, [900, 20], 7, window=window)
    got = run(rig, case, tile_spans=1)
    for s in range(2):
        wanted = case.reference(s)
        error = oracle.relative_error(oracle.decode(got.out[s]), wanted.exact)
        assert error <= wanted.tolerance()
    assert got.bits() == run(rig, case).bits()


@pytest.mark.parametrize("poison", [NAN_CODE, INF_CODE, INF_CODE | 0x8000])
@pytest.mark.parametrize("rows", [1, 4])
def test_tokens_that_only_later_rows_see_change_nothing(rig: Rig, rows: int, poison: int) -> None:
    """The last token's K and V are not finite; rows before it do not see it."""
    case = plain_case(rig, [300], rows + 1)
    good = run(rig, case)
    slot = case.cache.slots[0, :, 299 // 16]
    units = case.cache.units.memory.array().view(np.uint16)
    keys, values = 16 * 32, 16 * 32
    token = 299 % 16
    units[slot, token * 32 : (token + 1) * 32] = poison
    units[slot, keys + token * 32 : min(keys + (token + 1) * 32, keys + values)] = poison
    bad = run(rig, case)
    assert bad.out[0, :-1].tobytes() == good.out[0, :-1].tobytes()
    assert bad.weighted[0, :-1].tobytes() == good.weighted[0, :-1].tobytes()
    assert np.isnan(oracle.decode(bad.out[0, -1])).any()


def test_values_without_weight_may_be_infinite_only_unseen(rig: Rig) -> None:
    """A token that a row does see passes its NaN on: the cache holds it, so the answer is NaN."""
    case = plain_case(rig, [40], 1)
    units = case.cache.units.memory.array().view(np.uint16)
    units[case.cache.slots[0, 1, 0], 16 * 32 :] = NAN_CODE
    out = oracle.decode(run(rig, case).out[0, 0])
    assert np.isnan(out[3:6]).all()
    assert np.isfinite(out[[0, 1, 2, 6, 7, 8]]).all()


@pytest.mark.parametrize("key_scale", [1e-30, 100.0, 1e4, 1e30])
def test_extreme_logits(rig: Rig, key_scale: float) -> None:
    rng = np.random.default_rng(5)
    group = LayerGroup(1, 6, 2, 64)
    cache = rig.cache(rng, group, 16, [500], key_scale=key_scale)
    case = Case(cache, random_codes(rng, (1, 2, 6, 64)), [500])
    wanted = case.reference(0)
    got = run(rig, case)
    error = oracle.relative_error(oracle.decode(got.out[0]), wanted.exact)
    assert error <= wanted.tolerance()


def test_no_tokens_and_rows_before_the_first(rig: Rig) -> None:
    case = plain_case(rig, [0, 2], 5)
    got = run(rig, case)
    assert not got.out[0].any()
    assert not got.out[1, :3].any()
    assert got.out[1, 3:].all(axis=-1).any()
    assert np.all(got.lse[0] == -np.inf)
    assert np.all(got.maximum[0] == -np.inf)
    assert not got.total[0].any()


def test_no_blocks_at_all(rig: Rig) -> None:
    case = plain_case(rig, [0], 2)
    assert case.cache.blocks == 0
    got = rig.attend(case.cache, case.queries, [0], block_lse=True)
    assert not got.out.any()
    assert got.block_lse is not None
    assert got.block_lse.shape == (1, 2, 9, 0)


def test_no_sequences_and_no_rows(rig: Rig) -> None:
    case = plain_case(rig, [40], 2)
    assert rig.attend(case.cache, case.queries[:, :0], [40]).out.shape == (1, 0, 9, 32)
    none = replace(case.cache, slots=case.cache.slots[:0])
    assert rig.attend(none, case.queries[:0], []).out.shape == (0, 2, 9, 32)


def test_skipped_entries_get_no_weight(rig: Rig) -> None:
    """A list with holes equals the shorter cache that it names, up to rounding."""
    case = plain_case(rig, [320], 1)
    slots, positions = case.cache.slots.copy(), np.zeros((1, 3, 20), np.int32)
    positions[...] = np.arange(20)
    slots[0, :, 3:9] = -1
    got = rig.attend(
        case.cache, case.queries, [320], slots=slots, positions=positions, block_lse=True
    )
    assert got.block_lse is not None
    assert np.all(got.block_lse[..., 3:9] == -np.inf)
    kept = np.r_[0:48, 144:320]
    wanted = oracle.attend(
        case.queries[0],
        case.cache.keys[0][kept],
        case.cache.values[0][kept],
        len(kept),
        oracle.Heads(3, 32**-0.5),
    )
    error = oracle.relative_error(oracle.decode(got.out[0]), wanted.exact)
    assert error <= wanted.tolerance()


def test_each_head_has_a_list_of_its_own(rig: Rig) -> None:
    case = plain_case(rig, [600], 1)
    rng = np.random.default_rng(3)
    positions = np.stack([np.sort(rng.permutation(38)[:7]) for _ in range(3)]).astype(np.int32)
    slots = np.take_along_axis(case.cache.slots[0], positions, axis=1)
    got = rig.attend(
        case.cache, case.queries, [600], slots=slots[None], positions=positions[None].copy()
    )
    for h in range(3):
        kept = np.concatenate([np.arange(p * 16, min(600, p * 16 + 16)) for p in positions[h]])
        wanted = oracle.attend(
            case.queries[0][:, 3 * h : 3 * h + 3],
            case.cache.keys[0][kept, h : h + 1],
            case.cache.values[0][kept, h : h + 1],
            len(kept),
            oracle.Heads(3, 32**-0.5),
        )
        error = oracle.relative_error(oracle.decode(got.out[0][:, 3 * h : 3 * h + 3]), wanted.exact)
        assert error <= wanted.tolerance()


def test_a_tile_of_which_nothing_is_seen_changes_no_bit(rig: Rig) -> None:
    case = plain_case(rig, [500, 500], 6)
    beyond = np.concatenate([case.cache.slots] * 3, axis=2)[:, :, :96]
    padded = rig.attend(case.cache, case.queries, [500, 500], slots=beyond, tile_spans=1)
    assert padded.bits() == run(rig, case).bits()


def test_span_size_is_what_the_caller_says(rig: Rig) -> None:
    """Twice the span is another partition: equally exact, and again free of tiles."""
    case = plain_case(rig, [1500], 2)
    whole = rig.attend(case.cache, case.queries, [1500], span_blocks=32)
    tiled = rig.attend(case.cache, case.queries, [1500], span_blocks=32, tile_spans=1)
    assert tiled.bits() == whole.bits()
    wanted = case.reference(0)
    error = oracle.relative_error(oracle.decode(whole.out[0]), wanted.exact)
    assert error <= wanted.tolerance()


def test_negative_zero_weighted_sums_do_not_break_equality(rig: Rig) -> None:
    """Signs of zero are bits, too: -0.0 plus the nothing of a later span must stay what it was.

    The first span's sum is tiny and negative and underflows when the second span's far larger
    maximum comes; the second one's V is -0.0, and its last product underflows. Row 3 sees the two
    spans, rows before it a part, and rows behind it the third.
    """
    case = plain_case(rig, [516], 8)
    units = case.cache.units.memory.array().view(np.uint16)
    slots, keys = case.cache.slots[0], 16 * 32
    case.queries[...] = 0x4000  # 2
    units[slots[:, :16], keys:] = 0x8001  # the smallest negative BF16 number
    units[slots[:, 16:32], :keys] = 0x4000
    units[slots[:, 16:32], keys:] = 0x8000  # -0.0
    units[slots[:, 31], keys - 32 : keys] = 0xC000  # -2
    units[slots[:, 31], -32:] = 0x8001
    together = run(rig, case)
    for row in range(8):
        alone = rig.attend(case.cache, case.queries[:, row : row + 1], [509 + row], tile_spans=1)
        assert alone.weighted[0, 0].tobytes() == together.weighted[0, row].tobytes()
        assert alone.out[0, 0].tobytes() == together.out[0, row].tobytes()


def test_bad_arguments_are_refused(rig: Rig) -> None:
    case = plain_case(rig, [300], 1)
    with pytest.raises(ArgumentError, match="slots holds"):
        rig.attend(case.cache, case.queries, [300], slots=case.cache.slots + np.int32(1000))
    with pytest.raises(ArgumentError, match="multiple of 256"):
        rig.attend(case.cache, case.queries, [300], span_blocks=3)
    with pytest.raises(ArgumentError, match="negative"):
        rig.attend(case.cache, case.queries, [-1])
    with pytest.raises(ArgumentError, match="heads"):
        rig.attend(case.cache, case.queries[:, :, :8], [300])
    with pytest.raises(ArgumentError, match="int32"):
        rig.attend(case.cache, case.queries, [300], slots=case.cache.slots.astype(np.int64))
    with pytest.raises(ArgumentError, match="queries has shape"):
        rig.attend(case.cache, case.queries[..., :8], [300])


@pytest.mark.parametrize("length", [0, 1, 1024, 1025, 1 << 20])
def test_span_tokens(rig: Rig, length: int) -> None:
    span = rig.device.span_tokens(length)
    assert span % 256 == 0
    assert span == rig.device.span_tokens(-(-length // 1024) * 1024)
