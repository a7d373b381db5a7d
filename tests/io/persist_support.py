"""What tests of persistent stores share: small dims, a store in RAM or on disk, a workload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsswap.config import ModelDims
from hsswap.io import BlockStore
from hsswap.io.base import BlockIO
from hsswap.io.memory import Fault, MemoryIO
from tests.io.support import pattern, read, write

SMALL = ModelDims.uniform(layers=2, q_heads=2, kv_heads=2, head_dim=16)
"""Blocks of 4 KiB, segments of 2 MiB."""

SALT = b"salt of the tests"


async def open_store(
    where: Path | list[Path] | BlockIO, capacity: int = 300, dims: ModelDims = SMALL, **options: Any
) -> BlockStore:
    """A persistent store in a directory or in a memory backend."""
    options = {"persist": True, "salt": SALT, **options}
    if isinstance(where, BlockIO):
        return await BlockStore.open(dims, None, capacity, io=where, **options)
    return await BlockStore.open(dims, where, capacity, **{"io": "posix", **options})


def memory(*faults: Fault, **options: Any) -> MemoryIO:
    """A memory backend that follows what is synced."""
    return MemoryIO(faults, power=True, **options)


def content_of(store: BlockStore, ids: NDArray[np.int64], layer: int) -> NDArray[np.uint8]:
    """What blocks of these ids hold in these tests: random bytes that follow from id and layer."""
    size = store.block_bytes(layer)
    return np.concatenate([pattern(1, size, int(i) * 64 + layer) for i in ids])


async def write_ids(store: BlockStore, ids: NDArray[np.int64]) -> None:
    """Write blocks in every layer with what :func:`content_of` says."""
    indices = store.ids.check(ids)
    for layer in range(store.dims.layers):
        outcome = await write(store, layer, indices, content_of(store, ids, layer))
        assert not outcome.errors


async def check_ids(store: BlockStore, ids: NDArray[np.int64]) -> None:
    """Blocks that are held have what :func:`content_of` says, in every layer."""
    indices = store.ids.check(ids)
    for layer in range(store.dims.layers):
        found, outcome = await read(store, layer, indices)
        assert not outcome.errors
        assert np.array_equal(found, content_of(store, ids, layer))


def tokens_of(sequence: int, blocks: int) -> NDArray[np.int64]:
    """Tokens of a sequence of this many full blocks."""
    return np.random.default_rng(sequence).integers(0, 50_000, blocks * SMALL.block_size)
