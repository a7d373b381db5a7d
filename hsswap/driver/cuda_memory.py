"""Memory of a CUDA device: device buffers, mapped host buffers, and rings for small uploads."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from hsswap.driver.base import Buffer
from hsswap.driver.cuda_context import Context
from hsswap.driver.cuda_errors import CudaError, checked
from hsswap.driver.host_memory import HostBuffer
from hsswap.errors import ArgumentError, DeviceError

ALIGNMENT = 4096
"""Bytes; what :meth:`Device.allocate` promises. cuMemAlloc itself promises 256."""

REGISTER_BYTES = 64 << 30
"""Largest piece to pin at once: some drivers refuse more in one call."""

LARGEST_BYTES = 1 << 62
"""Sizes from here on do not fit the driver's types."""

OnClose = Callable[[Any], None]


class DeviceBuffer(Buffer):
    """Zeroed memory of the GPU, aligned to 4096 bytes."""

    on_device = True

    def __init__(self, context: Context, nbytes: int, on_close: OnClose) -> None:
        self._base: int | None = None
        if nbytes < 1:
            raise ArgumentError(f"nbytes is {nbytes}; 1 and more")
        if nbytes >= LARGEST_BYTES:
            raise DeviceError(f"{context.name} has no room for {nbytes} bytes; take fewer slots")
        self._context = context
        self._on_close = on_close
        driver = context.driver
        with context, context.relaxed():
            what = f"{context.name}: cuMemAlloc of {nbytes} bytes"
            base = int(checked(driver.cuMemAlloc(nbytes + ALIGNMENT), what))
            self._base = base
            self.address = -(-base // ALIGNMENT) * ALIGNMENT
            self.nbytes = nbytes
            # In order with no stream of a caller, so it must have run when this returns.
            stream = context.memory_stream
            checked(driver.cuMemsetD8Async(self.address, 0, nbytes, stream), f"{what}: zeroing")
            checked(driver.cuStreamSynchronize(stream), f"{what}: zeroing")

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._base is None

    def close(self) -> None:
        """Free the memory; the driver waits for work in flight. A second call does nothing."""
        base, self._base = self._base, None
        if base is None:
            return
        self._on_close(self)
        # After a sticky error nothing can be freed, and the error was reported where it arose.
        with suppress(CudaError), self._context, self._context.relaxed():
            checked(self._context.driver.cuMemFree(base), f"{self._context.name}: cuMemFree")

    def __del__(self) -> None:
        if getattr(self, "_base", None) is not None:
            warnings.warn(f"a buffer of {self.nbytes} bytes was not closed", ResourceWarning, 2)


class MappedBuffer(Buffer):
    """Zeroed host memory, pinned and mapped: the GPU reads and writes it under the same address.

    Mapped by the system first, so that it is page-aligned and in huge pages where allowed, then
    registered. Pinning takes about 60 ms a GiB (H200 host, 2026-11-30).
    """

    on_device = False

    def __init__(self, context: Context, nbytes: int, on_close: OnClose) -> None:
        self._memory: HostBuffer | None = None
        self._pieces: list[int] = []
        self._context = context
        self._on_close = on_close
        memory = HostBuffer(nbytes, lambda _: None)
        self._memory = memory
        self.address, self.nbytes = memory.address, nbytes
        try:
            self._register()
        except BaseException:
            self._unregister()
            self._memory = None
            memory.close()
            raise

    def _register(self) -> None:
        driver, name = self._context.driver, self._context.name
        flags = driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP
        whole = -(-self.nbytes // ALIGNMENT) * ALIGNMENT
        with self._context, self._context.relaxed():
            for start in range(0, whole, REGISTER_BYTES):
                address, part = self.address + start, min(REGISTER_BYTES, whole - start)
                what = f"{name}: pinning {part} bytes of host memory"
                checked(driver.cuMemHostRegister(address, part, flags), what)
                self._pieces.append(address)
                seen = int(checked(driver.cuMemHostGetDevicePointer(address, 0), what))
                if seen != address:
                    raise DeviceError(
                        f"{what}: the GPU sees it at another address; hsswap needs a system with "
                        "unified addressing"
                    )

    def _unregister(self) -> None:
        with suppress(CudaError), self._context, self._context.relaxed():
            for address in self._pieces:
                checked(self._context.driver.cuMemHostUnregister(address), "cuMemHostUnregister")
        self._pieces.clear()

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._memory is None

    def close(self) -> None:
        """Unpin and unmap; nothing may be in flight. A second call does nothing."""
        memory, self._memory = self._memory, None
        if memory is not None:
            self._on_close(self)
            self._unregister()
            memory.close()

    def __del__(self) -> None:
        memory = getattr(self, "_memory", None)
        if memory is not None:
            warnings.warn(f"a buffer of {self.nbytes} bytes was not closed", ResourceWarning, 2)
            self._memory = None
            # Unmapping pinned memory under the driver would be worse than losing it.
            _lost.append(memory)


_lost: list[HostBuffer] = []


class UploadRing:
    """Pinned memory and as much device memory, handed out in turn and taken back in order.

    ::

        | free | in flight: taken ... taken | free |        positions only grow; modulo ``nbytes``
               ^ tail                       ^ head
    """

    ALIGN = 256  # bytes; so that no two uploads share a line of the second-level cache

    def __init__(self, context: Context, nbytes: int) -> None:
        self.nbytes = nbytes
        self._host = MappedBuffer(context, nbytes, lambda _: None)
        try:
            self._device = DeviceBuffer(context, nbytes, lambda _: None)
        except BaseException:
            self._host.close()
            raise
        self.head = 0
        self._tail = 0

    def take(self, nbytes: int) -> int | None:
        """Offset of ``nbytes`` contiguous bytes, None while too many are in flight."""
        padded = -(-nbytes // self.ALIGN) * self.ALIGN
        start = self.head
        if start % self.nbytes + padded > self.nbytes:  # never across the end
            start += self.nbytes - start % self.nbytes
        if start + padded - self._tail > self.nbytes:
            return None
        self.head = start + padded
        return start % self.nbytes

    def free_until(self, position: int) -> None:
        """What was taken before ``head`` was ``position`` has been read."""
        self._tail = max(self._tail, position)

    def host_address(self, offset: int) -> int:
        """Where the CPU writes, and kernels may read over the link."""
        return self._host.address + offset

    def device_address(self, offset: int) -> int:
        """Where the copy in device memory is."""
        return self._device.address + offset

    def close(self) -> None:
        """Free both; nothing may be in flight."""
        self._device.close()
        self._host.close()


def copy_to(address: int, source: Any) -> None:
    """Copy a contiguous NumPy array to host memory at ``address``."""
    ctypes.memmove(address, source.__array_interface__["data"][0], source.nbytes)
