"""Block ids: which are free, how many hold them, and whether an id is still the one given out.

An id is an int: the block's index in the low 32 bits, its generation above. The generation begins
at 1 and grows when the block is freed, so an id kept too long is found out. Pure state, NumPy in
and out; not locked, its owner's lock covers it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hsswap.errors import ArgumentError, ConfigError, OutOfBlocks, StaleBlockId

INDEX_BITS = 32
INDEX_MASK = (1 << INDEX_BITS) - 1
LAST_GENERATION = (1 << (63 - INDEX_BITS)) - 1
"""A block freed in this generation is not used again; with one free a second, after 68 years."""

EXTENT_IDS = 16
"""Ids of an extent: what a new owner gets to itself as long as there are empty ones. A sequence
then reads runs of 16 blocks and more, however many sequences grow in turns."""


def id_of(index: int, generation: int) -> int:
    """The id of a block in a generation."""
    return generation << INDEX_BITS | index


def index_of(block_id: int) -> int:
    """The block index in an id."""
    return block_id & INDEX_MASK


def generation_of(block_id: int) -> int:
    """The generation in an id."""
    return block_id >> INDEX_BITS


def as_ids(ids: ArrayLike) -> NDArray[np.int64]:
    """Ids as an int64 array. Raises ArgumentError for other shapes and kinds of numbers."""
    try:
        array = np.asarray(ids)
        if array.size == 0:
            return np.empty(0, np.int64)
        if array.dtype.kind not in "iu" or array.ndim != 1:
            raise ArgumentError(
                f"block ids must be a one-dimensional array of int64, not {array.ndim} dimensions "
                f"of {array.dtype}"
            )
        return array.astype(np.int64, copy=False)
    except (OverflowError, ValueError) as error:
        raise ArgumentError(f"block ids must be 64-bit integers: {error}") from error


class BlockIds:
    """The ids of a store of ``capacity`` blocks, with reference counts and generations.

    Every call that raises has changed nothing. ``on_freed``, when set, is called with the indices
    behind every call that freed blocks.

    Where ids come from: an owner that grows gives its last id as ``after`` and gets the indices
    that follow as far as they are free; the rest, and new owners, come from empty extents, aligned
    to 16, the lowest first, adjoining ones if there are enough; when there are no empty extents
    any more, from the lowest free indices. Never the last freed first: that scatters a sequence
    over the disk within minutes.
    """

    def __init__(self, capacity: int) -> None:
        if not 1 <= capacity <= INDEX_MASK:
            raise ConfigError(f"capacity is {capacity} blocks; it must be from 1 to 2**32 - 1")
        self.capacity = capacity
        self.on_freed: Callable[[NDArray[np.int64]], None] | None = None
        self._references = np.zeros(capacity, np.int64)
        self._generations = np.ones(capacity, np.int64)
        self._extent_used = np.zeros(capacity // EXTENT_IDS, np.int64)
        self._retired = np.zeros(capacity, np.bool_)
        self._free_count = capacity

    def __repr__(self) -> str:
        return f"<BlockIds {self.capacity - self._free_count} of {self.capacity} used>"

    @property
    def free_count(self) -> int:
        """Blocks that can be given out."""
        return self._free_count

    def refcount(self, block_id: int) -> int:
        """How many hold an id. Raises StaleBlockId."""
        return int(self._references[self.check([block_id])[0]])

    def generations(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """The current generation of blocks, by index; of a free one: that of its next owner."""
        generations: NDArray[np.int64] = self._generations[indices]
        return generations

    def used(self, indices: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these indices are given out."""
        used: NDArray[np.bool_] = self._references[indices] > 0
        return used

    def any_used(self, first: int, end: int) -> bool:
        """Whether any of these indices is given out."""
        return bool(self._references[first:end].any())

    def check(self, ids: ArrayLike) -> NDArray[np.int64]:
        """The indices of ids that are all in use.

        Raises StaleBlockId for an id that was freed or never given out, ArgumentError for what is
        no array of integers.
        """
        array = as_ids(ids)
        indices = array & INDEX_MASK
        known = (array >= 0) & (indices < self.capacity)
        places = np.where(known, indices, 0)
        known &= self._generations[places] == array >> INDEX_BITS
        known &= self._references[places] > 0
        if not known.all():
            stale = int(array[np.argmin(known)])
            raise StaleBlockId(
                f"block id {stale} (index {index_of(stale)}, generation {generation_of(stale)}) "
                "was freed or never given out; ask for a new one"
            )
        return indices

    def allocate(self, count: int, after: int | None = None) -> NDArray[np.int64]:
        """``count`` new ids with one reference each, all or none.

        ``after``: the last id of the owner, to go on behind it if that is free. Raises OutOfBlocks
        when fewer are free, StaleBlockId for ``after``, ArgumentError for a negative count.
        """
        if count < 0:
            raise ArgumentError(f"count is {count}; it cannot be negative")
        follow = None if after is None else int(self.check([after])[0]) + 1
        if count > self._free_count:
            raise OutOfBlocks(
                f"{count} blocks wanted, {self._free_count} of {self.capacity} are free; free "
                "sequences or raise the capacity"
            )
        parts: list[NDArray[np.int64]] = []
        missing = count
        for source in (lambda n: self._following(follow, n), self._from_empty, self._from_any):
            if missing == 0:
                break
            part = source(missing)
            self._take(part)
            parts.append(part)
            missing -= len(part)
        assert missing == 0
        indices = np.concatenate(parts) if parts else np.empty(0, np.int64)
        return self._generations[indices] << INDEX_BITS | indices

    def _following(self, follow: int | None, count: int) -> NDArray[np.int64]:
        if follow is None:
            return np.empty(0, np.int64)
        used = self._references[follow : follow + count] > 0
        used |= self._retired[follow : follow + count]
        length = int(np.argmax(used)) if used.any() else len(used)
        return np.arange(follow, follow + length)

    def _from_empty(self, count: int) -> NDArray[np.int64]:
        """Indices of empty extents, adjoining ones where enough are together."""
        empty = np.flatnonzero(self._extent_used == 0)
        wanted = -(-count // EXTENT_IDS)
        if len(empty) > wanted:
            adjoin = empty[wanted - 1 :] - empty[: len(empty) - wanted + 1] == wanted - 1
            first = int(np.argmax(adjoin))  # 0 where none adjoin
            empty = empty[first : first + wanted]
        indices = empty[:, None] * EXTENT_IDS + np.arange(EXTENT_IDS)
        return indices.reshape(-1)[:count]

    def _from_any(self, count: int) -> NDArray[np.int64]:
        return np.flatnonzero((self._references == 0) & ~self._retired)[:count]

    def _take(self, indices: NDArray[np.int64]) -> None:
        self._references[indices] = 1
        self._count_extents(indices, 1)
        self._free_count -= len(indices)

    def _count_extents(self, indices: NDArray[np.int64], step: int) -> None:
        extents = indices // EXTENT_IDS
        # A last extent of fewer ids than 16 is not counted: nobody is given it as an empty one.
        np.add.at(self._extent_used, extents[extents < len(self._extent_used)], step)

    def add_reference(self, ids: ArrayLike) -> None:
        """One more holder for each id; an id given twice gets two. Raises StaleBlockId."""
        np.add.at(self._references, self.check(ids), 1)

    def drop_reference(self, ids: ArrayLike) -> NDArray[np.int64]:
        """One holder less for each id; an id given twice loses two. Returns the ids freed by it.

        Raises StaleBlockId for a freed id, ArgumentError when one call drops more references to an
        id than there are.
        """
        indices, drops = np.unique(self.check(ids), return_counts=True)
        left = self._references[indices] - drops
        if (left < 0).any():
            index = int(indices[np.argmin(left)])
            held = int(self._references[index])
            raise ArgumentError(
                f"block id {id_of(index, int(self._generations[index]))} has {held} reference(s), "
                f"{held - int(left.min())} were dropped; drop each once"
            )
        self._references[indices] = left
        freed: NDArray[np.int64] = indices[left == 0]
        freed_ids: NDArray[np.int64] = self._generations[freed] << INDEX_BITS | freed
        if len(freed):
            self._free(freed)
        return freed_ids

    def _free(self, indices: NDArray[np.int64]) -> None:
        last = self._generations[indices] == LAST_GENERATION
        self._retired[indices[last]] = True
        usable = indices[~last]
        self._generations[usable] += 1
        self._count_extents(usable, -1)
        self._free_count += len(usable)
        if self.on_freed is not None:
            self.on_freed(indices)
