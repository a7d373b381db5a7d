"""What is learned to stand in for attention that top-k leaves out, against a slow version of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hsswap.fitting import RIDGE, TRUST
from hsswap.predictor.calibration import HeadSamples, stand_ins
from hsswap.predictor.stand_in import StandIn, stand_in_of, with_stand_in
from hsswap.rope import F64

SCALE = 0.3


def prompt(tokens: int, *, group: int = 3, dk: int = 8, dv: int = 6) -> list[Any]:
    """Keys, values with a mean of their own, queries; and where the queries stand."""
    random = np.random.default_rng(1)
    keys = random.standard_normal((tokens, dk))
    values = random.standard_normal((tokens, dv)) + np.arange(dv)
    at = np.arange(16, tokens, 4)
    return [keys, values, 3 * random.standard_normal((len(at), group, dk)), at]


def attended(weight: F64, position: int) -> list[int]:
    """Tokens that top-k attends for one query, from the group's weights ``[G, T]``."""
    whole = (position + 1) // 16
    candidates = range(1, whole - 8)
    mass = {b: weight[:, 16 * b : 16 * b + 16].sum() for b in candidates}
    best = sorted(candidates, key=lambda b: (-mass[b], b))[: round(weight.shape[1] // 16 / 32)]
    kept = [t for b in best for t in range(16 * b, 16 * b + 16)]
    return [*range(16), *kept, *range(16 * (whole - 8), position + 1)]


def slowly(keys: F64, values: F64, queries: F64, at: F64) -> tuple[F64, F64]:
    """Scale and value of each query head by np.linalg.lstsq, one query after the other."""
    tokens, group = len(keys), queries.shape[1]
    rows: list[list[F64]] = [[] for _ in range(group)]
    wanted: list[list[F64]] = [[] for _ in range(group)]
    for query, position in zip(queries, at.astype(int), strict=True):
        if position < tokens // 2:
            continue
        weight = np.zeros((group, tokens))
        for g in range(group):
            logits = keys[: position + 1] @ query[g] * SCALE
            part = np.exp(logits - logits.max())
            weight[g, : position + 1] = part / part.sum()
        full = weight @ values
        kept = attended(weight, position)
        shares = 1 - weight[:, kept].sum(1)
        for g in range(group):
            size = np.linalg.norm(full[g])
            near = weight[g, kept] @ values[kept] / weight[g, kept].sum()
            for d in range(values.shape[1]):
                unit = np.eye(values.shape[1])[d]
                rows[g].append(np.concatenate([[near[d]], unit]) * shares[g] / size)
                wanted[g].append((full[g, d] - near[d]) / size)
    scales, offsets = [], []
    for x, y in zip(rows, wanted, strict=True):
        square = np.array(x).T @ np.array(x)
        square[np.diag_indices_from(square)] *= 1 + RIDGE
        found = np.linalg.solve(square, np.array(x).T @ np.array(y))
        scales.append(found[0])
        offsets.append(found[1:])
    return np.array(scales), np.array(offsets)


@pytest.mark.parametrize(("tokens", "group"), [(512, 1), (1024, 3), (701, 2)])
def test_it_is_the_least_squares_fit(tokens: int, group: int) -> None:
    keys, values, queries, at = prompt(tokens, group=group)
    scale, value = slowly(keys, values, queries, at)
    found = stand_in_of(keys, values, queries, at.astype(np.int64), SCALE)
    np.testing.assert_allclose(found.scale, TRUST * scale, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.value, TRUST * value, rtol=1e-4, atol=1e-5)
    assert np.abs(found.value).max() > 0.05


def test_a_head_that_leaves_nothing_out_and_a_short_prompt_learn_nothing() -> None:
    keys, values, queries, at = prompt(1024)
    keys[5] = 500 * np.sign(queries.mean((0, 1)))
    for query in queries.reshape(-1, 8):
        query[...] = np.abs(query) * np.sign(keys[5])  # all look at a token of the first group
    found = stand_in_of(keys, values, queries, at.astype(np.int64), SCALE)
    assert np.abs(found.scale).max() < 1e-6
    assert np.abs(found.value).max() < 1e-6
    short = stand_in_of(keys[:511], values[:511], queries, at, SCALE)
    assert not short.value.any()
    assert short.value.shape == (3, 6)


def test_outputs_come_nearer_to_full_attention() -> None:
    """For queries that were not learned from: the first tokens' values are not like the rest."""
    keys, values, queries, at = prompt(1024)
    values[:16] = -20
    learned = stand_in_of(keys, values, queries[::2], at[::2].astype(np.int64), SCALE)
    before = after = 0.0
    for query, position in zip(queries[129::2], at[129::2].astype(int), strict=True):
        weight = np.zeros((3, 1024))
        weight[:, : position + 1] = np.exp(query @ keys[: position + 1].T * SCALE)
        weight /= weight.sum(1, keepdims=True)
        kept = attended(weight, position)
        held = weight[:, kept].sum(1)
        near = weight[:, kept] @ values[kept] / held[:, None]
        full = weight @ values
        made_up = with_stand_in(near.astype(np.float32), 1 - held, learned)
        before += float(np.linalg.norm(near - full))
        after += float(np.linalg.norm(made_up - full))
    assert after < 0.8 * before


def samples(**changes: object) -> HeadSamples:
    keys, values, queries, at = prompt(600)
    given = {
        "keys": keys,
        "values": values,
        "positions": np.arange(600),
        "queries": queries,
        "query_positions": at.astype(np.int64),
        "rope": None,
        "logit_scale": SCALE,
        "group_size": 3,
        "value_dim": 6,
    }
    return HeadSamples(**(given | changes))


def test_samples_that_are_not_a_prompts_first_tokens_learn_nothing() -> None:
    for one in (
        samples(values=None),
        samples(queries=None, query_positions=None),
        samples(positions=np.arange(1, 601)),
    ):
        (found,) = stand_ins([one])
        assert not found.scale.any()
        assert found.value.shape == (3, 6)
    (found,) = stand_ins([samples()])
    assert found.value.any()


def test_nothing_changes_nothing() -> None:
    out = np.random.default_rng(3).standard_normal((5, 4, 3, 6)).astype(np.float32)
    share = np.full((5, 4, 3), 0.7, np.float32)
    assert (with_stand_in(out, share, StandIn.nothing(3, 6)) == out).all()
    given = StandIn(np.full(3, -1, np.float32), np.full((3, 6), 2, np.float32))
    np.testing.assert_allclose(with_stand_in(out, share, given), 0.3 * out + 1.4, rtol=1e-5)
