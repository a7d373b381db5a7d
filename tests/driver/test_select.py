"""Select against a plain model: one head, one block, one slot at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from hsswap.driver.operations import SelectWork, UnitCache
from hsswap.errors import ArgumentError
from tests.driver.rig import I32, Rig

F32 = NDArray[np.float32]


@dataclass
class Place:
    """One slot of a head's cache."""

    slot: int
    owner: int = -1
    mass: float = 0.0
    used: int = 0


@dataclass(frozen=True)
class Choice:
    """What select says for one head."""

    chosen: list[int]
    slots: list[int]
    missing: list[int]
    left_out: float


class Model:
    """The documented behaviour of one KV head."""

    def __init__(self, slots: list[int]) -> None:
        self.places = [Place(slot) for slot in slots]

    def select(
        self,
        scores: list[float],
        k: int,
        pinned: list[int],
        step: int,
        decay: float,
        last: dict[int, float],
    ) -> Choice:
        for place in self.places:
            place.mass = float(np.float32(place.mass) * np.float32(decay))
            if place.owner in last:
                place.mass = float(np.float32(place.mass) + np.float32(last[place.owner]))
        held = set(pinned)
        others = [b for b in range(len(scores)) if b not in held]
        others.sort(key=lambda b: (-scores[b], b))
        chosen = sorted([*pinned, *others[:k]])
        taken = set(chosen)
        missing: list[int] = []
        slots: list[int] = []
        kept = {p.owner for p in self.places} & set(chosen)
        victims = self._victims(taken, len(taken) - len(kept))
        for block in chosen:
            missing.append(0 if block in kept else 1)
            if block in kept:
                (place,) = [p for p in self.places if p.owner == block]
            else:
                place = victims.pop(0)
                place.owner, place.mass = block, 0.0
            place.used = step
            slots.append(place.slot)
        return Choice(chosen, slots, missing, self._left_out(scores[::-1], taken))

    def _victims(self, chosen: set[int], count: int) -> list[Place]:
        """As many places as are given away, in the order in which they lie."""
        others = [i for i, p in enumerate(self.places) if p.owner not in chosen]
        others.sort(key=lambda i: self._worth(self.places[i]))  # the first of equals stays first
        return [self.places[i] for i in sorted(others[:count])]

    @staticmethod
    def _worth(place: Place) -> tuple[bool, float, int]:
        return (False, 0, 0) if place.owner == -1 else (True, place.mass, place.used)

    @staticmethod
    def _left_out(scores: list[float], chosen: set[int]) -> float:
        top = max(scores)
        if math.isinf(top):
            weight = [1.0 if s == top else 0.0 for s in scores]
        else:
            weight = [math.exp(s - top) for s in scores]
        return sum(w for b, w in enumerate(weight) if b not in chosen) / sum(weight)


class Selector:
    """A cache on the device, and its model for each head."""

    def __init__(self, rig: Rig, heads: int, places: int, rng: np.random.Generator) -> None:
        self.rig = rig
        slots = rng.permutation(heads * places + 5)[: heads * places].reshape(heads, places)
        self.cache = UnitCache(
            rig.tensor(slots.astype(np.int32)),
            rig.tensor(np.full((heads, places), -1, np.int32)),
            rig.tensor(np.zeros((heads, places), np.float32)),
            rig.tensor(np.zeros((heads, places), np.int32)),
        )
        self.models = [Model(row.tolist()) for row in slots]
        self.step = 0
        self.last: tuple[I32, F32] | None = None

    def select(self, scores: F32, k: int, pinned: list[int], decay: float = 0.75) -> list[Choice]:
        """Run one step on the device."""
        heads, blocks = scores.shape
        count = min(blocks, len(pinned) + k)
        self.step += 1
        tensor = self.rig.tensor
        work = SelectWork(
            scores=tensor(scores),
            shares=tensor(scores[:, ::-1].copy()),
            k=k,
            pinned=np.array(pinned, np.int32),
            cache=self.cache,
            step=self.step,
            decay=decay,
            last_chosen=None if self.last is None else tensor(self.last[0]),
            last_mass=None if self.last is None else tensor(self.last[1]),
            chosen=tensor(np.full((heads, count), -7, np.int32)),
            chosen_slots=tensor(np.full((heads, count), -7, np.int32)),
            missing=tensor(np.full((heads, count), 77, np.uint8)),
            left_out=tensor(np.full(heads, np.nan, np.float32)),
        )
        self.rig.device.select(self.rig.stream, work)
        self.rig.stream.synchronize()
        results = (work.chosen, work.chosen_slots, work.missing, work.left_out)
        return [Choice(*(r.array()[h].tolist() for r in results)) for h in range(heads)]

    def check(self, scores: F32, k: int, pinned: list[int]) -> list[Choice]:
        """One step on the device and in the models; both must agree."""
        got = self.select(scores, k, pinned)
        last = self.last
        for h, model in enumerate(self.models):
            gained = (
                {}
                if last is None
                else dict(zip(last[0][h].tolist(), last[1][h].tolist(), strict=True))
            )
            wanted = model.select(scores[h].tolist(), k, pinned, self.step, 0.75, gained)
            assert got[h].chosen == wanted.chosen
            assert got[h].slots == wanted.slots
            assert got[h].missing == wanted.missing
            assert got[h].left_out == pytest.approx(wanted.left_out, rel=1e-5, abs=1e-7)
            places = model.places
            assert self.cache.owner.array()[h].tolist() == [p.owner for p in places]
            assert self.cache.used.array()[h].tolist() == [p.used for p in places]
            assert self.cache.mass.array()[h].tolist() == [p.mass for p in places]
        return got


@pytest.mark.parametrize("seed", range(20))
def test_random_steps_follow_the_model(rig: Rig, seed: int) -> None:
    rng = np.random.default_rng(seed)
    heads, places = int(rng.integers(1, 5)), int(rng.integers(4, 20))
    selector = Selector(rig, heads, places, rng)
    blocks = int(rng.integers(1, 30))
    for _ in range(8):
        blocks += int(rng.integers(0, 3))
        pinned = rng.permutation(blocks)[: int(rng.integers(0, 3))].tolist()
        k = int(rng.integers(0, places - len(pinned) + 1))
        if rng.random() < 0.5:  # many ties
            scores = rng.integers(-2, 3, (heads, blocks)).astype(np.float32)
        else:
            scores = (rng.standard_normal((heads, blocks)) * 5).astype(np.float32)
        scores[rng.random(scores.shape) < 0.2] = -np.inf
        got = selector.check(scores, k, pinned)
        chosen = np.array([choice.chosen for choice in got], np.int32).reshape(heads, -1)
        # Coarse masses, so that victims tie in mass and are told apart by use and place.
        mass = rng.integers(0, 2, chosen.shape).astype(np.float32)
        selector.last = (chosen, mass)


@pytest.mark.parametrize("blocks", [900, 1025, 3001, 5000, 9000])
@pytest.mark.parametrize("kind", ["normal", "coarse", "equal", "one apart"])
def test_long_lists_follow_the_model(rig: Rig, blocks: int, kind: str) -> None:
    """Lists of more candidates than a kernel keeps, and fewer; pins among them; many victims."""
    rng = np.random.default_rng(blocks)
    places, k, heads = 330, 270, 1
    selector = Selector(rig, heads, places, rng)
    for turn in range(2):
        scores = rng.standard_normal((heads, blocks)).astype(np.float32)
        if kind == "coarse":
            scores = np.round(scores)
        elif kind == "equal":
            scores[...] = 1.5
        elif kind == "one apart":  # the best of every thread are the same, and the rest far away
            scores[:, ::3] = 7.0
        scores[:, rng.permutation(blocks)[:40]] = -np.inf
        pinned = [0, *range(blocks - 8, blocks)]
        got = selector.check(scores, k if turn else 100, pinned)
        chosen = np.array([choice.chosen for choice in got], np.int32).reshape(heads, -1)
        selector.last = (chosen, rng.integers(0, 3, chosen.shape).astype(np.float32))


@pytest.mark.parametrize("value", [0.0, -3.5, -np.inf, np.inf, np.nan])
def test_equal_scores_go_to_the_lowest_blocks(rig: Rig, value: float) -> None:
    selector = Selector(rig, 2, 6, np.random.default_rng(0))
    got = selector.select(np.full((2, 9), value, np.float32), 3, [7])
    for choice in got:
        assert choice.chosen == [0, 1, 2, 7]
        assert choice.missing == [1, 1, 1, 1]
        assert choice.left_out == pytest.approx(5 / 9)


def test_fewer_finite_scores_than_k(rig: Rig) -> None:
    selector = Selector(rig, 1, 5, np.random.default_rng(0))
    scores = np.array([[-np.inf, -np.inf, 1.0, -np.inf, -np.inf, -np.inf]], np.float32)
    (choice,) = selector.check(scores, 4, [])
    assert choice.chosen == [0, 1, 2, 3]
    assert choice.left_out == 0


def test_more_asked_than_there_is(rig: Rig) -> None:
    selector = Selector(rig, 1, 8, np.random.default_rng(0))
    (choice,) = selector.check(np.zeros((1, 3), np.float32), 8, [1])
    assert choice.chosen == [0, 1, 2]
    assert choice.left_out == 0


def test_no_blocks(rig: Rig) -> None:
    selector = Selector(rig, 2, 4, np.random.default_rng(0))
    for choice in selector.select(np.zeros((2, 0), np.float32), 4, []):
        assert choice == Choice([], [], [], 0.0)


def test_victims_by_mass_then_use_then_place(rig: Rig) -> None:
    selector = Selector(rig, 1, 4, np.random.default_rng(0))

    def step(chosen: list[int], mass: list[float]) -> Choice:
        scores = np.full((1, 12), -1.0, np.float32)
        scores[0, chosen] = 1
        (choice,) = selector.check(scores, len(chosen), [])
        selector.last = (np.array([choice.chosen], np.int32), np.array([mass], np.float32))
        return choice

    owners = selector.cache.owner.array()
    step([0, 1, 2, 3], [0.5, 0.0, 0.0, 0.0])
    assert owners[0].tolist() == [0, 1, 2, 3]
    step([1], [0.0])  # 1 was used later than 2 and 3
    step([8], [0.0])  # 2 and 3 tie in mass and use: the lower place goes
    assert owners[0].tolist() == [0, 1, 8, 3]
    step([9], [0.0])
    assert owners[0].tolist() == [0, 1, 8, 9]
    step([10], [0.0])  # then 1, before the later 8 and 9, and 0 has mass
    assert owners[0].tolist() == [0, 10, 8, 9]
    assert step([0], [0.0]).missing == [0]


def test_owners_past_the_last_block_are_victims(rig: Rig) -> None:
    """A sequence that was cut back after its cache was filled."""
    selector = Selector(rig, 1, 3, np.random.default_rng(0))
    selector.check(np.arange(9, dtype=np.float32)[None], 3, [])
    selector.check(np.arange(4, dtype=np.float32)[None], 2, [])
    assert sorted(selector.cache.owner.array()[0].tolist()) == [2, 3, 8]


def test_bad_arguments_are_refused(rig: Rig) -> None:
    selector = Selector(rig, 1, 3, np.random.default_rng(0))
    scores = np.zeros((1, 9), np.float32)
    with pytest.raises(ArgumentError, match="3 slots a head; 4"):
        selector.select(scores, 4, [])
    with pytest.raises(ArgumentError, match="twice"):
        selector.select(scores, 1, [2, 2])
    with pytest.raises(ArgumentError, match="pinned holds"):
        selector.select(scores, 1, [9])
    with pytest.raises(ArgumentError, match="k is -1"):
        selector.select(scores, -1, [1])
