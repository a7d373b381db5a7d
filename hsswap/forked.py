"""What a child of fork(2) inherits and cannot use: of its parent's threads it has one alone."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from hsswap.errors import ClosedError

REFUSED = "this process is a fork of the one that opened the swap; open a swap of its own here"

T = TypeVar("T")

_watched: WeakKeyDictionary[Any, Callable[[Any], None]] = WeakKeyDictionary()
_awaited: WeakSet[asyncio.Future[Any]] = WeakSet()
_forks = 0


def watch(owner: T, in_child: Callable[[T], None]) -> None:
    """Call ``in_child(owner)`` in a child of this process, as long as the owner lives.

    For what has threads, locks or descriptors, which a fork copies without their meaning: it is to
    refuse calls from then on, and to touch nothing that the parent still has. It must not raise.
    """
    _register()
    _watched[owner] = in_child


def forks() -> int:
    """How many forks are between this process and the one that registered first: what was begun at
    another number will never end here.
    """
    _register()
    return _forks


def check_forks(then: int) -> None:
    """Raise ClosedError where a wait would be for a thread of the parent; ``then``: of
    :func:`forks`, when what is waited for began.
    """
    if then != _forks:
        raise ClosedError(REFUSED)


def awaited(future: asyncio.Future[T]) -> asyncio.Future[T]:
    """The future, which ends with ClosedError in a child: what would set it is not there."""
    _register()
    _awaited.add(future)
    return future


@cache
def _register() -> None:
    os.register_at_fork(after_in_child=_in_child)


def _in_child() -> None:
    global _forks
    _forks += 1
    for future in [each for each in _awaited if not each.done()]:
        with suppress(RuntimeError):  # its loop is closed, and nobody waits
            future.set_exception(ClosedError(REFUSED))
            future.exception()  # so that asyncio does not complain where nobody asks
    for owner, in_child in list(_watched.items()):
        in_child(owner)
