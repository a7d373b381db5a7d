"""Block ids: which are free, how many hold them, and whether an id is still the one given out.

An id is an int: the block's index in the low 32 bits, its generation above. The generation begins
at 1 and grows when the block is freed, so an id kept too long is found out. Pure state, NumPy in
and out; calls that change it may come from any thread.

A block that somebody may want again (its content has a prefix key, or was found on disk when the
store was opened) is *kept* when nobody holds it any more: it has an id, no holder, and goes when
room is needed. Adding a reference takes it back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hsswap.errors import ArgumentError, ConfigError, OutOfBlocks, StaleBlockId
from hsswap.io.tables import FEW, sparse_zeros

P = ParamSpec("P")
T = TypeVar("T")

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
        if array.size == 0 and array.ndim == 1:
            return np.empty(0, np.int64)
        if array.dtype.kind not in "iu" or array.ndim != 1:
            raise ArgumentError(
                f"block ids must be a one-dimensional array of int64, not {array.ndim} dimensions "
                f"of {array.dtype}"
            )
        return array.astype(np.int64, copy=False)
    except (OverflowError, ValueError) as error:
        raise ArgumentError(f"block ids must be 64-bit integers: {error}") from error


def _locked(method: Callable[Concatenate[BlockIds, P], T]) -> Callable[Concatenate[BlockIds, P], T]:
    """One call at a time."""

    @wraps(method)
    def call(self: BlockIds, /, *args: P.args, **options: P.kwargs) -> T:
        with self._lock:
            return method(self, *args, **options)

    return call


class BlockIds:
    """The ids of a store of ``capacity`` blocks, with reference counts and generations.

    Every call that raises has changed nothing. ``on_freed``, when set, is called with the indices
    behind every call that freed blocks.

    Where ids come from: an owner that grows gives its last id as ``after`` and gets the indices
    that follow as far as they are free; the rest, and new owners, come from empty extents, aligned
    to 16, the lowest first, adjoining ones if there are enough; when there are no empty extents
    any more, from the lowest free indices. Never the last freed first: that scatters a sequence
    over the disk within minutes. When too few are free, kept blocks are freed: those that nobody
    has held for longest first, and of those let go together the deepest of a prefix first.
    """

    def __init__(self, capacity: int) -> None:
        if not 1 <= capacity <= INDEX_MASK:
            raise ConfigError(f"capacity is {capacity} blocks; it must be from 1 to 2**32 - 1")
        self.capacity = capacity
        self.on_freed: Callable[[NDArray[np.int64]], None] | None = None
        # Tables are touched, and looked through, below this alone: a huge capacity costs nothing.
        self._top = 0
        self._references = sparse_zeros((capacity,), np.int64)
        self._generations = sparse_zeros((capacity,), np.int64)  # 0: never given out
        self._first_generation = 1  # of blocks given out or freed from now on, at least
        # Blocks to keep when nobody holds them, how deep in their prefix, and since when nobody
        # does (0: somebody does, or it is free).
        self._wanted = sparse_zeros((capacity,), np.bool_)
        self._depths = sparse_zeros((capacity,), np.int64)
        self._kept_since = sparse_zeros((capacity,), np.int64)
        self._clock = 0
        self._kept_count = 0
        self._extent_used = sparse_zeros((capacity // EXTENT_IDS,), np.int64)
        self._retired = sparse_zeros((capacity,), np.bool_)
        self._free_count = capacity
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return f"<BlockIds {self.capacity - self._free_count} of {self.capacity} used>"

    @property
    def free_count(self) -> int:
        """Blocks that can be given out, kept ones included."""
        return self._free_count + self._kept_count

    @property
    def kept_count(self) -> int:
        """Blocks that nobody holds and that are not freed before room is needed."""
        return self._kept_count

    def refcount(self, block_id: int) -> int:
        """How many hold an id. Raises StaleBlockId."""
        return int(self._references[self.check([block_id])[0]])

    def generations(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """The current generation of blocks, by index; of a free one: that of its next owner."""
        generations: NDArray[np.int64] = self._generations[indices]
        few = len(generations) <= FEW
        if 0 in generations.tolist() if few else not np.logical_and.reduce(generations):
            generations[generations == 0] = self._first_generation
        return generations

    def used(self, indices: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these indices are given out."""
        used: NDArray[np.bool_] = self._references[indices] > 0
        return used

    def shared(self, indices: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these indices must not be written: several hold them, or a prefix key does."""
        shared: NDArray[np.bool_] = (self._references[indices] > 1) | self._wanted[indices]
        return shared

    def held_once(self, indices: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these indices have exactly one holder."""
        alone: NDArray[np.bool_] = self._references[indices] == 1
        return alone

    def any_used(self, first: int, end: int) -> bool:
        """Whether any of these indices is given out or kept."""
        return bool(self._references[first:end].any() or self._kept_since[first:end].any())

    def any_held(self, first: int, end: int) -> bool:
        """Whether any of these indices is given out."""
        return bool(self._references[first:end].any())

    def is_given_out(self, index: int) -> bool:
        """Whether somebody holds the block of that index."""
        return bool(self._references[index] > 0)

    def check(self, ids: ArrayLike) -> NDArray[np.int64]:
        """The indices of ids that are all in use.

        Raises StaleBlockId for an id that was freed or never given out, ArgumentError for what is
        no array of integers.
        """
        return self._known(ids, kept=False)

    def _known(self, ids: ArrayLike, *, kept: bool) -> NDArray[np.int64]:
        array = as_ids(ids)
        indices = array & INDEX_MASK
        known = (array >= 0) & (indices < self.capacity)
        places = np.where(known, indices, 0)
        known &= self._generations[places] == array >> INDEX_BITS
        known &= (self._references[places] > 0) | (kept & (self._kept_since[places] > 0))
        if not known.all():
            stale = int(array[np.argmin(known)])
            raise StaleBlockId(
                f"block id {stale} (index {index_of(stale)}, generation {generation_of(stale)}) "
                "was freed or never given out; ask for a new one"
            )
        return indices

    @_locked
    def allocate(self, count: int, after: int | None = None) -> NDArray[np.int64]:
        """``count`` new ids with one reference each, all or none.

        ``after``: the last id of the owner, to go on behind it if that is free. Raises OutOfBlocks
        when fewer are free, StaleBlockId for ``after``, ArgumentError for a negative count.
        """
        if count < 0:
            raise ArgumentError(f"count is {count}; it cannot be negative")
        follow = None if after is None else int(self.check([after])[0]) + 1
        if count > self.free_count:
            raise OutOfBlocks(
                f"{count} blocks wanted, {self.free_count} of {self.capacity} are free; free "
                "sequences or raise the capacity"
            )
        if count > self._free_count:
            self._reclaim(count - self._free_count)
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
        used = ~self._available(slice(follow, follow + count))
        length = int(np.argmax(used)) if used.any() else len(used)
        return np.arange(follow, follow + length)

    def _from_empty(self, count: int) -> NDArray[np.int64]:
        """Indices of empty extents, adjoining ones where enough are together."""
        wanted = -(-count // EXTENT_IDS)
        # Behind the top all are empty: one more than wanted of those leaves nothing to find there.
        extents = min(len(self._extent_used), -(-self._top // EXTENT_IDS) + wanted + 1)
        empty = np.flatnonzero(self._extent_used[:extents] == 0)
        if len(empty) > wanted:
            adjoin = empty[wanted - 1 :] - empty[: len(empty) - wanted + 1] == wanted - 1
            first = int(np.argmax(adjoin))  # 0 where none adjoin
            empty = empty[first : first + wanted]
        indices = empty[:, None] * EXTENT_IDS + np.arange(EXTENT_IDS)
        return indices.reshape(-1)[:count]

    def _from_any(self, count: int) -> NDArray[np.int64]:
        # Only when no extent is empty: what is free lies below the top, or in the last few ids.
        return np.flatnonzero(self._available(slice(self._top + count)))[:count]

    def _available(self, part: slice) -> NDArray[np.bool_]:
        """Which indices are free."""
        available: NDArray[np.bool_] = self._references[part] == 0
        available &= ~self._retired[part]
        available &= self._kept_since[part] == 0
        return available

    def _take(self, indices: NDArray[np.int64]) -> None:
        self._begin_use(indices, self.generations(indices))
        self._references[indices] = 1
        self._count_extents(indices, 1)
        self._free_count -= len(indices)

    def _begin_use(self, indices: NDArray[np.int64], generations: NDArray[np.int64]) -> None:
        self._generations[indices] = generations
        if len(indices):
            self._top = max(self._top, int(np.maximum.reduce(indices)) + 1)

    def _count_extents(self, indices: NDArray[np.int64], step: int) -> None:
        extents = indices // EXTENT_IDS
        # A last extent of fewer ids than 16 is not counted: nobody is given it as an empty one.
        np.add.at(self._extent_used, extents[extents < len(self._extent_used)], step)

    @_locked
    def add_reference(self, ids: ArrayLike) -> None:
        """One more holder for each id, also of kept ones; an id given twice gets two.

        Raises StaleBlockId.
        """
        indices = self._known(ids, kept=True)
        kept = np.unique(indices[self._kept_since[indices] > 0])
        self._kept_since[kept] = 0
        self._kept_count -= len(kept)
        np.add.at(self._references, indices, 1)

    @_locked
    def drop_reference(self, ids: ArrayLike) -> NDArray[np.int64]:
        """One holder less for each id; an id given twice loses two. Returns the ids freed by it.

        Blocks to be kept are not freed. Raises StaleBlockId for a freed id, ArgumentError when one
        call drops more references to an id than there are.
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
        alone: NDArray[np.int64] = indices[left == 0]
        kept = self._wanted[alone]
        self._keep_now(alone[kept])
        freed = alone[~kept]
        freed_ids: NDArray[np.int64] = self._generations[freed] << INDEX_BITS | freed
        if len(freed):
            self._free(freed)
        return freed_ids

    @_locked
    def drop_one(self, block_id: int) -> int:
        """One holder less for an id; how many are left. Raises StaleBlockId."""
        left = self.refcount(block_id) - 1
        self.drop_reference([block_id])
        return left

    def _free(self, indices: NDArray[np.int64]) -> None:
        last = self._generations[indices] == LAST_GENERATION
        self._retired[indices[last]] = True
        usable = indices[~last]
        self._wanted[indices] = False
        self._generations[usable] = np.maximum(
            self._generations[usable] + 1, self._first_generation
        )
        self._count_extents(usable, -1)
        self._free_count += len(usable)
        if self.on_freed is not None:
            self.on_freed(indices)

    # Blocks that are kept.

    @_locked
    def want(self, indices: NDArray[np.int64], depths: NDArray[np.int64]) -> None:
        """Keep these blocks, in use or kept, when nobody holds them; ``depths``: in the prefix."""
        self._wanted[indices] = True
        self._depths[indices] = depths

    @_locked
    def unwant(self, indices: NDArray[np.int64]) -> None:
        """Free these blocks when nobody holds them; now, if that is so."""
        self._wanted[indices] = False
        self.free_kept(indices)

    def kept(self) -> NDArray[np.int64]:
        """The ids of blocks that are kept, those to go first in front."""
        indices = np.flatnonzero(self._kept_since[: self._top])
        order = np.lexsort((-self._depths[indices], self._kept_since[indices]))
        indices = indices[order]
        return self._generations[indices] << INDEX_BITS | indices

    def restore(self, indices: NDArray[np.int64], generations: NDArray[np.int64]) -> None:
        """Take over blocks found on disk, oldest first, as kept ones. For a new store alone."""
        assert self.free_count == self.capacity
        self._begin_use(indices, generations)
        self._free_count -= len(indices)
        self._count_extents(indices, 1)
        self._clock += len(indices)
        self._kept_since[indices] = np.arange(1, len(indices) + 1)
        self._kept_count = len(indices)

    def begin_generations(self, first: int) -> None:
        """Give no id of an earlier generation than ``first`` to new owners. Before any is given."""
        self._first_generation = first
        free = self._available(slice(self._top))
        self._generations[: self._top][free] = first

    @property
    def last_generation(self) -> int:
        """The highest generation of any block."""
        used = self._generations[: self._top]
        return max(self._first_generation, int(used.max(initial=0)))

    @_locked
    def free_kept(self, indices: NDArray[np.int64]) -> None:
        """Free those of the blocks that are kept."""
        kept = indices[self._kept_since[indices] > 0]
        self._kept_since[kept] = 0
        self._kept_count -= len(kept)
        if len(kept):
            self._free(kept)

    def _keep_now(self, indices: NDArray[np.int64]) -> None:
        if len(indices):
            self._clock += 1
            self._kept_since[indices] = self._clock
            self._kept_count += len(indices)

    def _reclaim(self, count: int) -> None:
        """Free the kept blocks that go first."""
        self.free_kept(self.kept()[:count] & INDEX_MASK)
