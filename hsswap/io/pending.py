"""Prefix keys that are not on disk yet: they go there after the blocks that they name."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hsswap.io.ids import BlockIds
from hsswap.io.records import CLEARED, VALID, Records


@dataclass(frozen=True)
class PrefixRecord:
    """The prefix key of a block. ``depth``: blocks before it."""

    generation: int
    depth: int
    key: bytes


class PendingKeys:
    """Keys by block index."""

    def __init__(self) -> None:
        self._keys: dict[int, PrefixRecord] = {}

    def put(self, index: int, record: PrefixRecord) -> None:
        """A block got a key."""
        self._keys[index] = record

    def drop(self, index: int, records: Records) -> None:
        """A block has no key any more."""
        self._keys.pop(index, None)
        if records.ids["state"][index] == VALID:
            records.ids["state"][index] = CLEARED
            records.touch_ids(np.array([index]))

    def fill(
        self, records: Records, ids: BlockIds, durable: NDArray[np.bool_], serial: int
    ) -> None:
        """Write down the keys of blocks that are ``durable`` ``[layers, capacity]`` in every layer.

        Those of blocks freed meanwhile are forgotten, others wait on.
        """
        for index, key in list(self._keys.items()):
            if key.generation != int(ids.generations(np.array([index]))[0]):
                del self._keys[index]
                continue
            recorded = records.blocks["generation"][:, index] == key.generation
            if not (recorded & durable[:, index]).all():
                continue
            row = records.ids[index : index + 1]
            row["state"], row["generation"], row["depth"] = VALID, key.generation, key.depth
            row["key"] = np.frombuffer(key.key, np.uint8)
            row["serial"] = serial
            records.touch_ids(np.array([index]))
            del self._keys[index]
