"""BF16 converters: every code, and rounding against arithmetic in integers."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest

from hsswap import bf16

ALL_CODES = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)


def round_bits(bits: int) -> int:
    """Nearest-even BF16 code of a float32 bit pattern that is no NaN, in integers alone."""
    kept, rest = bits >> 16, bits & 0xFFFF
    if rest > 0x8000 or (rest == 0x8000 and kept & 1):
        kept += 1  # the carry into the exponent is right, and from the largest to infinity
    return kept


def is_nan(
    codes: np.ndarray[tuple[int, ...], np.dtype[np.uint16]],
) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Exponent of ones and a fraction."""
    return (codes & 0x7FFF) > 0x7F80


def test_widening_is_exact() -> None:
    wide = bf16.to_float32(ALL_CODES)
    for code in range(0, 1 << 16, 37):
        wanted = struct.unpack("<f", struct.pack("<I", code << 16))[0]
        assert float(wide[code]) == wanted or math.isnan(wanted)
    assert wide.dtype == np.float32
    np.testing.assert_array_equal(wide.view(np.uint32) >> 16, ALL_CODES)


def test_all_codes_come_back() -> None:
    again = bf16.from_float32(bf16.to_float32(ALL_CODES))
    nan = is_nan(ALL_CODES)
    np.testing.assert_array_equal(again[~nan], ALL_CODES[~nan])
    np.testing.assert_array_equal(again[nan], ALL_CODES[nan] | 0x0040)  # quiet, payload kept
    assert is_nan(again)[nan].all()


def test_widening_into_given_memory() -> None:
    out = np.empty((256, 256), np.float32)
    assert bf16.to_float32(ALL_CODES.reshape(256, 256), out=out) is out
    np.testing.assert_array_equal(out.view(np.uint32).ravel() >> 16, ALL_CODES)


@pytest.mark.parametrize("rest", [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_rounding_of_every_code_with_a_remainder(rest: int) -> None:
    """Ties, both sides of ties, subnormals, and overflow to infinity, for every upper half."""
    codes = ALL_CODES[~is_nan(ALL_CODES) & ((ALL_CODES & 0x7FFF) != 0x7F80)]
    bits = (codes.astype(np.uint32) << 16) | np.uint32(rest)
    got = bf16.from_float32(bits.view(np.float32))
    assert got.tolist() == [round_bits(b) for b in bits.tolist()]


def test_rounding_of_random_numbers_is_to_the_nearest() -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal(5000).astype(np.float32)
    got = bf16.to_float32(bf16.from_float32(values)).astype(np.float64)
    codes = bf16.from_float32(values)
    for neighbour in (codes - np.uint16(1), codes + np.uint16(1)):
        other = bf16.to_float32(neighbour).astype(np.float64)
        assert np.all(np.abs(got - values) <= np.abs(other - values))


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0x7FFFFFFF, 0xFF800001])
def test_nan_stays_nan(bits: int) -> None:
    value = np.array([bits, bits], np.uint32).view(np.float32)
    assert is_nan(bf16.from_float32(value)).all()


def test_infinities_zeros_and_the_largest() -> None:
    largest = np.finfo(np.float32).max
    values = np.array([np.inf, -np.inf, 0.0, -0.0, largest, -largest], np.float32)
    assert bf16.from_float32(values).tolist() == [0x7F80, 0xFF80, 0, 0x8000, 0x7F80, 0xFF80]


def test_strided_and_empty_input() -> None:
    values = np.arange(24, dtype=np.float32).reshape(4, 6)[::2, ::3]
    np.testing.assert_array_equal(bf16.to_float32(bf16.from_float32(values)), values)
    assert bf16.from_float32(np.empty((0, 3), np.float32)).shape == (0, 3)
    assert bf16.to_float32(np.empty((0, 3), np.uint16)).shape == (0, 3)
