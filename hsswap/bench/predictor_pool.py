"""How many units a step must read, by the size of the pool that keeps earlier ones.

The pool is the device's: each KV head of each layer keeps ``capacity`` units and gives up the one
of least decayed true mass, then the one unused for longest. With look-ahead the choice of an
approximate query is fetched before the layer is reached, but only what the pool does not hold.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hsswap.bench.predictor_view import Bool
from hsswap.bf16 import F32
from hsswap.topk import MASS_DECAY


class Reads(NamedTuple):
    """Units a step and KV head, mean of the later half of the steps: the pool begins empty.

    ``late``: asked for when they were needed; ``ahead``: fetched for the approximate query.
    """

    late: float
    ahead: float


def simulate(demanded: Bool, guessed: Bool | None, mass: F32, capacity: int) -> Reads:
    """Steps of N pools side by side.

    ``demanded``, ``guessed`` and ``mass``: ``[N, S, B]``, what the exact query chooses, what the
    approximate one does, and the true mass. At least as many places as one choice takes.
    """
    pools, steps, blocks = demanded.shape
    held = np.zeros((pools, blocks), np.bool_)
    worth = np.zeros((pools, blocks), np.float32)
    used = np.full((pools, blocks), -1, np.int64)
    late = ahead = 0
    warm = steps // 2
    for step in range(steps):
        if guessed is not None:
            new = _admit(held, guessed[:, step], worth, used, capacity)
            ahead += new if step >= warm else 0
        new = _admit(held, demanded[:, step], worth, used, capacity)
        late += new if step >= warm else 0
        worth *= np.float32(MASS_DECAY)
        worth += np.where(demanded[:, step], mass[:, step], np.float32(0))
        used[demanded[:, step]] = step
    counted = pools * (steps - warm)
    return Reads(late / counted, ahead / counted)


def _admit(held: Bool, wanted: Bool, worth: F32, used: np.ndarray, capacity: int) -> int:
    """Take ``wanted`` into the pools in place; returns how many were not there."""
    new = int((wanted & ~held).sum())
    held |= wanted
    surplus = held.sum(1) - capacity
    victims = held & ~wanted
    # Not a victim: last in order, whatever it is worth.
    order = np.lexsort((used, worth, ~victims))
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.arange(held.shape[1])[None], 1)
    gone = victims & (rank < surplus[:, None])
    held[gone], worth[gone], used[gone] = False, 0, -1
    return new
