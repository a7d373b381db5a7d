"""The little that the gds backend asks of the CUDA driver, through ctypes.

Whose memory an address is, which context to make current for it, and a few plain allocations for
the probe. Not the room ``driver``: that one and ``io`` never import each other, and this needs
neither a kernel nor a stream. Numbers are those of ``cuda.h``.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any, ClassVar, NamedTuple

from hsswap.errors import ConfigError, DeviceError

LIBRARY = "libcuda.so.1"

CUDA_SUCCESS = 0
CUDA_ERROR_NOT_INITIALIZED = 3

MEMORY_TYPE_DEVICE = 2

# CUpointer_attribute
CONTEXT = 1
MEMORY_TYPE = 2
DEVICE_ORDINAL = 9
RANGE_START_ADDR = 11
RANGE_SIZE = 12


class GdsUnavailable(ConfigError):
    """The gds backend cannot work here; the message says why, and what to do."""


class Allocation(NamedTuple):
    """Device memory that was allocated in one piece. ``context`` is one that can reach it."""

    base: int
    nbytes: int
    context: int

    @property
    def end(self) -> int:
        """The first address behind it."""
        return self.base + self.nbytes


class _Answers(threading.local):
    """Where cuPointerGetAttributes puts its answers: made once a thread, filled by each call."""

    def __init__(self) -> None:
        self.kind, self.context, self.device = ctypes.c_uint(), ctypes.c_void_p(), ctypes.c_int()
        self.base, self.nbytes = ctypes.c_uint64(), ctypes.c_size_t()
        self.count = ctypes.c_uint(5)
        self.attributes = (ctypes.c_int * 5)(
            MEMORY_TYPE, CONTEXT, DEVICE_ORDINAL, RANGE_START_ADDR, RANGE_SIZE
        )
        places = (self.kind, self.context, self.device, self.base, self.nbytes)
        self.values = (ctypes.c_void_p * 5)(*map(ctypes.addressof, places))


class CudaDriver:
    """An open libcuda. Raises GdsUnavailable where there is none.

    Loading starts nothing: in a process that has not called cuInit every address is host memory.
    Instances share the driver and the primary contexts, which are retained once and never released.
    kvikio keeps a stream for each thread and context, and uses it again without asking whether the
    context is still there: with the next one at the same address that ended in a crash (26.6 on
    driver 580, a device closed and opened again).
    """

    _primary: ClassVar[dict[int, int]] = {}  # by device
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        try:
            self._library: Any = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise GdsUnavailable(
                f"{LIBRARY} (the NVIDIA driver) cannot be loaded, and kvikio moves nothing without "
                "it; install the driver, or choose io='posix' or io='auto'"
            ) from error
        self._answers = _Answers()

    def allocation(self, address: int) -> Allocation | None:
        """The device allocation around an address, or None for host memory of any kind.

        Managed memory counts as what the driver says it is. Takes the time of one driver call.
        """
        found = self._answers
        code = self._library.cuPointerGetAttributes(
            found.count, found.attributes, found.values, ctypes.c_uint64(address)
        )
        if code == CUDA_ERROR_NOT_INITIALIZED:
            return None
        self._require(code, "cuPointerGetAttributes")
        if found.kind.value != MEMORY_TYPE_DEVICE:
            return None
        primary = self.primary_context(found.device.value)
        # Memory of a pool (cuMemAllocAsync) or of cuMemMap belongs to no context.
        context = found.context.value or primary
        return Allocation(found.base.value, found.nbytes.value, context)

    def primary_context(self, device: int) -> int:
        """The primary context of a device, which stays from now on."""
        found = self._primary.get(device)
        if found is not None:
            return found
        with self._lock:
            found = self._primary.get(device)
            if found is None:
                handle, context = ctypes.c_int(), ctypes.c_void_p()
                self._check("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(device))
                self._check("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
                found = self._primary[device] = context.value or 0
        return found

    def make_current(self, context: int) -> None:
        """Make a context the calling thread's."""
        self._check("cuCtxSetCurrent", ctypes.c_void_p(context))

    # For the probe, tests and benchmarks: plain memory of a device.

    def initialize(self) -> None:
        """cuInit, and the first device's primary context current on the calling thread."""
        self._check("cuInit", ctypes.c_uint(0))
        self.make_current(self.primary_context(0))

    def allocate(self, nbytes: int) -> int:
        """The address of new device memory in the current context."""
        address = ctypes.c_uint64()
        self._check("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        return address.value

    def free(self, address: int) -> None:
        """Give memory of :meth:`allocate` back."""
        self._check("cuMemFree_v2", ctypes.c_uint64(address))

    def upload(self, address: int, source: int, nbytes: int) -> None:
        """Copy from a host address to a device address, and wait for it."""
        self._check(
            "cuMemcpyHtoD_v2",
            ctypes.c_uint64(address),
            ctypes.c_void_p(source),
            ctypes.c_size_t(nbytes),
        )

    def download(self, target: int, address: int, nbytes: int) -> None:
        """Copy from a device address to a host address, and wait for it."""
        self._check(
            "cuMemcpyDtoH_v2",
            ctypes.c_void_p(target),
            ctypes.c_uint64(address),
            ctypes.c_size_t(nbytes),
        )

    def _check(self, name: str, *arguments: Any) -> None:
        self._require(getattr(self._library, name)(*arguments), name)

    def _require(self, code: int, name: str) -> None:
        if code == CUDA_SUCCESS:
            return
        text = ctypes.c_char_p()
        self._library.cuGetErrorName(ctypes.c_int(code), ctypes.byref(text))
        reason = (text.value or b"unknown").decode()
        raise DeviceError(
            f"{name} failed: {reason} ({code}); check the address, and the driver with nvidia-smi"
        )
