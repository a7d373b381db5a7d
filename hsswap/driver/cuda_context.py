"""One GPU and the context in which all calls for it are made.

The context is the caller's if the opening thread has one current on that GPU, else the GPU's
primary context (the one of torch, CuPy and the CUDA runtime), retained while the device is open. It
is never reset, and what a thread has current is put back after every call.
"""

from __future__ import annotations

from contextlib import suppress
from types import ModuleType, TracebackType
from typing import Any

from hsswap.driver.cuda_errors import CudaError, checked, load_driver
from hsswap.errors import DeviceError

BF16_FLOOR = (8, 0)
"""Compute capability from which tensor cores take BF16."""


class Context:
    """GPU ``ordinal``: ``with context:`` makes it current on this thread. Any thread may.

    ``name`` is ``"cuda:N"``. ``driver`` is ``cuda.bindings.driver``, of which nothing else in the
    package needs to know where it comes from.
    """

    def __init__(self, name: str, ordinal: int) -> None:
        self.name = name
        self.driver: ModuleType = load_driver(name)
        driver = self.driver
        count = checked(driver.cuDeviceGetCount(), f"{name}: cuDeviceGetCount")
        if ordinal >= count:
            raise DeviceError(
                f"{name} does not exist: {count} GPU(s) are visible, "
                f"{', '.join(f'cuda:{i}' for i in range(count)) or 'none'}; look at nvidia-smi -L "
                "and CUDA_VISIBLE_DEVICES"
            )
        self._device = checked(driver.cuDeviceGet(ordinal), f"{name}: cuDeviceGet")
        self.compute_capability = (
            self.attribute("COMPUTE_CAPABILITY_MAJOR"),
            self.attribute("COMPUTE_CAPABILITY_MINOR"),
        )
        if self.compute_capability < BF16_FLOOR:
            raise DeviceError(
                "{}: this GPU has compute capability {}.{}; BF16 needs 8.0 (Ampere) or newer: use "
                'device="host"'.format(name, *self.compute_capability)
            )
        self.sm_count = self.attribute("MULTIPROCESSOR_COUNT")
        self.shared_bytes_limit = self.attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        self._is_retained = False
        self.handle = self._of_caller()
        if self.handle is None:
            self.handle = checked(
                driver.cuDevicePrimaryCtxRetain(self._device), f"{name}: cuDevicePrimaryCtxRetain"
            )
            self._is_retained = True
        with self:
            flags = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
            self.memory_stream = checked(driver.cuStreamCreate(flags), f"{name}: cuStreamCreate")
            """For zeroing memory: in order with no stream of a caller."""

    def _of_caller(self) -> Any:
        """The calling thread's context if it is one of this GPU, else None."""
        driver = self.driver
        current = checked(driver.cuCtxGetCurrent(), f"{self.name}: cuCtxGetCurrent")
        if int(current) == 0:
            return None
        device = checked(driver.cuCtxGetDevice(), f"{self.name}: cuCtxGetDevice")
        return current if int(device) == int(self._device) else None

    def attribute(self, name: str) -> int:
        """A device attribute, by its name without ``CU_DEVICE_ATTRIBUTE_``."""
        kind = getattr(self.driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(
            checked(self.driver.cuDeviceGetAttribute(kind, self._device), f"{self.name}: attribute")
        )

    def __enter__(self) -> None:
        status = self.driver.cuCtxPushCurrent(self.handle)
        if status[0]:
            checked(status, f"{self.name}: cuCtxPushCurrent")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.driver.cuCtxPopCurrent()

    def relaxed(self) -> Relaxed:
        """Let this thread allocate, load and ask events while some stream is being captured.

        Without it a capture in another thread (torch.cuda.graph, in its default mode) makes such
        calls fail here, and the capture with them. None of them is part of a capture.
        """
        return Relaxed(self)

    def release(self) -> None:
        """Let go of the primary context. Nothing may be made in it afterwards; twice is fine."""
        stream, self.memory_stream = self.memory_stream, None
        if stream is not None:
            with suppress(CudaError), self:
                self.driver.cuStreamDestroy(stream)
        if self._is_retained:
            self._is_retained = False
            self.driver.cuDevicePrimaryCtxRelease(self._device)


class Relaxed:
    """What :meth:`Context.relaxed` returns. A class: a generator takes longer than the calls."""

    __slots__ = ("_before", "_context")

    def __init__(self, context: Context) -> None:
        self._context = context

    def __enter__(self) -> None:
        driver = self._context.driver
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        status = driver.cuThreadExchangeStreamCaptureMode(mode)
        self._before = checked(status, f"{self._context.name}: cuThreadExchangeStreamCaptureMode")

    def __exit__(self, *error: object) -> None:
        self._context.driver.cuThreadExchangeStreamCaptureMode(self._before)
