"""Faults at the seam between the swap and its device: the n-th call is refused.

On the host device every launch, event and wait goes through one method of a stream, and all memory
through two of the device. So a fault there stands for a full queue, a sticky error or no memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from hsswap.driver.host import HostDevice
from hsswap.driver.host_stream import HostStream
from hsswap.errors import DeviceError


@dataclass
class Refusal:
    """Call number ``at`` of the seam is refused, and ``more`` behind it. ``seen``: calls so far."""

    at: int
    more: int = 0
    seen: int = 0

    @property
    def fired(self) -> bool:
        """Whether any call was refused."""
        return self.seen > self.at

    def __call__(self) -> None:
        number, self.seen = self.seen, self.seen + 1
        if self.at <= number <= self.at + self.more:
            raise DeviceError(f"call {number} of the device is refused")


@contextmanager
def refusing(refusal: Refusal) -> Iterator[None]:
    """Inside, what the device is asked counts."""
    put, allocate = HostStream.put, HostDevice.allocate

    def counted_put(self: HostStream, item: Any) -> None:
        refusal()
        put(self, item)

    def counted_allocate(self: HostDevice, nbytes: int) -> Any:
        refusal()
        return allocate(self, nbytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostStream, "put", counted_put)
        patch.setattr(HostDevice, "allocate", counted_allocate)
        yield
