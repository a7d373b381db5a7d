"""Transfers handed to a backend without a store, and what they report."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from hsswap.errors import HsswapError
from hsswap.io.base import BlockIO, IOFile, Operation, Priority, Transfer
from tests.io.support import Pages


class Collector:
    """Takes on_done of many transfers; counts each, and waits for all."""

    def __init__(self) -> None:
        self.ended: list[tuple[Transfer, HsswapError | None]] = []
        self.threads: set[int] = set()
        self.accepted = 0
        self._changed = asyncio.Event()

    def __call__(self, transfer: Transfer, error: HsswapError | None) -> None:
        assert all(other is not transfer for other, _ in self.ended), "called twice"
        self.ended.append((transfer, error))
        self.threads.add(threading.get_ident())
        self._changed.set()

    async def all(self, count: int) -> None:
        while len(self.ended) < count:
            self._changed.clear()
            await self._changed.wait()

    @property
    def errors(self) -> list[HsswapError | None]:
        return [error for _, error in self.ended]


def transfer(
    operation: Operation,
    file: IOFile,
    pages: Pages,
    on_done: Callable[[Any, HsswapError | None], None],
    offset: int = 0,
    priority: Priority = Priority.NEEDED,
    **options: Any,
) -> Transfer:
    span_bytes = pages.spans.shape[1]
    return Transfer(
        operation, file, offset, pages.addresses, span_bytes, priority, on_done, owner=pages,
        **options,
    )  # fmt: skip


async def run(io: BlockIO, *transfers: Transfer) -> list[HsswapError | None]:
    """Submit with a collector in place and wait; errors in the order of the transfers."""
    collector = Collector()
    for one in transfers:
        one.on_done = collector
    io.submit(transfers)
    await collector.all(len(transfers))
    errors = {id(one): error for one, error in collector.ended}
    return [errors[id(one)] for one in transfers]


def ignore(transfer: Transfer, error: HsswapError | None) -> None:
    raise AssertionError("replaced by run()")
