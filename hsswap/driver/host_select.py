"""Select and fetch on the host: top-k of each KV head, and the cache slots that hold them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hsswap.driver.choice_operations import FetchWork, TrimWork
from hsswap.driver.host_held import held_indices
from hsswap.driver.host_memory import Scratch
from hsswap.driver.host_ops import units_of_blocks
from hsswap.driver.operations import SelectWork
from hsswap.driver.tensor import Tensor

Bool = NDArray[np.bool_]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Cache:
    """Views of a UnitCache, ``[H, C]``, and where each block is, ``[H, blocks]``, -1: nowhere."""

    owner: NDArray[np.int32]
    mass: NDArray[np.float32]
    used: NDArray[np.int32]
    place_of: Ints


def select(work: SelectWork, scratch: Scratch) -> None:
    """Choose blocks, give each a slot, and say which slots must be filled."""
    scores = numbers_of(work.scores)
    heads = scores.shape[0]
    step = work.step
    if isinstance(step, Tensor):
        held_step = step.array()
        step = int(held_step[0]) if heads else 0
        held_step += 1
    cache = _open_cache(work, step, scores.shape[1])
    _account(work, cache)
    pinned, k = work.pinned, work.k
    if isinstance(pinned, Tensor):
        held = held_indices(pinned, -1, scores.shape[1], "pinned")
        pinned = held[held >= 0]
        k += len(held) - len(pinned)
    is_chosen = _choose(scores, pinned, k)
    # Rows of equal counts: [H, N], ascending within a head.
    chosen = np.nonzero(is_chosen)[1].reshape(heads, -1)
    head = np.arange(heads)[:, None]
    place = cache.place_of[head, chosen]
    missing = place < 0
    _make_room(cache, is_chosen, chosen, place, missing)
    cache.used[head, place] = step
    work.chosen.array()[...] = chosen
    work.chosen_slots.array()[...] = work.cache.slots.array()[head, place]
    work.missing.array()[...] = missing
    work.left_out.array()[...] = _left_out(numbers_of(work.shares), is_chosen)


def trim(work: TrimWork, scratch: Scratch) -> None:
    """Give up chosen blocks that the bound on the share left out does not need."""
    scores, shares = numbers_of(work.scores), numbers_of(work.shares)
    chosen, slots, missing = (t.array() for t in (work.chosen, work.chosen_slots, work.missing))
    owner, left_out = work.cache.owner.array(), work.left_out.array()
    for head in range(len(scores)):
        share = shares_of(shares[head])
        entry = np.flatnonzero(~np.isin(chosen[head], work.pinned))
        block = chosen[head, entry]
        # Worst first: by score, of equal ones the higher block.
        order = entry[np.lexsort((-block, scores[head, block]))]
        lost = left_out[head] + np.cumsum(share[chosen[head, order]])
        most = max(0, len(order) - work.least)
        given_up = order[: min(most, int(np.count_nonzero(lost <= work.bound)))]
        if not len(given_up):
            continue
        left_out[head] = lost[len(given_up) - 1]
        announced = chosen[head, given_up[missing[head, given_up] != 0]]
        owner[head, np.isin(owner[head], announced)] = -1
        chosen[head, given_up] = slots[head, given_up] = -1
        missing[head, given_up] = 0


def fetch(work: FetchWork, scratch: Scratch) -> None:
    """Gather missing units, and list what is there for attention."""
    count = work.chosen.shape[1]
    host_slots = work.host_slots.array()
    chosen = held_indices(work.chosen, -1, len(host_slots), "chosen")
    slots = held_indices(work.chosen_slots, -1, work.units.memory.shape[0], "chosen_slots")
    known = held_indices(work.host_slots, -1, work.blocks.memory.shape[0], "host_slots")
    source = known[chosen]  # [H, N]
    missing = work.missing.array() != 0
    head, entry = np.nonzero(missing & (source >= 0))
    units = units_of_blocks(work.blocks)
    work.units.memory.array()[slots[head, entry]] = units[source[head, entry], head]
    is_absent = missing & (source < 0)
    owner, cache_slots = work.cache.owner.array(), work.cache.slots.array()
    for h, lost in enumerate(is_absent):
        owner[h, np.isin(cache_slots[h], slots[h, lost])] = -1
        work.absent.array()[h, : np.count_nonzero(lost)] = chosen[h, lost]
    work.absent_count.array()[...] = np.count_nonzero(is_absent, axis=1)
    listed, positions = work.slots.array(), work.positions.array()
    listed[:, :count] = np.where(is_absent, np.int32(-1), slots)
    listed[:, count:] = work.tail_slots.array()
    positions[:, :count] = chosen
    positions[:, count:] = work.tail_positions.array()


def numbers_of(scores: Tensor) -> NDArray[np.float32]:
    """A copy in which a block that cannot be ranked comes last."""
    numbers: NDArray[np.float32] = np.array(scores.array())
    numbers[np.isnan(numbers)] = -np.inf
    return numbers


def _open_cache(work: SelectWork, step: int, blocks: int) -> _Cache:
    owner = work.cache.owner.array()
    if step == 0:
        owner[...] = -1
        work.cache.mass.array()[...] = 0
    # A sequence that was cut back may leave owners past its last block; they are mere victims.
    width = max(blocks, int(owner.max(initial=-1)) + 1)
    place_of = np.full((len(owner), width), -1, np.int64)
    head, place = np.nonzero(owner >= 0)
    place_of[head, owner[head, place]] = place
    return _Cache(owner, work.cache.mass.array(), work.cache.used.array(), place_of)


def _account(work: SelectWork, cache: _Cache) -> None:
    """Decay the masses and add what attention measured."""
    cache.mass[...] *= np.float32(work.decay)
    if work.last_chosen is None or work.last_mass is None:
        return
    last, gained = work.last_chosen.array(), work.last_mass.array()
    known = (last >= 0) & (last < cache.place_of.shape[1])
    head, entry = np.nonzero(known)
    place = cache.place_of[head, last[head, entry]]
    held = place >= 0
    cache.mass[head[held], place[held]] += gained[head[held], entry[held]]


def _choose(scores: NDArray[np.float32], pinned: NDArray[np.int32], k: int) -> Bool:
    """``[H, B]``: the pinned blocks and the k best others, equal scores to the lower block."""
    is_chosen = np.zeros(scores.shape, np.bool_)
    is_pinned = np.zeros(scores.shape[1], np.bool_)
    is_pinned[pinned] = True
    is_chosen[:, is_pinned] = True
    others = np.flatnonzero(~is_pinned)
    if k >= len(others):
        is_chosen[...] = True
    elif k > 0:
        rest = scores[:, others]
        cut = len(others) - k
        kth = np.partition(rest, cut, axis=1)[:, cut, None]
        above, level = rest > kth, rest == kth
        room = k - np.count_nonzero(above, axis=1)[:, None]
        is_chosen[:, others] = above | (level & (np.cumsum(level, axis=1) <= room))
    return is_chosen


def _make_room(cache: _Cache, is_chosen: Bool, chosen: Ints, place: Ints, missing: Bool) -> None:
    """Give the missing blocks places: free ones, then those of victims; fills ``place`` in."""
    head, entry = np.nonzero(missing)
    if not len(head):
        return
    owner = cache.owner
    is_free = owner < 0
    kept = np.zeros(owner.shape, np.bool_)
    row, column = np.nonzero(~missing)
    kept[row, place[row, column]] = True
    # The sort is stable, so that equal keys leave the lowest place first.
    order = np.lexsort(
        (
            np.where(is_free, 0, cache.used),
            np.where(is_free, np.float32(0), cache.mass),
            np.where(is_free, 0, np.where(kept, 2, 1)),
        )
    )
    wanted = np.count_nonzero(missing, axis=1)
    taken = np.concatenate([np.sort(o[:n]) for o, n in zip(order, wanted, strict=True)])
    place[head, entry] = taken
    owner[head, taken] = chosen[head, entry]
    cache.mass[head, taken] = 0


def _left_out(shares: NDArray[np.float32], is_chosen: Bool) -> NDArray[np.float64]:
    """``[H]``: softmax of the shares over the blocks that were not chosen."""
    if not shares.size:
        return np.zeros(len(shares))
    left_out: NDArray[np.float64] = np.where(is_chosen, 0, shares_of(shares)).sum(1)
    return left_out


def shares_of(scores: NDArray[np.float32]) -> NDArray[np.float64]:
    """Softmax over the last axis. With all scores -inf every block counts the same; infinite scores
    share everything.
    """
    best = scores.max(-1, keepdims=True)
    shifted = scores.astype(np.float64) - np.where(np.isfinite(best), best, 0)
    weight = np.where(np.isfinite(best), np.exp(shifted), scores == best)
    shares: NDArray[np.float64] = weight / weight.sum(-1, keepdims=True)
    return shares
