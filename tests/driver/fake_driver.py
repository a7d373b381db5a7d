"""A CUDA driver that does nothing but keep count: device memory is host memory. No GPU."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np

from hsswap.driver.cuda_stream import CudaStream, StreamState

OK, NOT_READY, ILLEGAL_ADDRESS = 0, 600, 700


class FakeDriver:
    """Device memory is host memory; copies are made at once; events are what the test says."""

    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUevent_flags = SimpleNamespace(CU_EVENT_DISABLE_TIMING=2, CU_EVENT_BLOCKING_SYNC=1)
    CUresult = SimpleNamespace(CUDA_ERROR_NOT_READY=NOT_READY)
    CUpointer_attribute = SimpleNamespace(CU_POINTER_ATTRIBUTE_DEVICE_POINTER=3)
    CUlaunchConfig = SimpleNamespace
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2)
    CUhostFn = staticmethod(lambda address: address)
    CU_MEMHOSTREGISTER_PORTABLE = 1
    CU_MEMHOSTREGISTER_DEVICEMAP = 2

    def __init__(self) -> None:
        self.status = OK
        self.capturing = 0
        self.copies = 0
        self.launches = 0
        self._memory: dict[int, Any] = {}
        self._next = 100

    def cuMemAlloc(self, nbytes: int) -> tuple[int, int]:
        """Zeroed host memory."""
        array = np.zeros(nbytes, np.uint8)
        self._memory[array.ctypes.data] = array
        return OK, int(array.ctypes.data)

    def cuMemFree(self, address: int) -> tuple[int]:
        """Each once."""
        del self._memory[address]
        return (OK,)

    def cuMemHostGetDevicePointer(self, address: int, flags: int) -> tuple[int, int]:
        """The same."""
        return OK, address

    def cuPointerGetAttribute(self, kind: int, address: int) -> tuple[int, int]:
        """Nothing else is pinned."""
        return 1, 0

    def cuMemcpyHtoDAsync(self, target: int, source: int, nbytes: int, stream: int) -> tuple[int]:
        """At once."""
        self.copies += 1
        ctypes.memmove(target, source, nbytes)
        return (OK,)

    def cuStreamIsCapturing(self, stream: int) -> tuple[int, int]:
        """As the test says."""
        return OK, self.capturing

    def cuStreamGetCaptureInfo(self, stream: int) -> tuple[int, int, int, int]:
        """The capture's number is what the test set."""
        return OK, 1, self.capturing, 0

    def cuStreamBeginCapture(self, stream: int, mode: int) -> tuple[int]:
        """As asked."""
        self.capturing = 1
        return (OK,)

    def cuStreamEndCapture(self, stream: int) -> tuple[int, int]:
        """A number for a graph."""
        self.capturing = 0
        return self.status, 77

    def cuGraphInstantiate(self, graph: int, flags: int) -> tuple[int, int]:
        """A number for an executable one."""
        assert graph == 77
        return OK, 78

    def cuGraphLaunch(self, executable: int, stream: int) -> tuple[int]:
        """Counted."""
        assert executable == 78
        self.launches += 1
        return (OK,)

    def cuEventQuery(self, event: int) -> tuple[int]:
        """As the test says."""
        return (self.status,)

    def cuEventCreate(self, flags: int) -> tuple[int, int]:
        """A number."""
        self._next += 1
        return OK, self._next

    cuStreamCreate = cuEventCreate

    def __getattr__(self, name: str) -> Any:
        if name.startswith("cu"):
            return lambda *arguments: (OK,)
        raise AttributeError(name)


class FakeContext(nullcontext[None]):
    """A context that is always current."""

    def relaxed(self) -> nullcontext[None]:
        """Nothing is ever refused."""
        return nullcontext()

    def __init__(self) -> None:
        super().__init__()
        self.name = "cuda:fake"
        self.driver = FakeDriver()
        self.memory_stream = 1


def stream_of(state: StreamState) -> CudaStream:
    """A stream that names the state."""
    return CudaStream(state, lambda stream: None, owner=False)


def content(address: int, array: np.ndarray[Any, Any]) -> bytes:
    """What lies where an array was uploaded."""
    return ctypes.string_at(address, array.nbytes)
