"""Turning vectors against complex numbers, and the factors of the scaling variants."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsswap.errors import ConfigError
from hsswap.rope import Rope, llama3_factors, turn, yarn_factors


@pytest.mark.parametrize("pairs", ["halves", "adjacent"])
@pytest.mark.parametrize("dims", [0, 8])
def test_a_turn_multiplies_complex_numbers(pairs: str, dims: int) -> None:
    random = np.random.default_rng(5)
    rope = Rope(500.0, dims, pairs, tuple(random.uniform(1, 4, (dims or 16) // 2).tolist()))
    x = random.standard_normal((7, 3, 16))
    by = random.integers(-100, 5000, (7, 3))
    turned = turn(x, by, rope)
    n = dims or 16
    for i in range(n // 2):
        a, b = (i, i + n // 2) if pairs == "halves" else (2 * i, 2 * i + 1)
        angle = by * 500.0 ** (-2 * i / n) / rope.frequency_factors[i]
        wanted = (x[..., a] + 1j * x[..., b]) * np.exp(1j * angle)
        assert np.allclose(turned[..., a] + 1j * turned[..., b], wanted, atol=1e-12)
    assert (turned[..., n:] == x[..., n:]).all()


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 100_000), st.integers(0, 100_000))
def test_products_depend_on_the_distance_alone(position: int, distance: int) -> None:
    random = np.random.default_rng(1)
    q, k = random.standard_normal((2, 16))
    rope = Rope()

    def product(at: int) -> float:
        return float(turn(q, np.array(at + distance), rope) @ turn(k, np.array(at), rope))

    assert product(position) == pytest.approx(product(0), abs=1e-6)
    back = turn(turn(k, np.array(position), rope), np.array(-position), rope)
    assert np.allclose(back, k, atol=1e-9)


def test_without_a_rope_nothing_turns() -> None:
    x = np.ones((2, 8))
    assert turn(x, np.array([3, 4]), None) is x


def test_scaling_leaves_fast_pairs_and_slows_slow_ones() -> None:
    for factors in (
        llama3_factors(500000.0, 128, 8.0, 1.0, 4.0, 8192),
        yarn_factors(10000.0, 128, 8.0, 4096),
    ):
        assert len(factors) == 64
        assert factors[0] == pytest.approx(1)
        assert factors[-1] == pytest.approx(8)
        assert (np.diff(factors) >= -1e-12).all()


def test_impossible_ropes_are_refused() -> None:
    with pytest.raises(ConfigError, match="base is"):
        Rope(1.0)
    with pytest.raises(ConfigError, match="dims is 3"):
        Rope(dims=3)
    with pytest.raises(ConfigError, match="pairs is 'mixed'"):
        Rope(pairs="mixed")
    with pytest.raises(ConfigError, match="frequency_factors must"):
        Rope(frequency_factors=(0.0,))
    with pytest.raises(ConfigError, match="do not fit"):
        Rope(dims=32).frequencies(16)
    with pytest.raises(ConfigError, match="8 pairs"):
        Rope(frequency_factors=(1.0,)).frequencies(16)
