"""The fit of what a choice lacks, against NumPy's least squares."""

from __future__ import annotations

import numpy as np
import pytest

from hsswap.fitting import RIDGE, TRUST, fitted, sums_of

ROWS, HEADS, DIMS = 11, 3, 5


def examples(seed: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Near, full and shares: what is lacking is -0.4 near and a vector, but for noise."""
    random = np.random.default_rng(seed)
    near = random.standard_normal((ROWS, HEADS, DIMS))
    share = random.uniform(0.02, 0.5, (ROWS, HEADS))
    value = np.arange(HEADS * DIMS).reshape(HEADS, DIMS) / 4
    noise = 0.1 * random.standard_normal(near.shape)
    return near, near + share[..., None] * (value - 0.4 * near + noise), share


def slowly(near: np.ndarray, full: np.ndarray, share: np.ndarray, q: int) -> np.ndarray:
    """Scale and value of one head, by the normal equations of all its numbers."""
    rows, wanted = [], []
    for n in range(len(near)):
        size = np.linalg.norm(full[n, q])
        for d in range(DIMS):
            unit = np.eye(DIMS)[d]
            rows.append(np.concatenate([[near[n, q, d]], unit]) * share[n, q] / size)
            wanted.append((full[n, q, d] - near[n, q, d]) / size)
    square = np.array(rows).T @ np.array(rows)
    square[np.diag_indices_from(square)] *= 1 + RIDGE
    return np.linalg.solve(square, np.array(rows).T @ np.array(wanted))


def test_it_is_the_least_squares_fit_of_all_that_was_added_up() -> None:
    near, full, share = examples()
    parts = [slice(0, 4), slice(4, 5), slice(5, ROWS)]
    sums = sum(sums_of(near[part], full[part], share[part]) for part in parts)
    scale, value = fitted(np.asarray(sums))
    for q in range(HEADS):
        wanted = slowly(near, full, share, q)
        assert scale[q] == pytest.approx(TRUST * wanted[0], rel=1e-9)
        np.testing.assert_allclose(value[q], TRUST * wanted[1:], rtol=1e-9)
    assert -0.6 < scale.mean() / TRUST < -0.2
    assert np.abs(value / TRUST - np.arange(15).reshape(3, 5) / 4).max() < 0.3


def test_what_teaches_nothing_leaves_zeros_and_changes_no_sum() -> None:
    near, full, share = examples()
    scale, value = fitted(sums_of(near[:0], full[:0], share[:0]))
    assert not scale.any()
    assert not value.any()
    scale, value = fitted(sums_of(near, full, np.zeros_like(share)))
    assert not scale.any()
    assert not value.any()
    more = [np.concatenate((part, np.zeros_like(part[:1]))) for part in (near, full)]
    more.append(np.concatenate((share, np.ones_like(share[:1]))))
    np.testing.assert_array_equal(sums_of(*more), sums_of(near, full, share))
