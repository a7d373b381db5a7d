"""Bytes on disk: the store, its ids, and the backends that move blocks. Knows nothing of CUDA."""

from hsswap.io.backends import BACKENDS, open_backend
from hsswap.io.base import BlockIO, IOStatistics, Operation, Priority, QueueFull, Transfer
from hsswap.io.ids import BlockIds
from hsswap.io.statistics import StoreStatistics
from hsswap.io.store import BlockStore

__all__ = [
    "BACKENDS",
    "BlockIO",
    "BlockIds",
    "BlockStore",
    "IOStatistics",
    "Operation",
    "Priority",
    "QueueFull",
    "StoreStatistics",
    "Transfer",
    "open_backend",
]
