"""How a model's arrays meet a swap: what the swap takes, where outputs are made, which stream."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from hsswap.bf16 import U16


class Arrays(Protocol):
    """The arrays of one model. ``stream`` is the raw handle that its work goes to, None where its
    arrays are in host memory and an attend must have run before they are looked at.
    """

    @property
    def stream(self) -> int | None:
        """See the class."""
        ...

    def new(self, shape: tuple[int, ...]) -> Any:
        """Room for an output, BF16."""
        ...

    def for_swap(self, array: Any) -> Any:
        """What :class:`hsswap.Sequence` takes, without a copy."""
        ...

    def on_host(self, array: Any) -> U16:
        """BF16 codes in NumPy, once what is enqueued has run."""
        ...


class HostArrays:
    """NumPy arrays of BF16 codes."""

    stream = None

    def new(self, shape: tuple[int, ...]) -> U16:
        """See :class:`Arrays`."""
        return np.empty(shape, np.uint16)

    def for_swap(self, array: U16) -> U16:
        """See :class:`Arrays`."""
        return array

    def on_host(self, array: U16) -> U16:
        """See :class:`Arrays`."""
        return array
