"""Trim against a plain loop: fewer blocks within a bound on the share left out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hsswap.driver.choice_operations import TrimWork
from hsswap.driver.operations import SelectWork, UnitCache
from hsswap.errors import ArgumentError
from tests.driver.rig import Rig

HEADS, PLACES = 3, 40


def choose(
    rig: Rig, scores: np.ndarray, pinned: list[int], k: int, shares: np.ndarray | None = None
) -> TrimWork:
    """Select, and the trim behind it, with bound 0 and none to be kept."""
    count = len(pinned) + k

    def filled(dtype: type, *shape: int) -> np.ndarray:
        return np.full(shape, 7, dtype)

    slots = np.arange(HEADS * PLACES, dtype=np.int32).reshape(HEADS, PLACES)
    cache = UnitCache(
        rig.tensor(slots),
        rig.tensor(filled(np.int32, HEADS, PLACES)),
        rig.tensor(filled(np.float32, HEADS, PLACES)),
        rig.tensor(filled(np.int32, HEADS, PLACES)),
    )
    work = SelectWork(
        scores=rig.tensor(scores),
        shares=rig.tensor(scores if shares is None else shares),
        k=k,
        pinned=np.array(pinned, np.int32),
        cache=cache,
        step=0,
        decay=0.5,
        last_chosen=None,
        last_mass=None,
        chosen=rig.tensor(filled(np.int32, HEADS, count)),
        chosen_slots=rig.tensor(filled(np.int32, HEADS, count)),
        missing=rig.tensor(filled(np.uint8, HEADS, count)),
        left_out=rig.tensor(filled(np.float32, HEADS)),
    )
    rig.device.select(rig.stream, work)
    rig.stream.synchronize()
    return TrimWork(
        scores=work.scores,
        shares=work.shares,
        pinned=work.pinned,  # type: ignore[arg-type]
        bound=0.0,
        least=0,
        cache=cache,
        chosen=work.chosen,
        chosen_slots=work.chosen_slots,
        missing=work.missing,
        left_out=work.left_out,
    )


def shares_of(scores: np.ndarray) -> np.ndarray:
    weight = np.exp(scores.astype(np.float64) - scores.max())
    shares: np.ndarray = weight / weight.sum()
    return shares


@pytest.mark.parametrize("bound", [0.0, 0.05, 0.3, 1.0])
@pytest.mark.parametrize("least", [0, 4, 12])
@pytest.mark.parametrize("blocks", [60, 700])
def test_only_what_the_bound_needs(rig: Rig, bound: float, least: int, blocks: int) -> None:
    random = np.random.default_rng(int(100 * bound) + least + blocks)
    scores = (random.standard_normal((HEADS, blocks)) * 3).astype(np.float32)
    scores[1, 5:20] = scores[1].max() - 1  # equal ones
    pinned, k = [0, blocks - 2, blocks - 1], 12
    shares = (scores + random.standard_normal(scores.shape)).astype(np.float32)
    work = choose(rig, scores, pinned, k, shares)
    before = work.chosen.array().copy()
    slots = work.chosen_slots.array().copy()
    held = random.random(before.shape) < 0.5  # as if these had been in the cache before
    work.missing.array()[held] = 0
    missing = work.missing.array().copy()
    trimmed = TrimWork(
        work.scores, work.shares, work.pinned, bound, least, work.cache, work.chosen,
        work.chosen_slots, work.missing, work.left_out,
    )  # fmt: skip
    rig.device.trim(rig.stream, trimmed)
    rig.stream.synchronize()
    for head in range(HEADS):
        share = shares_of(shares[head])
        others = sorted(set(before[head].tolist()) - set(pinned))
        others.sort(key=lambda b: (-scores[head, b], b))
        kept = set(others)
        left = 1 - share[before[head]].sum()
        for block in reversed(others):
            if len(kept) <= least or left + share[block] > bound + 1e-6:
                break
            kept.remove(block)
            left += share[block]
        got = work.chosen.array()[head]
        assert set(got[got >= 0].tolist()) == kept | set(pinned)
        assert work.left_out.array()[head] == pytest.approx(left, abs=1e-5)
        gone = got < 0
        assert (work.chosen_slots.array()[head] == np.where(gone, -1, slots[head])).all()
        assert (work.missing.array()[head] == np.where(gone, 0, missing[head])).all()
        owner = set(work.cache.owner.array()[head].tolist())
        lost = set(before[head, gone & (missing[head] != 0)].tolist())
        assert not owner & lost
        assert set(before[head].tolist()) - lost <= owner


@pytest.mark.parametrize("blocks", [50, 1900, 8000, 9000])
@pytest.mark.parametrize("bound", [0.02, 0.4])
def test_the_bound_holds_to_the_last_rounding(rig: Rig, bound: float, blocks: int) -> None:
    """What is really left out, in float64, is what ``left_out`` says, and within the bound; a block
    more would not be. Rounding is all the margin: 2^-24 for each of the sums of a float32 share
    (a thread's part of the blocks, and over the threads) and of the shares given up, and 2^-20 of
    an exponential down to e^-16.
    """
    random = np.random.default_rng(blocks)
    shares = (random.standard_normal((HEADS, blocks)) * 2.5).astype(np.float32)
    scores = (shares + random.standard_normal(shares.shape)).astype(np.float32)
    work = choose(rig, scores, [0, blocks - 1], 35, shares)
    before = work.chosen.array().copy()
    exact = np.array([shares_of(row) for row in shares])
    outside = np.array([1 - e[chosen].sum() for e, chosen in zip(exact, before, strict=True)])
    sums = blocks / 256 + 16 + 37
    margin = sums * 2.0**-24 + 2.0**-20
    assert np.abs(work.left_out.array() - outside).max() < margin
    bounds = outside.max() + bound * (1 - outside.max())  # each head can give something up
    trimmed = replace(work, bound=float(np.float32(bounds)))
    rig.device.trim(rig.stream, trimmed)
    rig.stream.synchronize()
    given_up = 0
    for head in range(HEADS):
        kept = work.chosen.array()[head]
        kept = kept[kept >= 0]
        left = 1 - exact[head, kept].sum()
        assert abs(work.left_out.array()[head] - left) < margin
        assert left < bounds + margin
        others = kept[(kept != 0) & (kept != blocks - 1)]
        worst = others[np.lexsort((-others, scores[head, others]))[0]]
        assert left + exact[head, worst] > bounds - margin
        given_up += before.shape[1] - len(kept)
    assert given_up > 0


def test_scores_that_are_no_numbers(rig: Rig) -> None:
    scores = np.full((HEADS, 30), -np.inf, np.float32)
    scores[1, 3] = np.inf
    scores[2, 4:8] = np.nan
    scores[2, 9] = 0
    work = choose(rig, scores, [0], 5)
    work = TrimWork(
        work.scores, work.shares, work.pinned, 0.5, 1, work.cache, work.chosen, work.chosen_slots,
        work.missing, work.left_out,
    )  # fmt: skip
    rig.device.trim(rig.stream, work)
    rig.stream.synchronize()
    counts = (work.chosen.array() >= 0).sum(1)
    assert counts.tolist() == [6, 2, 2]  # all count the same; one has it all; one number
    assert 3 in work.chosen.array()[1]
    assert 9 in work.chosen.array()[2]


def test_wrong_arguments_are_refused(rig: Rig) -> None:
    work = choose(rig, np.zeros((HEADS, 30), np.float32), [0], 5)
    with pytest.raises(ArgumentError, match=r"bound is 1\.5"):
        rig.device.trim(
            rig.stream,
            TrimWork(
                work.scores, work.shares, work.pinned, 1.5, 1, work.cache, work.chosen,
                work.chosen_slots, work.missing, work.left_out,
            ),
        )  # fmt: skip
