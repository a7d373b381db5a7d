"""The verifier against attention written token by token, and what must not pass it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from hsswap.bf16 import from_float32, to_float32
from hsswap.commands.verify import (
    ERROR_FLOOR,
    PROMISE_FACTOR,
    AttentionVerifier,
    VerifySummary,
    allowed_tokens,
    relative_error,
)
from hsswap.commands.verify_formats import kept_rows, round_to_bf16, widen
from hsswap.config import LayerGroup, ModelDims
from hsswap.errors import ArgumentError
from tests import e4m3_oracle

U16 = NDArray[np.uint16]
F64 = NDArray[np.float64]
NAN = np.uint16(0x7FC0)


def codes(random: np.random.Generator, *shape: int) -> U16:
    return from_float32(random.standard_normal(shape).astype(np.float32))


def by_token(
    group: LayerGroup, queries: U16, keys: U16, values: U16, hidden: set[tuple[int, int]]
) -> F64:
    """Attention in plain Python floats; ``hidden`` has pairs of KV head and token."""
    rows, tokens = len(queries), len(keys)
    q, k, v = (to_float32(part).astype(np.float64) for part in (queries, keys, values))
    out = np.zeros((rows, group.q_heads, group.value_dim))
    for row in range(rows):
        last = tokens - rows + row
        first = 0 if group.window is None else max(0, last - group.window + 1)
        for head in range(group.q_heads):
            own = head // group.group_size
            seen = [t for t in range(first, last + 1) if (own, t) not in hidden]
            logits = [group.logit_scale * float(q[row, head] @ k[t, own]) for t in seen]
            if group.soft_cap is not None:
                logits = [group.soft_cap * math.tanh(x / group.soft_cap) for x in logits]
            weights = [math.exp(x - max(logits)) for x in logits]
            for weight, t in zip(weights, seen, strict=True):
                out[row, head] += weight / sum(weights) * v[t, own]
    return out


@pytest.mark.parametrize(
    "group",
    [
        LayerGroup(1, 6, 2, 16),
        LayerGroup(1, 4, 4, 8, value_dim=24),
        LayerGroup(1, 3, 1, 8, window=7),
        LayerGroup(1, 2, 1, 8, scale=0.7, soft_cap=1.5),
    ],
)
def test_the_oracle_is_dense_causal_attention(group: LayerGroup) -> None:
    random = np.random.default_rng(5)
    verifier = AttentionVerifier(ModelDims((group,), block_size=4))
    keys = codes(random, 0, group.kv_heads, group.head_dim)
    values = codes(random, 0, group.kv_heads, group.value_dim)
    for rows in (9, 1, 13, 1):
        queries = codes(random, rows, group.q_heads, group.head_dim)
        more_keys = codes(random, rows, group.kv_heads, group.head_dim)
        more_values = codes(random, rows, group.kv_heads, group.value_dim)
        keys, values = np.concatenate((keys, more_keys)), np.concatenate((values, more_values))
        expected = by_token(group, queries, keys, values, set())
        out = from_float32(expected.astype(np.float32))
        verifier.record(0, queries, more_keys, more_values, out)
        (errors,) = verifier.check()
        # What is left is the rounding of the output to BF16.
        assert errors.ours == pytest.approx(relative_error(to_float32(out), expected), rel=1e-6)
        assert 0 < errors.ours <= errors.reference * 1.2
        assert errors.ok
    assert verifier.summary.calls == 4
    assert verifier.summary.rows == 24
    assert verifier.failures == []


def test_pieces_of_rows_give_the_same_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    group = LayerGroup(1, 6, 2, 16)
    random = np.random.default_rng(6)
    q, k, v, out = (codes(random, 40, heads, 16) for heads in (6, 2, 2, 6))
    found = []
    for elements in (1, 500, 1 << 18):
        monkeypatch.setattr("hsswap.commands.verify.PIECE_ELEMENTS", elements)
        verifier = AttentionVerifier(ModelDims((group,)))
        verifier.record(0, q, k, v, out)
        found.append(verifier.check()[0].ours)
    assert found == pytest.approx([found[0]] * 3, rel=1e-12)


def test_top_k_is_compared_with_attention_over_what_was_chosen() -> None:
    group = LayerGroup(1, 4, 2, 16)
    random = np.random.default_rng(7)
    verifier = AttentionVerifier(ModelDims((group,), block_size=4))
    rows = 22  # five full blocks, and two tokens of the sixth
    q, k, v = (codes(random, rows, heads, 16) for heads in (4, 2, 2))
    verifier.record(0, q, k, v, np.zeros((rows, 4, 16), np.uint16))
    verifier.check()
    queries, keys, values = (codes(random, 1, heads, 16) for heads in (4, 2, 2))
    chosen = np.array([[0, 3], [1, 4]], np.int32)
    left_out = {(0, 1), (0, 2), (0, 4), (1, 0), (1, 2), (1, 3)}
    hidden = {(head, 4 * block + i) for head, block in left_out for i in range(4)}
    all_keys = np.concatenate((k, keys))
    all_values = np.concatenate((v, values))
    expected = by_token(group, queries, all_keys, all_values, hidden)
    dense = by_token(group, queries, all_keys, all_values, set())
    out = from_float32(expected.astype(np.float32))
    verifier.record(0, queries, keys, values, out, chosen)
    (errors,) = verifier.check()
    assert errors.ok
    assert errors.against_dense == pytest.approx(relative_error(to_float32(out), dense), rel=1e-6)
    assert verifier.summary.max_against_dense == errors.against_dense
    # The same output is wrong if the verifier is told of other blocks.
    verifier.record(0, queries, keys, values, out, np.array([[0, 3], [1, 3]], np.int32))
    assert not verifier.check()[0].ok


def test_nan_never_passes() -> None:
    group = LayerGroup(1, 2, 1, 8)
    random = np.random.default_rng(8)
    verifier = AttentionVerifier(ModelDims((group,)))
    queries, keys, values = codes(random, 3, 2, 8), codes(random, 3, 1, 8), codes(random, 3, 1, 8)
    expected = by_token(group, queries, keys, values, set())
    out = from_float32(expected.astype(np.float32))
    verifier.record(0, queries, keys, values, out)
    assert verifier.check()[0].ok
    out[1, 0, 0] = NAN
    verifier.record(0, queries, keys, values, out)
    assert not verifier.check()[0].ok
    assert math.isnan(verifier.summary.max_error)
    assert verifier.summary.failures == 1
    # It stays NaN, whatever comes after.
    verifier.record(0, queries, keys, values, out)
    verifier.check()
    assert math.isnan(verifier.summary.max_error)


def test_a_failure_names_layer_step_and_error() -> None:
    group = LayerGroup(2, 2, 1, 8)
    random = np.random.default_rng(9)
    verifier = AttentionVerifier(ModelDims((group,)))
    q, k, v = (codes(random, 5, heads, 8) for heads in (2, 1, 1))
    right = from_float32(by_token(group, q, k, v, set()).astype(np.float32))
    for out in (right, np.zeros_like(right)):
        verifier.record(0, q, k, v, out)
        verifier.record(1, q, k, v, out)
        verifier.check()
    assert verifier.summary.calls == 4
    assert verifier.summary.failures == 2
    first = str(verifier.failures[0])
    assert "layer 0, step 1 (token 5, 5 rows)" in first
    assert "1.00e+00" in first


def test_one_bad_row_does_not_hide_among_many() -> None:
    group = LayerGroup(1, 2, 1, 8)
    random = np.random.default_rng(10)
    queries, keys, values = (codes(random, 256, heads, 8) for heads in (2, 1, 1))
    verifier = AttentionVerifier(ModelDims((group,)))
    expected = by_token(group, queries[:], keys, values, set())
    out = from_float32(expected.astype(np.float32))
    verifier.record(0, queries, keys, values, out)
    assert verifier.check()[0].ok
    size = np.linalg.norm(expected, axis=(1, 2))
    row = int(size.argmin())  # the least of all, off by three percent
    out[row] = from_float32((expected[row] * 1.03).astype(np.float32))
    verifier = AttentionVerifier(ModelDims((group,)))
    verifier.record(0, queries, keys, values, out)
    (errors,) = verifier.check()
    assert errors.ours <= errors.bound
    assert not errors.ok


def test_the_bound_is_the_promise() -> None:
    group = LayerGroup(1, 2, 1, 8)
    random = np.random.default_rng(11)
    verifier = AttentionVerifier(ModelDims((group,)))
    q, k, v = (codes(random, 4, heads, 8) for heads in (2, 1, 1))
    out = from_float32(by_token(group, q, k, v, set()).astype(np.float32))
    verifier.record(0, q, k, v, out)
    (errors,) = verifier.check()
    assert errors.bound == PROMISE_FACTOR * max(errors.reference, ERROR_FLOOR)
    assert replace(errors, ours=errors.bound).ok
    assert not replace(errors, ours=errors.bound * 1.0001).ok
    assert not replace(errors, ours=math.nan).ok
    assert not replace(errors, worst_row=math.nan).ok


@pytest.mark.parametrize("chosen", [[[0, 5]], [[-2, 2]], [[2, 2]]])
def test_a_choice_that_cannot_be_is_refused(chosen: list[list[int]]) -> None:
    with pytest.raises(ArgumentError, match="chosen"):
        allowed_tokens(np.array(chosen, np.int32), 22, 4)


def test_arguments_are_checked() -> None:
    verifier = AttentionVerifier(ModelDims((LayerGroup(1, 2, 1, 8),)))
    rows = np.zeros((2, 2, 8), np.uint16)
    kv = np.zeros((2, 1, 8), np.uint16)
    with pytest.raises(ArgumentError, match="do not fit"):
        verifier.record(0, rows, kv, rows, rows)
    with pytest.raises(ArgumentError, match="one row at a time"):
        verifier.record(0, rows, kv, kv, rows, np.zeros((1, 1), np.int32))


def test_relative_error_of_nothing() -> None:
    zero = np.zeros((1, 1, 4))
    assert relative_error(zero, zero) == 0.0
    assert relative_error(zero + 1, zero) == math.inf
    assert math.isnan(relative_error(zero + math.nan, zero))


def test_a_summary_keeps_the_worst() -> None:
    summary = VerifySummary()
    assert summary.max_error <= summary.bound_at_max


def test_its_converters_are_those_of_bf16() -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    finite = every[(every & 0x7F80) != 0x7F80]
    assert (widen(finite) == to_float32(finite)).all()
    bits = np.random.default_rng(12).integers(0, 1 << 32, 1 << 16, np.uint64).astype(np.uint32)
    halves = (finite.astype(np.uint32) << 16) | np.uint32(0x8000)
    values = np.concatenate((bits, halves, halves - 1, halves + 1)).view(np.float32)
    values = values[np.isfinite(values)]
    assert (round_to_bf16(values) == to_float32(from_float32(values))).all()


def test_minus_one_is_no_block() -> None:
    allowed = allowed_tokens(np.array([[-1, 1], [0, 2]], np.int32), 14, 4)
    wanted = np.zeros((2, 14), np.bool_)
    wanted[0, 4:8] = wanted[1, 0:4] = wanted[1, 8:12] = wanted[:, 12:] = True
    assert (allowed == wanted).all()


def test_rows_of_e4m3_are_those_that_a_cache_keeps() -> None:
    """By the format's definition, for rows of any size, zeros among them."""
    group = LayerGroup(1, 1, 1, 16, kv_dtype="e4m3")
    random = np.random.default_rng(4)
    rows = random.standard_normal((500, 1, 16)) * 2.0 ** random.integers(-100, 100, (500, 1, 1))
    rows[::7, :, 3:9] = 0
    rows[3] = 0
    given = to_float32(from_float32(rows.astype(np.float32)))
    wanted = e4m3_oracle.numbers(*e4m3_oracle.quantised(given.astype(np.float64)))
    np.testing.assert_allclose(kept_rows(group, given), wanted, rtol=2.0**-23, atol=2.0**-149)
    assert kept_rows(replace(group, kv_dtype="bf16"), given) is given
