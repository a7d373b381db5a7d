"""Packing, levels, logits and shares against float64 and plain loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsswap import codec as codecs
from hsswap.codec import HeadCodec
from hsswap.driver.codes_operations import FIELD_EXPONENT, fields_of


def random_codec(bits: list[int], dim: int, seed: int = 0) -> HeadCodec:
    random = np.random.default_rng(seed)
    m = len(bits)
    encode = random.standard_normal((dim, m)).astype(np.float32)
    bias = (2.0 ** np.array(bits) / 2).astype(np.float32)
    query = random.standard_normal((dim, m)).astype(np.float32)
    centre = random.standard_normal(dim).astype(np.float32)
    return HeadCodec(encode, bias, query, centre, np.array(bits, np.uint8))


BITS = [6, 5, 5, 4, 3, 3, 2, 2, 1, 1]  # 32


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=20),
    st.integers(1, 3),
    st.sampled_from([1, 2, 16, 64]),
    st.integers(0, 2**32 - 1),
)
def test_unpack_undoes_pack(bits: list[int], blocks: int, tokens: int, seed: int) -> None:
    bits += [1] * (-sum(bits) % 16)
    codec = random_codec(bits, 8)
    random = np.random.default_rng(seed)
    shape = (blocks, tokens, len(bits))
    levels = (random.integers(0, 64, shape) >> (6 - codec.bits)).astype(np.uint8)
    packed = codecs.pack(codec, levels)
    assert packed.shape == (blocks, sum(bits) // 16, tokens)
    assert packed.nbytes == blocks * codec.block_bytes(tokens)
    assert (codecs.unpack(codec, packed) == levels).all()


def test_every_bit_has_one_place() -> None:
    codec = random_codec(BITS, 8)
    places = set(zip(codec.dim_of.tolist(), codec.bit_of.tolist(), strict=True))
    assert places == {(d, b) for d, n in enumerate(BITS) for b in range(n)}


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=60), st.integers(0, 255))
def test_bytes_are_sums_of_their_fields(bits: list[int], byte: int) -> None:
    """Levels times weights, of a byte, bit by bit and field by field."""
    bits += [1] * (-sum(bits) % 16)
    codec = random_codec(bits, 8)
    fields = fields_of(codec)
    assert fields.shape == (sum(bits) // 8, 8)
    for at, own in enumerate(fields.tolist()):
        by_bit = dict.fromkeys(range(len(bits)), 0.0)
        for k in range(8 * at, 8 * at + 8):
            value = (byte >> (k % 8) & 1) << int(codec.bit_of[k])
            by_bit[int(codec.dim_of[k])] += value
        by_field = dict.fromkeys(range(len(bits)), 0.0)
        for field in own:
            if field:
                exponent = (field >> 16) - FIELD_EXPONENT
                by_field[field >> 8 & 0xFF] += (byte & field & 0xFF) * 2.0**exponent
        assert by_field == by_bit
        # No mask is empty, and none follows an empty place.
        used = [field != 0 for field in own]
        assert used == sorted(used, reverse=True)


def test_dims_are_spread_over_the_bytes() -> None:
    """As evenly as 47 dims fill 16 bytes."""
    bits = [6] * 2 + [5] * 12 + [4] * 13 + [3] * 2 + [1] * 2
    bits += [1] * (-sum(bits) % 16)
    fields = fields_of(random_codec(bits, 8))
    counts = (fields != 0).sum(1)
    assert counts.max() <= -(-len(bits) // len(fields)) + 1


def test_levels_are_floors_within_range() -> None:
    codec = random_codec(BITS, 12, seed=3)
    keys = np.random.default_rng(4).standard_normal((500, 12)).astype(np.float32) * 3
    exact = keys.astype(np.float64) @ codec.encode.astype(np.float64) + codec.bias
    top = 2.0 ** np.array(BITS) - 1
    sure = np.abs(exact - np.round(exact)) > 1e-4
    levels = codecs.levels_of(codec, keys)
    assert (levels == np.clip(np.floor(exact), 0, top))[sure].all()
    assert (levels == 0).any()
    assert (levels == top).any()
    keys[0], keys[1] = np.nan, np.inf
    assert (codecs.levels_of(codec, keys) <= top).all()


def test_logits_are_those_of_the_levels() -> None:
    codec = random_codec(BITS, 12, seed=3)
    random = np.random.default_rng(6)
    keys = random.standard_normal((5, 16, 12)).astype(np.float32)
    queries = random.standard_normal((3, 12)).astype(np.float32)
    codes = codecs.encode(codec, keys)
    levels = codecs.unpack(codec, codes).astype(np.float64)
    weights = queries.astype(np.float64) @ codec.query
    wanted = np.einsum("btm,gm->gbt", levels, weights) + (queries @ codec.centre)[:, None, None]
    got = codecs.logits_of(codec, queries, codes)
    assert got.shape == (3, 5, 16)
    assert np.linalg.norm(got - wanted) < 1e-6 * np.linalg.norm(wanted)


def test_log_mass_and_shares_are_softmax() -> None:
    random = np.random.default_rng(8)
    logits = random.standard_normal((3, 6, 16)).astype(np.float32) * 20
    logits[1, 2] = -np.inf
    resident = np.array([3.0, 30.0, -np.inf], np.float32)
    mass = codecs.log_mass(logits)
    assert mass[1, 2] == -np.inf
    exact = np.exp(logits.astype(np.float64))
    total = exact.sum((1, 2)) + np.exp(resident.astype(np.float64))
    wanted = (exact.sum(2) / total[:, None]).mean(0)
    assert codecs.shares(mass, resident) == pytest.approx(wanted, rel=1e-5)
    assert codecs.shares(mass).sum() == pytest.approx(1)
    nothing = np.full((2, 3), -np.inf, np.float32)
    assert (codecs.shares(nothing, np.full(2, -np.inf, np.float32)) == 0).all()


def test_what_attending_showed_corrects_a_prediction_and_fades() -> None:
    predicted = np.array([[1.0, 2.0, -np.inf]], np.float32)
    before = np.array([[0.5, 4.0, 1.0]], np.float32)
    true = np.array([[2.0, np.nan, 3.0]], np.float32)
    after = codecs.corrected(before, predicted, true)
    wanted = [codecs.TRUST * 1.0, codecs.FADE * 4.0, codecs.FADE * 1.0]
    assert after[0] == pytest.approx(wanted)
    same = codecs.corrected(after, predicted, np.full((1, 3), np.nan, np.float32))
    assert same[0] == pytest.approx(np.array(wanted) * codecs.FADE)
