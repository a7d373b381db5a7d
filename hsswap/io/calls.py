"""A store's read or write call: checked, then cut into runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial, reduce
from operator import or_
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hsswap.checksum import identity_seeds
from hsswap.errors import ArgumentError
from hsswap.io.base import BlockChecksums, IOFile, Operation, Priority
from hsswap.io.ids import BlockIds
from hsswap.io.layout import MAX_READ_RUN_BYTES, MAX_RUN_BYTES, SegmentLayout, plan_runs
from hsswap.io.runs import (
    BlockRun,
    OnBlocksDone,
    RunDone,
    compare_by,
    compare_checksums,
    fill_by,
    fill_checksums,
)
from hsswap.io.tables import FEW

Hook = Callable[[BlockRun], None]

_INDEX, _ADDRESS = np.dtype(np.int64), np.dtype(np.uint64)
_NO_FILE = IOFile(Path(), 0)  # until the segment's file is there


class Call(NamedTuple):
    """The arguments of a read or write. ``lengths``: valid tokens of each block (writes)."""

    operation: Operation
    layer: int
    indices: NDArray[np.int64]
    addresses: NDArray[np.uint64]
    priority: Priority
    owner: object
    on_done: OnBlocksDone
    deadline: float | None = None
    checksums: BlockChecksums | None = None
    lengths: NDArray[np.uint16] | None = None
    codes_version: int = 0

    def check(self, layout: SegmentLayout, capacity: int, alignment: int) -> None:
        """Raise ArgumentError for what cannot be read or written."""
        layers = len(layout.block_bytes)
        if not 0 <= self.layer < layers:
            raise ArgumentError(f"layer {self.layer} is out of range; there are {layers}")
        if not isinstance(self.priority, Priority):
            raise ArgumentError(
                f"priority {self.priority!r} is unknown; known: {', '.join(Priority.__members__)}"
            )
        _check_array(self.indices, "indices", _INDEX)
        _check_array(self.addresses, "addresses", _ADDRESS)
        if len(self.indices) != len(self.addresses):
            raise ArgumentError(
                f"{len(self.indices)} indices were given with {len(self.addresses)} addresses"
            )
        if len(self.indices) == 0:
            return
        low, high = _ends(self.indices)
        if low < 0 or high >= capacity:
            raise ArgumentError(f"a block index is outside 0 to {capacity - 1}")
        if len(self.addresses) <= FEW:
            addresses: list[int] = self.addresses.tolist()
            bits, null = reduce(or_, addresses), not all(addresses)
        else:
            bits = int(np.bitwise_or.reduce(self.addresses))
            null = not np.logical_and.reduce(self.addresses)
        if bits & (alignment - 1) or null:
            raise ArgumentError(f"addresses must be multiples of {alignment}, not null")

    def cut(
        self,
        positions: NDArray[np.int64] | None,
        layout: SegmentLayout,
        ids: BlockIds,
        run_done: RunDone,
    ) -> tuple[list[BlockRun], NDArray[np.int64]]:
        """Runs over these positions of the call's arrays (None: all), and the indices in order."""
        block_bytes = layout.block_bytes[self.layer]
        chosen = self.indices if positions is None else self.indices[positions]
        longest = MAX_READ_RUN_BYTES if self.operation is Operation.READ else MAX_RUN_BYTES
        order, bounds = plan_runs(chosen, block_bytes, longest)
        positions = order if positions is None else positions[order]
        indices, addresses = self.indices[positions], self.addresses[positions]
        generations = ids.generations(indices)
        seeds: list[int] = []  # of a read: of what was written, once it holds its blocks
        if self.operation is Operation.WRITE:
            seeds = identity_seeds(self.layer, indices, generations).tolist()
        prepare, verify = self._hooks()
        firsts: list[int] = indices[bounds[:-1]].tolist()
        offsets = layout.offsets(self.layer, firsts)
        parts = _parts(bounds, addresses, positions, generations)
        edges = itertools.pairwise(bounds.tolist())
        runs = [
            BlockRun(
                self.operation,
                _NO_FILE,
                offset,
                its_addresses,
                block_bytes,
                self.priority,
                run_done,
                prepare,
                verify,
                self.deadline,
                self.owner,
                self.checksums is None,
                layer=self.layer,
                first=first,
                positions=its_positions,
                generations=its_generations,
                seeds=seeds[begin:end],
                notify=self.on_done,
            )
            for first, offset, its_addresses, its_positions, its_generations, (begin, end) in zip(
                firsts, offsets, *parts, edges, strict=True
            )
        ]
        if self.lengths is not None:
            for run, lengths in zip(runs, *_parts(bounds, self.lengths[positions]), strict=True):
                run.lengths, run.codes_version = lengths, self.codes_version
        return runs, indices

    def _hooks(self) -> tuple[Hook | None, Hook | None]:
        """``prepare`` and ``verify`` of its runs."""
        if self.operation is Operation.WRITE:
            return (partial(fill_by, self.checksums) if self.checksums else fill_checksums), None
        return None, (partial(compare_by, self.checksums) if self.checksums else compare_checksums)


def _parts(bounds: NDArray[np.int64], *arrays: NDArray[Any]) -> list[list[NDArray[Any]]]:
    """Each array in pieces between the bounds."""
    if len(bounds) == len(arrays[0]) + 1:  # one each: half the cost
        return [list(array[:, None]) for array in arrays]
    edges = list(itertools.pairwise(bounds.tolist()))
    return [[array[begin:end] for begin, end in edges] for array in arrays]


def check_lengths(lengths: object, count: int, block_size: int) -> NDArray[np.uint16]:
    """Valid tokens of each of ``count`` blocks; None: all. Raises ArgumentError."""
    if lengths is None:
        return np.full(count, block_size, np.uint16)
    array = np.asarray(lengths)
    if array.shape != (count,) or array.dtype.kind not in "iu":
        raise ArgumentError(f"lengths must be one-dimensional with {count} integers")
    if count and not 0 <= array.min() <= array.max() <= block_size:
        raise ArgumentError(f"a length is outside 0 to {block_size}, the tokens of a block")
    return array.astype(np.uint16)


def check_codes_version(version: int) -> None:
    """Raise ArgumentError unless it fits its place in a record."""
    if not 0 <= version < 1 << 32:
        raise ArgumentError(f"codes_version is {version}; it must be from 0 to 2**32 - 1")


def _ends(numbers: NDArray[Any]) -> tuple[int, int]:
    """The lowest and the highest."""
    if len(numbers) <= FEW:
        listed = numbers.tolist()
        return min(listed), max(listed)
    return int(np.minimum.reduce(numbers)), int(np.maximum.reduce(numbers))


def _check_array(array: object, name: str, dtype: np.dtype[Any]) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
        raise ArgumentError(f"{name} must be a one-dimensional {dtype} array")
