"""E4M3: every code, and rounding against the nearest number that the format has."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsswap import bf16, e4m3
from tests import e4m3_oracle

ALL = np.arange(256, dtype=np.uint8)


def test_every_code_is_its_number() -> None:
    wide = e4m3.to_float32(ALL[None], np.ones(1, np.float32))[0]
    np.testing.assert_array_equal(wide, e4m3_oracle.NUMBERS)
    assert np.isnan(wide).sum() == 2
    assert np.nanmax(wide) == 448
    assert np.signbit(wide).tolist() == [code >= 128 for code in range(256)]


def test_scales_multiply() -> None:
    scales = np.array([0.3, 2.0**-126, 2.0**100, np.nan], np.float32)
    codes = np.broadcast_to(ALL, (4, 256)).copy()
    out = np.empty((4, 256), np.float32)
    assert e4m3.to_float32(codes, scales, out) is out
    wanted = e4m3_oracle.NUMBERS * scales.astype(np.float64)[:, None]
    np.testing.assert_allclose(out, wanted, rtol=2.0**-23, atol=2.0**-149)


def test_every_number_keeps_its_code() -> None:
    """With 448 in its row a number has the scale 1."""
    rows = np.full((254, 2), 448, np.float32)
    rows[:, 0] = e4m3_oracle.NUMBERS[~np.isnan(e4m3_oracle.NUMBERS)]
    codes, scales = e4m3.from_float32(rows)
    assert (scales == 1).all()
    np.testing.assert_array_equal(codes[:, 0], ALL[~np.isnan(e4m3_oracle.NUMBERS)])


@pytest.mark.parametrize("nudge", [-1, 0, 1])
def test_ties_and_their_sides(nudge: int) -> None:
    """Halfway between neighbours, and the next float32 to either side, for every pair."""
    middles = ((e4m3_oracle.ASCENDING[1:] + e4m3_oracle.ASCENDING[:-1]) / 2).astype(np.float32)
    middles = (middles.view(np.int32) + nudge).view(np.float32)
    rows = np.stack((middles, -middles, np.full_like(middles, 448)), axis=1)
    codes, _ = e4m3.from_float32(rows)
    for value, code, other in zip(middles.tolist(), codes[:, 0], codes[:, 1], strict=True):
        assert code == e4m3_oracle.nearest(value)
        assert other == code | 0x80


def test_the_oracle_agrees_with_itself() -> None:
    """Many at once, and one by one."""
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((300, 3)) * 2.0 ** rng.integers(-150, 100, (300, 1))
    codes, scales = e4m3_oracle.quantised(rows)
    for row, code, scale in zip(rows, codes, scales, strict=True):
        assert e4m3_oracle.scale_for(float(np.abs(row).max())) == scale
        ratios = (row.astype(np.float32) / scale).tolist()
        assert [e4m3_oracle.nearest(x) for x in ratios] == code.tolist()


def test_every_bf16_number_alone_in_its_row() -> None:
    everything = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    rows = bf16.to_float32(everything)[:, None]
    codes, scales = e4m3.from_float32(rows)
    for i in range(0, 1 << 16, 61):
        value = float(rows[i, 0])
        scale = e4m3_oracle.scale_for(abs(value) if np.isfinite(value) else 0.0)
        assert scales[i] == scale
        with np.errstate(invalid="ignore"):
            ratio = float(rows[i, 0] / np.float32(scale))
        assert codes[i, 0] == e4m3_oracle.nearest(ratio)


@given(st.data())
def test_rows_of_any_numbers(data: st.DataObject) -> None:
    """Any float32, not finite ones too, in rows of odd lengths."""
    dim = data.draw(st.integers(1, 20))
    floats = st.floats(width=32, allow_subnormal=True)
    row = data.draw(st.lists(floats, min_size=dim, max_size=dim))
    rows = np.array([row], np.float32)
    codes, scales = e4m3.from_float32(rows)
    wanted_codes, wanted_scales = e4m3_oracle.quantised(rows.astype(np.float64))
    np.testing.assert_array_equal(scales, wanted_scales)
    np.testing.assert_array_equal(codes & 0x7F, wanted_codes & 0x7F)
    np.testing.assert_array_equal(codes >> 7, np.signbit(rows))


def test_what_is_not_finite() -> None:
    rows = np.array([[np.inf, -np.inf, np.nan, 7.0, 0.0]], np.float32)
    codes, scales = e4m3.from_float32(rows)
    assert scales.tolist() == [2.0**-6]  # of the largest finite one, 7: 7 / 2^-6 is 448
    assert codes.tolist() == [[0x7E, 0xFE, 0x7F, 0x7E, 0]]
    codes, scales = e4m3.from_float32(np.array([[np.inf, np.nan]], np.float32))
    assert (codes.tolist(), scales.tolist()) == ([[0x7E, 0x7F]], [1.0])


def test_rows_of_zeros_and_no_rows() -> None:
    codes, scales = e4m3.from_float32(np.zeros((3, 2, 8), np.float32))
    assert not codes.any()
    assert (scales == 1).all()
    codes, scales = e4m3.from_float32(np.zeros((0, 2, 8), np.float32))
    assert (codes.shape, scales.shape) == ((0, 2, 8), (0, 2))


def test_the_largest_of_a_row_is_kept_and_rounding_twice_changes_no_code() -> None:
    rows = np.random.default_rng(0).standard_normal((500, 64)).astype(np.float32)
    codes, scales = e4m3.from_float32(rows)
    once = e4m3.to_float32(codes, scales)
    largest = np.abs(rows).max(-1)
    np.testing.assert_allclose(np.abs(once).max(-1), largest, rtol=2.0**-22)
    again, others = e4m3.from_float32(once)
    np.testing.assert_array_equal(again, codes)
    np.testing.assert_allclose(others, scales, rtol=2.0**-22)
    error = np.linalg.norm(once - rows) / np.linalg.norm(rows)
    assert 0.02 < error < 0.03  # 2^-5 of a number at most, a third of it squared on average
