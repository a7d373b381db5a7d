"""What makes up for attention that a choice lacks: out + R / (R + A) (scale out + value)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hsswap.carving import first_columns
from hsswap.config import LayerGroup
from hsswap.driver.operations import AttendWork, AttentionState, FinalizeWork, LeftOut
from hsswap.errors import ArgumentError
from tests.driver import oracle
from tests.driver.rig import NAN_CODE, Rig, random_codes

GROUPS = [
    LayerGroup(1, 6, 2, 16),
    LayerGroup(1, 4, 4, 24, 40),
    LayerGroup(1, 8, 1, 64),
    LayerGroup(1, 8, 2, 128),
    LayerGroup(1, 4, 2, 64, dtype="f16"),
]


BLOCKS, ENTRIES = 70, 9


def given(rig: Rig, rng: np.random.Generator, group: LayerGroup, blocks: int = BLOCKS) -> LeftOut:
    """Blocks of which some are unknown and some chosen, with room behind every row."""
    predicted = rng.standard_normal((group.q_heads, blocks + 13)).astype(np.float32)
    predicted[:, blocks:] = np.nan
    predicted[:, rng.choice(blocks, 5)] = -np.inf
    chosen = np.stack(
        [rng.choice(blocks, ENTRIES, replace=False) for _ in range(group.kv_heads)]
    ).astype(np.int32)
    chosen[:, 3] = -1
    scale = rng.standard_normal(group.q_heads).astype(np.float32)
    value = 3 * rng.standard_normal((group.q_heads, group.value_dim)).astype(np.float32)
    tensors = [rig.tensor(array) for array in (predicted, chosen, scale, value)]
    return LeftOut(first_columns(tensors[0], blocks), *tensors[1:])


def made_up(exact: np.ndarray, lse: np.ndarray, left_out: LeftOut) -> np.ndarray:
    """In float64, one query head at a time."""
    out = np.empty_like(exact)
    chosen, predicted = left_out.chosen.array(), left_out.predicted.array()
    for q in range(exact.shape[1]):
        taken = chosen[q * len(chosen) // exact.shape[1]].tolist()
        rest = [b for b in range(predicted.shape[1]) if b not in taken]
        mass = np.exp(predicted[q, rest].astype(np.float64)).sum()
        share = mass / (mass + np.exp(lse[0, q]))
        lacking = left_out.scale.array()[q] * exact[:, q] + left_out.value.array()[q]
        out[:, q] = exact[:, q] + share * lacking
    return out


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("length", [333, 20])
@pytest.mark.parametrize("in_attend", [False, True])
def test_outputs_are_made_up_for(rig: Rig, group: LayerGroup, length: int, in_attend: bool) -> None:
    rng = np.random.default_rng(5)
    cache = rig.cache(rng, group, 16, [length])
    queries = random_codes(rng, (1, 1, group.q_heads, group.head_dim), 1.0, group.dtype)
    shape = (1, 1, group.q_heads, group.value_dim)
    poison = np.full(shape, np.nan, np.float32)
    state = AttentionState(*(rig.tensor(p) for p in (poison[..., 0], poison[..., 0], poison)))
    out = rig.tensor(np.full(shape, NAN_CODE, np.uint16).view(queries.dtype))
    lse = rig.tensor(poison[..., 0])
    left_out = given(rig, rng, group)
    end = FinalizeWork(state, out, lse, left_out=left_out)
    work = AttendWork(
        rig.tensor(queries), np.array([length]), cache.units, cache.slots, 0, None, 16, state, True
    )
    rig.device.attend(rig.stream, replace(work, end=end) if in_attend else work)
    if not in_attend:
        rig.device.finalize(rig.stream, end)
    rig.stream.synchronize()
    heads = oracle.Heads(group.group_size, group.logit_scale)
    wanted = oracle.attend(queries[0], cache.keys[0], cache.values[0], length, heads)
    exact = made_up(wanted.exact, wanted.lse, left_out)
    usual = made_up(wanted.usual, wanted.lse, left_out)
    assert oracle.relative_error(wanted.exact, exact) > 0.05
    floor = oracle.FLOOR if group.dtype == "bf16" else oracle.FLOOR_F16
    tolerance = oracle.FACTOR * max(oracle.relative_error(usual, exact), floor)
    assert oracle.relative_error(oracle.decode(out.array()[0]), exact) <= tolerance
    np.testing.assert_allclose(lse.array()[0], wanted.lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("blocks", [1, 33, 40_000])
def test_any_number_of_blocks(rig: Rig, blocks: int) -> None:
    """Also more than a GPU marks at a time; all but two are left out, or all are chosen."""
    group = GROUPS[0]
    end = plain_end(rig, 1.0, 1.0)
    predicted = np.log(np.full((6, blocks), 1 / blocks, np.float32))
    chosen = np.array([[blocks - 1, -1], [0, blocks - 1 if blocks > 1 else -1]], np.int32)
    left_out = LeftOut(
        rig.tensor(predicted),
        rig.tensor(chosen),
        rig.tensor(np.zeros(6, np.float32)),
        rig.tensor(np.ones((6, group.value_dim), np.float32)),
    )
    rig.device.finalize(rig.stream, replace(end, left_out=left_out))
    rig.stream.synchronize()
    taken = (chosen >= 0).sum(1)
    rest = (blocks - taken) / blocks
    wanted = np.repeat(1 + rest / (1 + rest), 3)[:, None]
    got = oracle.decode(end.out.array()[0, 0])
    np.testing.assert_allclose(got, np.broadcast_to(wanted, got.shape), rtol=2.0**-8)


def plain_end(rig: Rig, weighted: float, total: float) -> FinalizeWork:
    """One row of 6 query heads, 16 dims."""
    row = rig.tensor(np.full((1, 1, 6), total, np.float32))
    maximum = rig.tensor(np.zeros((1, 1, 6), np.float32))
    state = AttentionState(maximum, row, rig.tensor(np.full((1, 1, 6, 16), weighted, np.float32)))
    return FinalizeWork(state, rig.tensor(np.full((1, 1, 6, 16), NAN_CODE, np.uint16)))


def test_a_row_that_saw_nothing_stays_zero_and_no_rest_changes_no_bit(rig: Rig) -> None:
    rng = np.random.default_rng(6)
    left_out = given(rig, rng, GROUPS[0])
    blind = plain_end(rig, 0.0, 0.0)
    rig.device.finalize(rig.stream, replace(blind, left_out=left_out))
    none = replace(left_out, predicted=rig.tensor(np.full((6, 4), -np.inf, np.float32)))
    none = replace(none, chosen=rig.tensor(np.array([[0], [-1]], np.int32)))
    without, with_none = plain_end(rig, 0.7, 3.0), plain_end(rig, 0.7, 3.0)
    rig.device.finalize(rig.stream, without)
    rig.device.finalize(rig.stream, replace(with_none, left_out=none))
    rig.stream.synchronize()
    assert not blind.out.array().any()
    assert (with_none.out.array() == without.out.array()).all()


@pytest.mark.parametrize("name", ["predicted", "chosen", "scale", "value"])
def test_other_shapes_are_refused(rig: Rig, name: str) -> None:
    left_out = given(rig, np.random.default_rng(7), GROUPS[0])
    wrongs = {
        "predicted": np.zeros((5, 70), np.float32),
        "chosen": np.zeros((4, 9), np.int32),
        "scale": np.zeros(5, np.float32),
        "value": np.zeros((6, 15), np.float32),
    }
    wrong = replace(left_out, **{name: rig.tensor(wrongs[name])})
    with pytest.raises(ArgumentError, match=f"left_out.{name}"):
        rig.device.finalize(rig.stream, replace(plain_end(rig, 1.0, 1.0), left_out=wrong))


def test_it_is_of_one_row(rig: Rig) -> None:
    left_out = given(rig, np.random.default_rng(8), GROUPS[0])
    rows = [rig.tensor(np.zeros((1, 2, 6, *tail), np.float32)) for tail in ((), (), (16,))]
    out = rig.tensor(np.zeros((1, 2, 6, 16), np.uint16))
    end = FinalizeWork(AttentionState(*rows), out, left_out=left_out)
    with pytest.raises(ArgumentError, match="of one row"):
        rig.device.finalize(rig.stream, end)
