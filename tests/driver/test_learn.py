"""Learning what stands in for blocks left out, on every device, against float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hsswap.config import LayerGroup
from hsswap.driver.choice_operations import LearnWork
from hsswap.driver.operations import AttendWork, AttentionState, FinalizeWork
from hsswap.driver.tensor import Tensor
from hsswap.errors import ArgumentError
from hsswap.fitting import fitted, sums_of
from hsswap.halves import narrow
from tests.driver import oracle
from tests.driver.rig import Rig, random_codes

GROUPS = [
    LayerGroup(1, 6, 2, 16),
    LayerGroup(1, 4, 4, 24, 40),
    LayerGroup(1, 8, 1, 64, 256),
    LayerGroup(1, 4, 2, 64, dtype="f16"),
]
LENGTH, ROWS = 150, 5


def lesson(rig: Rig, group: LayerGroup, seed: int) -> tuple[LearnWork, AttendWork]:
    """Rows over part of a cache's blocks, and what is known of attention over all of them."""
    rng = np.random.default_rng(seed)
    cache = rig.cache(rng, group, 16, [LENGTH])
    queries = random_codes(rng, (1, ROWS, group.q_heads, group.head_dim), 1.0, group.dtype)
    heads = oracle.Heads(group.group_size, group.logit_scale)
    whole = oracle.attend(queries[0], cache.keys[0], cache.values[0], LENGTH, heads)
    taken = [0, 3, 4, 9]  # the rows themselves are in block 9
    poison = np.full((ROWS, 1, group.q_heads, group.value_dim), np.nan, np.float32)
    state = AttentionState(*(rig.tensor(p) for p in (poison[..., 0], poison[..., 0], poison)))
    slots = np.repeat(cache.slots[:, :, taken], ROWS, axis=0)
    positions = np.tile(np.array(taken, np.int32), (ROWS, group.kv_heads, 1))
    by_row, lengths = rig.tensor(queries.swapaxes(0, 1).copy()), LENGTH - np.arange(ROWS)[::-1]
    work = AttendWork(by_row, lengths, cache.units, slots, 0, positions, 16, state, True)
    codes = narrow(whole.exact.astype(np.float32), group.dtype)
    # As it is kept: rows of a head beside each other, with something behind each.
    by_head = rig.tensor(np.pad(codes.transpose(1, 0, 2), ((0, 0), (0, 2), (0, 0))))
    step = 2 * group.value_dim
    strides = (step, (ROWS + 2) * step, 2)
    full = Tensor(by_head.address, codes.shape, strides, by_head.dtype, by_head.on_device, by_head)
    q, dv = group.q_heads, group.value_dim
    outputs = (np.full(shape, np.nan, np.float32) for shape in ((q, 2 * dv + 3), (q,), (q, dv)))
    between = np.stack((whole.lse, np.full_like(whole.lse, np.nan)), axis=1).reshape(-1, q)
    lse = rig.tensor(between.astype(np.float32)).every(2, 0, ROWS)
    return LearnWork(state, full, lse, True, *(rig.tensor(array) for array in outputs)), work


@pytest.mark.parametrize("group", GROUPS)
def test_it_fits_what_the_choice_lacks(rig: Rig, group: LayerGroup) -> None:
    """From the state as attention has left it, which is checked elsewhere."""
    first, first_rows = lesson(rig, group, 5)
    other, other_rows = lesson(rig, group, 6)
    other = replace(other, begin=False, sums=first.sums, scale=first.scale, value=first.value)
    sums = np.zeros(first.sums.shape)
    shape = (ROWS, 1, group.q_heads, group.value_dim)
    for learn, rows in ((first, first_rows), (other, other_rows)):
        out = rig.tensor(np.zeros(shape, np.uint16 if group.dtype == "bf16" else np.float16))
        lse = rig.tensor(np.zeros(shape[:3], np.float32))
        rig.device.attend(rig.stream, rows)
        rig.device.finalize(rig.stream, FinalizeWork(rows.state, out, lse))
        rig.device.learn(rig.stream, learn)
        rig.stream.synchronize()
        near = rows.state.weighted.array()[:, 0].astype(np.float64)
        near /= rows.state.total.array()[:, 0, :, None]
        share = 1 - np.exp(lse.array()[:, 0].astype(np.float64) - learn.full_lse.array())
        assert 0.1 < share.mean() < 0.9
        sums = sums + sums_of(near, oracle.decode(learn.full.array()), share)
        scale, value = fitted(sums)
        assert np.abs(value).max() > 0.1
        np.testing.assert_allclose(first.sums.array(), sums, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(first.scale.array(), scale, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(first.value.array(), value, rtol=1e-3, atol=1e-3)


def test_rows_that_saw_nothing_or_lack_nothing_teach_nothing(rig: Rig) -> None:
    learn, rows = lesson(rig, GROUPS[0], 7)
    nowhere = replace(rows, slots=np.full_like(np.asarray(rows.slots), -1))
    rig.device.attend(rig.stream, nowhere)
    rig.device.learn(rig.stream, learn)
    rig.stream.synchronize()
    assert not learn.value.array().any()
    assert not learn.scale.array().any()
    assert not learn.sums.array().any()
    rig.device.attend(rig.stream, rows)
    lse = np.full(learn.full_lse.shape, -50, np.float32)  # the choice holds more than everything
    rig.device.learn(rig.stream, replace(learn, full_lse=rig.tensor(lse)))
    rig.stream.synchronize()
    assert not learn.value.array().any()
    assert not learn.scale.array().any()


ODD = [("total", np.nan), ("full_lse", np.nan)]
ODD += [(name, odd) for name in ("full", "weighted") for odd in (np.nan, np.inf, -np.inf, 3e38)]


@pytest.mark.parametrize(("name", "odd"), ODD)
def test_a_row_that_is_no_number_teaches_nothing(rig: Rig, name: str, odd: float) -> None:
    """The others teach what they teach without it."""
    learn, rows = lesson(rig, GROUPS[0], 9)
    rig.device.attend(rig.stream, rows)
    rig.stream.synchronize()
    state, row = rows.state, 2

    def without(tensor: Tensor) -> Tensor:
        return rig.tensor(np.delete(tensor.array(), row, 0))

    def empty(tensor: Tensor) -> Tensor:
        return rig.tensor(np.full(tensor.shape, np.nan, np.float32))

    wanted = replace(
        learn,
        state=AttentionState(*map(without, (state.maximum, state.total, state.weighted))),
        full=without(learn.full),
        full_lse=without(learn.full_lse),
        sums=empty(learn.sums),
        scale=empty(learn.scale),
        value=empty(learn.value),
    )
    codes = narrow(np.full(learn.full.shape[1:], odd, np.float32), learn.full.dtype)
    tensor = getattr(state if name in ("total", "weighted") else learn, name)
    tensor.array()[row] = codes if name == "full" else odd
    rig.device.learn(rig.stream, learn)
    rig.device.learn(rig.stream, wanted)
    rig.stream.synchronize()
    for part in ("sums", "scale", "value"):
        got, same = getattr(learn, part).array(), getattr(wanted, part).array()
        np.testing.assert_allclose(got, same, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["full", "full_lse", "sums", "scale", "value"])
def test_other_shapes_are_refused(rig: Rig, name: str) -> None:
    learn, _ = lesson(rig, GROUPS[0], 8)
    wrong = getattr(learn, name)
    shape = (wrong.shape[0] + 1, *wrong.shape[1:])
    wrong = Tensor(wrong.address, shape, wrong.strides, wrong.dtype, wrong.on_device, wrong)
    with pytest.raises(ArgumentError):
        rig.device.learn(rig.stream, replace(learn, **{name: wrong}))  # type: ignore[arg-type]
