"""A store's calls on prefixes: blocks found again by the tokens that led to them."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hsswap.errors import ArgumentError, CorruptBlock, StaleBlockId
from hsswap.io.contents import Contents
from hsswap.io.ids import BlockIds, id_of
from hsswap.io.journal import Journal
from hsswap.io.keys import PrefixIndex, PrefixKeys
from hsswap.io.pending import PrefixRecord


class PrefixBlocks:
    """Keys, index and records of prefixes. ``journal`` None: they are kept in memory alone.

    A block with a key does not change, and is kept when nobody holds it, until room is needed.
    """

    def __init__(
        self, keys: PrefixKeys, index: PrefixIndex, ids: BlockIds, contents: Contents
    ) -> None:
        self.keys = keys
        self.index = index
        self.journal: Journal | None = None
        self._ids = ids
        self._contents = contents

    def commit(self, tokens: ArrayLike, ids: ArrayLike, block_size: int) -> int:
        """Give keys to full blocks; how many got one. Raises ArgumentError, and CorruptBlock for
        one that came back as something else: it would be found again.
        """
        keys = self.keys.of(tokens)
        indices = self._ids.check(ids)
        if len(indices) > len(keys):
            raise ArgumentError(
                f"{len(indices)} ids were given with tokens for {len(keys)} full blocks"
            )
        generations = self._ids.generations(indices)
        whole = (self._contents.written[:, indices] == generations).all(axis=0)
        whole &= (self._contents.lengths[:, indices] == block_size).all(axis=0)
        if not whole.all():
            place = int(np.argmin(whole))
            block_id = id_of(int(indices[place]), int(generations[place]))
            raise ArgumentError(
                f"block id {block_id} is not written in full in every layer; write it, await the "
                "report, then commit it"
            )
        corrupt = self._contents.corrupt[:, indices].any(axis=0)
        if corrupt.any():
            place = int(np.argmax(corrupt))
            block_id = id_of(int(indices[place]), int(generations[place]))
            raise CorruptBlock(
                f"block id {block_id} came back from disk with other bytes than were written; "
                "compute it again in a new sequence, commit that, and check the drive"
            )
        named = [self.index.put(keys[depth], int(i)) for depth, i in enumerate(indices.tolist())]
        depths = np.flatnonzero(named)
        self._ids.want(indices[depths], depths)
        if self.journal is not None:
            for depth in depths.tolist():
                record = PrefixRecord(int(generations[depth]), depth, keys[depth])
                self.journal.put_key(int(indices[depth]), record)
        return len(depths)

    def drop_key(self, index: int) -> None:
        """A block came back corrupt: it is found no more, now and later, and freed by its last
        holder.
        """
        one = np.array([index])
        self.index.forget(one)
        if self.journal is not None:
            self.journal.drop_key(index)
        self._ids.unwant(one)

    def find(self, tokens: ArrayLike) -> NDArray[np.int64]:
        """Ids of the longest known prefix, with a reference taken on each."""
        keys = self.keys.of(tokens)
        found = self.index.find(keys)
        while found:
            indices = np.array(found)
            ids: NDArray[np.int64] = self._ids.generations(indices) << 32 | indices
            try:
                self._ids.add_reference(ids)
            except StaleBlockId:  # the last went while we looked, on another thread
                found = found[:-1]
                continue
            known = self.index.find(keys)
            if known[: len(found)] == found:
                return ids
            self._ids.drop_reference(ids)  # one went, and is another's by now
            found = known
        return np.empty(0, np.int64)
