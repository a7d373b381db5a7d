"""FP16: K, V, queries and outputs in that format, on every device, with its finer rounding."""

from __future__ import annotations

import numpy as np
import pytest

from hsswap.config import LayerGroup
from hsswap.driver.operations import (
    AppendWork,
    AttentionState,
    EncodeWork,
    FinalizeWork,
    ProjectionCodes,
    ScoreWork,
)
from hsswap.errors import ArgumentError
from tests.driver import oracle
from tests.driver.rig import Rig, random_codes

GROUPS = [
    LayerGroup(1, 6, 2, 16, dtype="f16"),
    LayerGroup(1, 4, 4, 24, 40, dtype="f16", soft_cap=5.0),
    LayerGroup(1, 9, 3, 64, dtype="f16", window=300),
    LayerGroup(1, 8, 2, 128, dtype="f16"),
    LayerGroup(1, 17, 1, 72, dtype="f16", aux_bytes=4),
]


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("rows", [1, 4, 70])
def test_f16_keeps_promise_1(rig: Rig, group: LayerGroup, rows: int) -> None:
    rng = np.random.default_rng(8)
    lengths = [1300, 77]
    cache = rig.cache(rng, group, 16, lengths)
    queries = random_codes(rng, (2, rows, group.q_heads, group.head_dim), 1.0, "f16")
    got = rig.attend(cache, queries, lengths, span_blocks=64)
    assert got.out.dtype == np.float16
    heads = oracle.Heads(group.group_size, group.logit_scale, group.window, group.soft_cap)
    for s, length in enumerate(lengths):
        wanted = oracle.attend(queries[s], cache.keys[s], cache.values[s], length, heads)
        assert wanted.floor == 2.0**-12
        error = oracle.relative_error(oracle.decode(got.out[s]), wanted.exact)
        assert error <= wanted.tolerance()
    tiled = rig.attend(cache, queries, lengths, span_blocks=64, tile_spans=1)
    assert tiled.bits() == got.bits()
    alone = rig.attend(cache, queries[:, -1:], lengths, span_blocks=64)
    assert alone.out[:, 0].tobytes() == got.out[:, -1].tobytes()


def test_outputs_beyond_f16_are_infinite_and_small_ones_are_kept(rig: Rig) -> None:
    group = GROUPS[0]
    state = AttentionState(
        rig.tensor(np.zeros((1, 1, 6), np.float32)),
        rig.tensor(np.ones((1, 1, 6), np.float32)),
        rig.tensor(np.tile(np.array([7e4, -7e4, 65504, 6e-8], np.float32), (1, 1, 6, 4))),
    )
    out = rig.tensor(np.zeros((1, 1, 6, 16), np.float16))
    rig.device.finalize(rig.stream, FinalizeWork(state, out))
    rig.stream.synchronize()
    assert group.dtype == out.dtype == "f16"
    expected = np.array([np.inf, -np.inf, 65504, 6e-8], np.float16)
    np.testing.assert_array_equal(out.array()[0, 0, 0, :4], expected)


def test_appended_rows_keep_their_bits(rig: Rig) -> None:
    group = LayerGroup(1, 4, 2, 16, 24, dtype="f16")
    rng = np.random.default_rng(9)
    keys = rng.standard_normal((5, 2, 16)).astype(np.float16)
    values = rng.standard_normal((5, 2, 24)).astype(np.float16)
    units, blocks = rig.units(group, 4, 6), rig.blocks(group, 4, 3)
    slots = np.array([[4, 1], [0, 5]], np.int32)
    host = np.array([2, 0], np.int32)
    work = AppendWork(rig.tensor(keys), rig.tensor(values), 2, units, slots, blocks, host)
    rig.device.append(rig.stream, work)
    rig.stream.synchronize()
    for token in range(5):
        block, place = divmod(2 + token, 4)
        for head in range(2):
            unit = units.memory.array()[slots[block, head]].view(np.float16)
            np.testing.assert_array_equal(unit[place * 16 :][:16], keys[token, head])
            np.testing.assert_array_equal(unit[64 + place * 24 :][:24], values[token, head])
            start = head * blocks.unit_bytes // 2
            there = blocks.memory.array()[host[block]].view(np.float16)[start:]
            np.testing.assert_array_equal(there[place * 16 :][:16], keys[token, head])


def test_codes_and_scores_of_f16_keys(rig: Rig) -> None:
    """The predictor's own matrix and codes stay BF16."""
    group = LayerGroup(1, 4, 2, 32, dtype="f16")
    rng = np.random.default_rng(10)
    keys = rng.standard_normal((3, 2, 16, 32)).astype(np.float16)
    pool = rig.blocks(group, 16, 3)
    memory = pool.memory.array().view(np.float16)
    for block in range(3):
        for head in range(2):
            start = head * pool.unit_bytes // 2
            memory[block, start : start + 16 * 32] = keys[block, head].ravel()
    matrix = random_codes(rng, (32, 8), 0.2)
    codes = rig.tensor(np.zeros((3, 2, 16, 8), np.uint16))
    into = ProjectionCodes(codes, rig.tensor(matrix), group)
    index = np.arange(3, dtype=np.int32)
    rig.device.encode(rig.stream, EncodeWork(into, pool, index, index))
    queries = random_codes(rng, (4, 32), 1.0, "f16")
    scores = rig.tensor(np.full((2, 3), np.nan, np.float32))
    rig.device.score(rig.stream, ScoreWork(into, rig.tensor(queries), index, scores))
    rig.stream.synchronize()
    wanted = keys.astype(np.float64) @ oracle.decode(matrix)
    got = oracle.decode(codes.array())
    assert oracle.relative_error(got, wanted) < 2.0**-8
    projected = oracle.decode(queries) @ oracle.decode(matrix) * group.logit_scale
    logits = np.einsum("hgr,bhtr->hgbt", projected.reshape(2, 2, 8), got)
    np.testing.assert_allclose(scores.array(), logits.max((1, 3)), rtol=1e-4, atol=1e-4)


def test_the_other_format_is_refused(rig: Rig) -> None:
    group = GROUPS[0]
    rng = np.random.default_rng(11)
    cache = rig.cache(rng, group, 16, [20])
    queries = random_codes(rng, (1, 1, 6, 16))
    with pytest.raises(ArgumentError, match="queries has dtype bf16; f16 is needed"):
        rig.attend(cache, queries, [20])
