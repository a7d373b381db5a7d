"""What a child of fork(2) inherits and cannot use: of its parent's threads it has one alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

REFUSED = "this process is a fork of the one that opened the swap; open a swap of its own here"

T = TypeVar("T")

_watched: WeakKeyDictionary[Any, Callable[[Any], None]] = WeakKeyDictionary()


def watch(owner: T, in_child: Callable[[T], None]) -> None:
    """Call ``in_child(owner)`` in a child of this process, as long as the owner lives.

    For what has threads, locks or descriptors, which a fork copies without their meaning: it is to
    refuse calls from then on, and to touch nothing that the parent still has. It must not raise.
    """
    _register()
    _watched[owner] = in_child


@cache
def _register() -> None:
    os.register_at_fork(after_in_child=_in_child)


def _in_child() -> None:
    for owner, in_child in list(_watched.items()):
        in_child(owner)
