"""Memory of the host device: anonymous mappings, and arrays that a stream reuses."""

from __future__ import annotations

import ctypes
import mmap
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from hsswap.driver.base import Buffer
from hsswap.errors import ArgumentError, DeviceError

# Bytes. Smaller mappings cannot hold one huge page of x86-64 or arm64 with 4 KiB pages.
HUGE_PAGE_BYTES = 1 << 21


class HostBuffer(Buffer):
    """An anonymous private mapping: page-aligned, zero, in huge pages where the system allows.

    Memory is taken page by page when it is first written. Closing unmaps; arrays over the buffer
    must not be touched after that.
    """

    on_device = False

    def __init__(self, nbytes: int, on_close: Callable[[HostBuffer], None]) -> None:
        if nbytes < 1:
            raise ArgumentError(f"nbytes is {nbytes}; 1 and more")
        try:
            mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as error:
            raise DeviceError(
                f"the host has no room for {nbytes} bytes ({error}); take fewer slots"
            ) from error
        if nbytes >= HUGE_PAGE_BYTES:
            with suppress(OSError):  # a kernel without transparent huge pages: small pages do
                mapping.madvise(mmap.MADV_HUGEPAGE)
        self._mapping: mmap.mmap | None = mapping
        self._on_close = on_close
        # The exported view dies at once; while one lives, the mapping cannot be closed.
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self.nbytes = nbytes

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._mapping is None

    def close(self) -> None:
        """Unmap the memory. A second call does nothing."""
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            self._on_close(self)
            mapping.close()

    def __del__(self) -> None:
        if getattr(self, "_mapping", None) is not None:
            warnings.warn(f"a buffer of {self.nbytes} bytes was not closed", ResourceWarning, 2)


class Scratch:
    """Arrays of one stream, kept from one operation to the next; they only grow.

    An operation may leave anything in them. One thread uses a Scratch.
    """

    def __init__(self) -> None:
        self._memory: dict[str, NDArray[np.uint8]] = {}

    def array(self, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """A C-contiguous array with undefined content, valid until ``name`` is asked for again."""
        count = 1
        for n in shape:
            count *= n
        nbytes = count * np.dtype(dtype).itemsize
        memory = self._memory.get(name)
        if memory is None or memory.nbytes < nbytes:
            memory = self._memory[name] = np.empty(nbytes, np.uint8)
        return memory[:nbytes].view(dtype).reshape(shape)
