"""Learned sinks: a logit a query head that joins the softmax and has no value."""

from __future__ import annotations

import numpy as np
import pytest

from hsswap.config import LayerGroup
from hsswap.driver.operations import AttentionState, FinalizeWork
from hsswap.errors import ArgumentError
from tests.driver import oracle
from tests.driver.rig import Rig, random_codes

GROUPS = [
    LayerGroup(1, 6, 2, 16),
    LayerGroup(1, 4, 4, 24, 40, soft_cap=5.0),
    LayerGroup(1, 8, 1, 64, window=100),
    LayerGroup(1, 8, 2, 128, scale=0.7),
]


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("sink_scale", [1.0, 60.0])
def test_a_sink_takes_its_share(rig: Rig, group: LayerGroup, rows: int, sink_scale: float) -> None:
    """With weight exp(sink) beside exp(lse) a row keeps 1 / (1 + exp(sink - lse)) of its output."""
    rng = np.random.default_rng(5)
    lengths = [333, 20]
    cache = rig.cache(rng, group, 16, lengths)
    queries = random_codes(rng, (2, rows, group.q_heads, group.head_dim))
    sinks = (rng.standard_normal(group.q_heads) * sink_scale).astype(np.float32)
    got = rig.attend(cache, queries, lengths, tile_spans=1, sinks=sinks)
    heads = oracle.Heads(group.group_size, group.logit_scale, group.window, group.soft_cap)
    for s, length in enumerate(lengths):
        wanted = oracle.attend(queries[s], cache.keys[s], cache.values[s], length, heads)
        lse = np.logaddexp(wanted.lse, sinks.astype(np.float64))
        kept = np.exp(wanted.lse - lse)[..., None]
        tolerance = oracle.FACTOR * max(
            oracle.relative_error(wanted.usual * kept, wanted.exact * kept), oracle.FLOOR
        )
        out = oracle.decode(got.out[s])
        assert oracle.relative_error(out, wanted.exact * kept) <= tolerance
        np.testing.assert_allclose(got.lse[s], lse, rtol=1e-5, atol=1e-5)


def test_no_weight_in_a_sink_changes_no_bit(rig: Rig) -> None:
    group = GROUPS[0]
    rng = np.random.default_rng(6)
    cache = rig.cache(rng, group, 16, [100])
    queries = random_codes(rng, (1, 2, group.q_heads, group.head_dim))
    without = rig.attend(cache, queries, [100])
    sinks = np.full(group.q_heads, -np.inf, np.float32)
    assert rig.attend(cache, queries, [100], sinks=sinks).bits() == without.bits()


def test_a_row_that_sees_nothing_but_its_sink_is_zero(rig: Rig) -> None:
    group = GROUPS[0]
    rng = np.random.default_rng(7)
    cache = rig.cache(rng, group, 16, [0])
    queries = random_codes(rng, (1, 1, group.q_heads, group.head_dim))
    sinks = rng.standard_normal(group.q_heads).astype(np.float32)
    got = rig.attend(cache, queries, [0], sinks=sinks)
    assert not got.out.any()
    np.testing.assert_allclose(got.lse[0, 0], sinks, rtol=1e-6)


def test_sinks_of_other_heads_are_refused(rig: Rig) -> None:
    zeros = rig.tensor(np.zeros((1, 1, 6, 16), np.float32))
    row = rig.tensor(np.zeros((1, 1, 6), np.float32))
    out = rig.tensor(np.zeros((1, 1, 6, 16), np.uint16))
    work = FinalizeWork(
        AttentionState(row, row, zeros), out, sinks=rig.tensor(np.zeros(5, np.float32))
    )
    with pytest.raises(ArgumentError, match="sinks"):
        rig.device.finalize(rig.stream, work)
