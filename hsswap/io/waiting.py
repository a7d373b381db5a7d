"""Waiting that outlives cancellation: closing must end what it began."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def until_done(future: asyncio.Future[T]) -> T:
    """Wait for ``future`` to its end even when cancelled meanwhile, then give its result.

    A cancellation that arrived is raised at the end, in place of the result.
    """
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return future.result()


def goes_on(closing: asyncio.Future[None] | None) -> bool:
    """Whether somebody closes, or has; one whose loop is closed will not end it."""
    return closing is not None and (closing.done() or not closing.get_loop().is_closed())


def is_own(closing: asyncio.Future[None], latest: asyncio.Future[None] | None) -> bool:
    """Whether a close that comes to its end may say so: it is the latest, and was not given up in
    the middle, as when its loop was closed.
    """
    return closing is latest and not closing.get_loop().is_closed()


async def to_the_end(*steps: Callable[[], Awaitable[object]]) -> None:
    """Await every step in order, also after one that failed or was cancelled.

    The first thing raised is raised at the end. Steps run in the caller's task and not in one of
    their own, because a task that is cancelled before its first step never runs at all. A task that
    is given up, its loop being closed, takes no further step: they may be another's now.
    """
    problem: BaseException | None = None
    for step in steps:
        try:
            await step()
        except GeneratorExit:
            raise
        except BaseException as error:
            problem = problem or error
    if problem is not None:
        raise problem
