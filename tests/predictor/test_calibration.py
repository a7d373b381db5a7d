"""The basis, the bits and the ranges: optimal where theory says so, and good on made-up heads."""

from __future__ import annotations

import numpy as np
import pytest

from hsswap import codec as codecs
from hsswap.errors import ArgumentError
from hsswap.predictor.basis import Moments, basis_of, rotated_samples, second_moments
from hsswap.predictor.bits import DISTORTION, allocate_bits
from hsswap.predictor.calibration import HeadSamples, calibrate
from hsswap.predictor.quantiser import quantiser_of
from hsswap.rope import F64, Rope, turn

DIM = 16
ROPE = Rope(10000.0)


def correlated(random: np.random.Generator, count: int, decay: float) -> F64:
    mixing = np.linalg.qr(random.standard_normal((DIM, DIM)))[0]
    vectors: F64 = random.standard_normal((count, DIM)) * decay ** np.arange(DIM) @ mixing
    return vectors


def test_products_in_the_basis_are_the_products() -> None:
    random = np.random.default_rng(1)
    keys, queries = correlated(random, 900, 0.7), correlated(random, 600, 0.8) + 0.5
    moments = second_moments(keys, queries.reshape(300, 2, DIM), np.arange(900), None, 99, 0)
    basis = basis_of(moments, 1.0)
    product = (queries @ basis.query) @ ((keys - basis.mean) @ basis.encode).T
    assert np.allclose(product, queries @ (keys - keys.mean(0)).T, atol=1e-9)
    assert (np.diff(basis.variance) <= 1e-12).all()


def test_leading_dims_keep_most_of_the_logits_of_any_basis(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Query-aware dims leave less error than PCA of keys, which leaves less than random ones.

    With hardly a floor, which gives up some of that for queries that were not seen.
    """
    monkeypatch.setattr("hsswap.predictor.basis.FLOOR", 1e-3)
    random = np.random.default_rng(2)
    keys, queries = correlated(random, 2000, 0.6), correlated(random, 2000, 0.6)
    aware = basis_of(second_moments(keys, queries[:, None], np.arange(2000), None, 9, 0), 1.0)
    plain = basis_of(second_moments(keys, None, np.arange(2000), None, 9, 0), 1.0)
    assert (plain.mean == 0).all()

    def error(encode: np.ndarray, query: np.ndarray) -> float:
        kept = (queries @ query[:, :4]) @ ((keys - keys.mean(0)) @ encode[:, :4]).T
        return float(np.square(kept - queries @ (keys - keys.mean(0)).T).mean())

    turned = np.linalg.qr(random.standard_normal((DIM, DIM)))[0]
    best = error(aware.encode, aware.query)
    assert best < 0.7 * error(plain.encode, plain.query) < 0.7 * error(turned, turned)
    # What is left is the variance of the dims left out (Eckart and Young).
    assert best == pytest.approx(aware.variance[4:].sum(), rel=0.06)


def test_early_positions_are_spread_over_the_context() -> None:
    """Keys of one content at early positions: the slow pairs' spread must be seen."""
    random = np.random.default_rng(3)
    content = np.full((400, DIM), 1.0) + 0.1 * random.standard_normal((400, DIM))
    keys = turn(content, np.arange(400), ROPE)
    late = turn(content, np.arange(400) * 50, ROPE)
    spread = second_moments(keys, keys[:, None], np.arange(400), ROPE, 20000, 0).key_covariance
    plain = second_moments(keys, keys[:, None], np.arange(400), None, 20000, 0).key_covariance
    wanted = np.cov(late.T, bias=True)
    assert np.linalg.norm(spread - wanted) < 0.15 * np.linalg.norm(wanted)
    assert np.linalg.norm(plain - wanted) > 0.5 * np.linalg.norm(wanted)
    assert rotated_samples(keys, np.arange(400), ROPE, 0, 9, random).shape == (1600, DIM)


def test_bits_go_where_they_lower_the_error_most() -> None:
    random = np.random.default_rng(4)
    variances = [np.sort(random.exponential(10.0**h, DIM))[::-1] for h in (-2, 0, 1)]
    bits = allocate_bits(variances, 9)
    assert sum(int(b.sum()) for b in bits) == 9 * 16
    assert all(int(b.sum()) % 16 == 0 and int(b.sum()) > 0 for b in bits)
    assert bits[2].sum() > bits[0].sum()

    def loss(bits: list[np.ndarray]) -> float:
        return sum(float(v @ DISTORTION[b]) for v, b in zip(variances, bits, strict=True))

    # Of planes, too, no other share of them among the heads is better, by errors in parts of the
    # root of a head's variance.
    def weighted(planes: tuple[int, ...]) -> float:
        shares = [allocate_bits([v], n)[0] for v, n in zip(variances, planes, strict=True)]
        return sum(
            float(v @ DISTORTION[b] / np.sqrt(v.sum()))
            for v, b in zip(variances, shares, strict=True)
        )

    planes = [int(b.sum()) // 16 for b in bits]
    every = [(a, b, 9 - a - b) for a in range(1, 8) for b in range(1, 9 - a) if 9 - a - b <= 6]
    every = [one for one in every if max(one) <= 6]
    assert weighted(tuple(planes)) == pytest.approx(min(map(weighted, every)))

    best = loss(bits)
    for head in range(3):  # moving one bit within a head only makes it worse
        for a in range(DIM):
            for b in range(DIM):
                moved = [x.astype(int) for x in bits]
                if a == b or moved[head][a] == 0 or moved[head][b] == 6:
                    continue
                moved[head][a] -= 1
                moved[head][b] += 1
                assert loss(moved) >= best - 1e-12
    with pytest.raises(ArgumentError, match="2 planes for 3 heads"):
        allocate_bits(variances, 2)
    most = allocate_bits(variances, 10_000)
    assert all((b <= 6).all() and b.sum() == 96 for b in most)
    nothing = allocate_bits([*variances, np.zeros(DIM)], 12)  # a head that only fills up a tensor
    assert nothing[3].sum() == 16
    assert [b.sum() for b in nothing[:3]] == [b.sum() for b in allocate_bits(variances, 11)]


def test_ranges_hold_the_samples_and_coarse_dims_hit_the_known_distortion() -> None:
    samples = np.random.default_rng(5).standard_normal((20000, 3))
    bits = np.array([4, 2, 1], np.uint8)
    ranges = quantiser_of(samples, bits)
    inside = (samples >= ranges.low) & (samples <= ranges.low + ranges.step * 2.0**bits)
    assert inside[:, 0].mean() > 0.999
    level = np.clip(np.floor((samples - ranges.low) / ranges.step), 0, 2.0**bits - 1)
    error = np.square(samples - ranges.low - ranges.step * (level + 0.5)).mean(0)
    assert error[1] == pytest.approx(DISTORTION[2], rel=0.05)
    assert error[2] == pytest.approx(DISTORTION[1], rel=0.05)


def head_samples(seed: int, *, with_queries: bool = True, rope: Rope | None = ROPE) -> HeadSamples:
    random = np.random.default_rng(seed)
    positions = np.arange(16, 400, dtype=np.int64)
    keys = turn(correlated(random, 384, 0.7) + 0.3, positions, rope)
    at = np.arange(16, 400, 4, dtype=np.int64)
    queries = turn(
        correlated(random, 192, 0.7).reshape(96, 2, DIM), np.repeat(at[:, None], 2, 1), rope
    )
    return HeadSamples(
        keys=keys,
        values=None,
        positions=positions,
        queries=queries if with_queries else None,
        query_positions=at if with_queries else None,
        rope=rope,
        logit_scale=DIM**-0.5,
        group_size=2,
        value_dim=DIM,
    )


@pytest.mark.parametrize("with_queries", [True, False])
@pytest.mark.parametrize("rope", [ROPE, None])
def test_codes_keep_the_logits(with_queries: bool, rope: Rope | None) -> None:
    heads = [head_samples(s, with_queries=with_queries, rope=rope) for s in range(4)]
    again = calibrate(heads, 1 / 6, 4000)
    finds = []
    for ratio in (1 / 32, 1 / 6):
        found = calibrate(heads, ratio, 4000)
        assert sum(c.planes for c in found) == max(4, int(ratio * 4 * 2 * DIM))
        worst = 0.0
        for head, codec, twin in zip(heads, found, again, strict=True):
            if ratio == 1 / 6:
                assert (codec.encode == twin.encode).all()
                assert (codec.query == twin.query).all()
            blocks = head.keys.astype(np.float32).reshape(-1, 16, DIM)
            queries = head_samples(9).queries
            assert queries is not None
            q = queries[50].astype(np.float32)
            exact = np.einsum("gd,btd->gbt", q, blocks) * DIM**-0.5
            got = codecs.logits_of(codec, q, codecs.encode(codec, blocks))
            centred = exact - exact.mean((1, 2), keepdims=True)
            worst = max(worst, float(np.linalg.norm(got - exact) / np.linalg.norm(centred)))
        finds.append(worst)
    assert finds[1] < 0.5 * finds[0] or finds[1] < 0.1


def test_a_block_of_the_querys_best_key_beats_a_block_of_zeros() -> None:
    heads = [head_samples(s) for s in range(3)]
    for head, codec in zip(heads, calibrate(heads, 1 / 16, 4000), strict=True):
        assert head.queries is not None
        q = head.queries[-1].astype(np.float32)
        mean = q.mean(0)
        best = head.keys[(head.keys @ mean).argmax()]
        if best @ mean <= 0:
            continue
        blocks = np.stack([np.zeros((16, DIM)), np.tile(best, (16, 1))]).astype(np.float32)
        mass = codecs.log_mass(codecs.logits_of(codec, q, codecs.encode(codec, blocks)))
        share = codecs.shares(mass)
        assert share[1] >= share[0]


def test_moments_need_keys() -> None:
    with pytest.raises(ArgumentError, match="moments of 1 keys"):
        second_moments(np.zeros((1, 8)), None, np.zeros(1, np.int64), None, 9, 0)
    flat = Moments(np.zeros(DIM), np.zeros((DIM, DIM)), np.zeros((DIM, DIM)))
    assert np.isfinite(basis_of(flat, 1.0).query).all()  # keys that never differ
