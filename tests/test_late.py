"""``late_mass``: a top-k step does not wait for blocks of little mass; they come later."""

from __future__ import annotations

from collections.abc import Sequence as Several

import numpy as np
import pytest
from numpy.typing import NDArray

from hsswap import HighSpeedSwap, Sequence, TopK
from hsswap.attending import AttendResult
from hsswap.driver.host_select import numbers_of, shares_of
from hsswap.errors import ConfigError
from hsswap.io.base import Operation, Transfer
from hsswap.io.memory import Fault, FaultKind, MemoryIO
from tests.swap_cases import Case, random_case
from tests.swap_watch import watched, within
from tests.test_topk import DIMS, PINNED, TOKENS, TOP_K, check_row, config, prefill

LENGTH = 1009
LATE = TopK(TOP_K.k, cache_factor=TOP_K.cache_factor, late_mass=1.0)
BEFORE, AFTER = 1008, 700
"""Rows of which the query is asked: both choose among the same blocks."""


@pytest.fixture(scope="module")
def case() -> Case:
    return random_case(DIMS, TOKENS, seed=31)


class Held(MemoryIO):
    """Reads wait while ``holding`` is not None, in it."""

    holding: list[Transfer] | None = None

    @property
    def span_limit(self) -> int:
        """Every read is a transfer."""
        return 0

    def submit(self, batch: Several[Transfer]) -> None:
        kept = [t for t in batch if self.holding is not None and t.operation is Operation.READ]
        if self.holding is not None:
            self.holding += kept
        super().submit([transfer for transfer in batch if transfer not in kept])

    def go(self) -> None:
        """Let them run."""
        held, self.holding = self.holding, None
        super().submit(held or [])

    async def close(self) -> None:
        self.go()  # also where a test has failed
        await super().close()


async def ask(sequence: Sequence, case: Case, row: int) -> AttendResult:
    """The query of a row, after all tokens; awaited."""
    result: AttendResult = await within(lambda: sequence.attend(0, case.queries[0][row : row + 1]))
    await within(result.done)
    return result


async def begin(swap: HighSpeedSwap, case: Case, top_k: TopK) -> Sequence:
    """A sequence whose blocks are on disk, but those that a first step chose."""
    sequence = swap.sequence(top_k=top_k)
    await prefill(sequence, case, LENGTH)
    await swap.flush()
    first = await ask(sequence, case, BEFORE)
    full = LENGTH // 16
    for chosen in listed(first):  # what is always chosen is always waited for
        assert np.isin([0, *range(full - PINNED + 1, full)], chosen).all()
    await within(swap.prefetcher.settle)
    return sequence


def shares(sequence: Sequence) -> NDArray[np.float64]:
    """Of layer 0's full blocks, as scored last, ``[H, B]``."""
    late = sequence._top_k_layers[0].late
    assert late is not None
    return shares_of(numbers_of(late._shares))


def owed(sequence: Sequence) -> NDArray[np.bool_]:
    """Units of layer 0 that have a place and did not come."""
    late = sequence._top_k_layers[0].late
    assert late is not None
    return late._owed


def listed(result: AttendResult) -> list[NDArray[np.int32]]:
    """What each head attended."""
    assert result.chosen is not None
    return [row[row >= 0] for row in result.chosen]


def check(case: Case, result: AttendResult, query: int) -> None:
    """Exact over what was attended. ``query``: the row that was asked."""
    queries = [array.copy() for array in case.queries]
    queries[0][LENGTH - 1] = case.queries[0][query]
    asked = Case(case.dims, case.keys, case.values, queries)
    check_row(asked, 0, LENGTH - 1, np.asarray(result.out), listed(result))


async def wanted_of(case: Case) -> AttendResult:
    """The same second step where every block is waited for."""
    async with watched(config(host_slots=32), io=MemoryIO()) as swap:
        sequence = await begin(swap, case, TOP_K)
        assert sequence._top_k_layers[0].late is None
        return await ask(sequence, case, AFTER)


async def test_a_step_goes_on_without_what_is_on_disk_and_has_it_later(case: Case) -> None:
    io, wanted = Held(), await wanted_of(case)
    async with watched(config(host_slots=32), io=io) as swap:
        sequence = await begin(swap, case, LATE)
        io.holding = []
        result = await ask(sequence, case, AFTER)
        assert io.holding, "nothing had to be read"
        assert result.chosen is not None
        assert wanted.chosen is not None
        left = result.chosen < 0
        assert left.any()
        assert (result.chosen[~left] == wanted.chosen[~left]).all()
        check(case, result, AFTER)
        pairs = zip(shares(sequence), listed(result), strict=True)
        expected = [1 - row[some].sum() for row, some in pairs]
        np.testing.assert_allclose(result.left_out_mass, expected, atol=1e-6)
        assert (result.left_out_mass >= wanted.left_out_mass).all()
        assert result.left_out_mass.sum() > wanted.left_out_mass.sum()
        asked = len(io.holding)
        again = await ask(sequence, case, AFTER)  # nothing came yet, and nothing is read twice
        assert (listed(again)[0] == listed(result)[0]).all()
        assert len(io.holding) == asked
        misses = swap.statistics().misses
        io.go()
        await within(swap.prefetcher.settle)
        later = await ask(sequence, case, AFTER)
        assert later.chosen is not None
        assert (later.chosen == wanted.chosen).all()
        np.testing.assert_allclose(later.left_out_mass, wanted.left_out_mass, atol=1e-6)
        assert (np.asarray(later.out) == np.asarray(wanted.out)).all()
        assert swap.statistics().misses == misses
        assert not owed(sequence)[np.arange(2)[:, None], later.chosen].any()


@pytest.mark.parametrize("kind", [FaultKind.NEVER, FaultKind.ERRNO])
async def test_what_never_comes_is_never_waited_for(case: Case, kind: FaultKind) -> None:
    io = MemoryIO()
    async with watched(config(host_slots=32), io=io) as swap:
        await begin(swap, case, LATE)
        reads = io.operations.count("read")
    io = MemoryIO([Fault(kind, at=reads, count=None, only="read")])
    swap = await HighSpeedSwap.create(config(host_slots=32), io=io)
    try:
        sequence = await begin(swap, case, LATE)
        for row in (AFTER, 600, 500):
            result = await ask(sequence, case, row)
            assert any(len(some) < PINNED + TOP_K.k for some in listed(result))
            check(case, result, row)
    finally:
        await within(swap.close)


@pytest.mark.parametrize("mass", [0.002, 0.01, 0.05])
async def test_only_what_is_worth_less_is_left_out(case: Case, mass: float) -> None:
    """Step after step, with poisoned slots: no unit is used that did not come."""
    top_k = TopK(TOP_K.k, cache_factor=1, late_mass=mass)
    left_out = 0
    async with watched(config(host_slots=32), io=MemoryIO()) as swap:
        sequence = await begin(swap, case, top_k)
        for row in np.random.default_rng(4).integers(100, LENGTH, 40).tolist():
            result = await ask(sequence, case, row)
            check(case, result, row)
            for share, some in zip(shares(sequence), listed(result), strict=True):
                best = np.sort(np.delete(share, [0, *range(55, 63)]))[::-1][: TOP_K.k]
                attended = np.isin(best, share[some])
                assert (best[~attended] <= mass).all()
                left_out += int((~attended).sum())
    assert left_out


async def test_a_cache_that_owes_units_is_not_handed_to_captured_steps(case: Case) -> None:
    io = Held()
    async with watched(config(host_slots=128), io=io) as swap:
        sequence = await begin(swap, case, LATE)
        ranked = sequence._top_k_layers[0]
        step = ranked.step
        ranked.settle()
        assert ranked.step == step > 0
        assert ranked.late is not None
        ranked.late._owed[1, 20] = True
        ranked.settle()
        assert ranked.step == 0
        assert not ranked.late.owes
        check(case, await ask(sequence, case, AFTER), AFTER)


@pytest.mark.parametrize("value", [-0.1, 1.01, float("nan"), "much", True, None])
def test_a_share_is_from_0_to_1(value: object) -> None:
    with pytest.raises(ConfigError, match="late_mass"):
        TopK(4, late_mass=value)  # type: ignore[arg-type]
