"""An attend that is made again and again: launches prepared once, three numbers set by each call.

Packing parameters, choosing kernels and checking what was checked before takes five times as long
as the launches themselves, and longer than the GPU takes for 32,768 tokens.
"""

from __future__ import annotations

import ctypes
import struct
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from hsswap.driver import checks
from hsswap.driver.base import AttendAgain, Event, Stream
from hsswap.driver.cuda_attention import enqueue_attend
from hsswap.driver.cuda_attention_params import ATTEND_BYTES, LENGTH_AT, OUT_AT, QUERIES_AT
from hsswap.driver.cuda_modules import Prepared
from hsswap.driver.cuda_reach import is_reachable
from hsswap.driver.cuda_seam import Launch, Launcher
from hsswap.driver.cuda_stream import CudaStream
from hsswap.driver.operations import AttendWork
from hsswap.driver.tensor import Tensor

if TYPE_CHECKING:
    from hsswap.driver.cuda import CudaDevice

_ADDRESS, _LENGTH = struct.Struct("<Q"), struct.Struct("<i")


class NotAgainError(Exception):
    """A call needs more than launches: lists that are made anew each time."""


class Listener(Launcher):
    """Prepares what it is told to launch."""

    def __init__(self, device: CudaDevice, stream: CudaStream) -> None:
        self.compute_capability = device.compute_capability
        self.sm_count = device.sm_count
        self.shared_bytes_limit = device.shared_bytes_limit
        self.arch = device.arch
        self.prepared: list[Prepared] = []
        self.params = b""
        self._device, self._stream = device, stream

    def start(self, stream: Stream, launch: Launch) -> None:
        """Prepare it. All launches must have the same parameters."""
        if len(launch.params) != ATTEND_BYTES or (self.prepared and launch.params != self.params):
            raise NotAgainError
        self.params = launch.params
        self.prepared.append(self._device.prepared(self._stream, launch))

    def upload(self, stream: Stream, array: NDArray[Any], *, direct: bool = False) -> int:
        """Lists go through a ring, whose places are used again."""
        raise NotAgainError

    def keep(self, stream: Stream, name: str, array: NDArray[Any]) -> int:
        """As above."""
        raise NotAgainError

    def copy(self, stream: Stream, target: int, source: int, nbytes: int) -> None:
        """Is no launch."""
        raise NotAgainError

    def max_active_clusters(self, launch: Launch) -> int:
        """The device's."""
        return self._device.max_active_clusters(launch)

    def workspace(self, stream: Stream, nbytes: int) -> int:
        """The stream's: one that it outgrows stays until the stream closes."""
        return self._device.workspace(stream, nbytes)


class CudaAgain(AttendAgain):
    """See :class:`AttendAgain`; :func:`attend_again` makes them."""

    def __init__(
        self, device: CudaDevice, stream: CudaStream, work: AttendWork, listener: Listener
    ) -> None:
        self._device, self._stream = device, stream
        self._kept = work  # what the parameters point to
        self._params = ctypes.create_string_buffer(listener.params, ATTEND_BYTES)
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self._params))
        self._arguments = ctypes.addressof(self._pointers)
        self._launches = listener.prepared

    def __call__(self, queries: Tensor, out: Tensor, length: int) -> Event:
        """See :class:`AttendAgain`. Raises CaptureError during a capture, which has no events."""
        stream = self._stream
        state = stream.state
        self._device.check_open()
        with state.lock, self._device.context:
            state.captures.refuse("events are recorded")
            params = self._params
            _ADDRESS.pack_into(params, QUERIES_AT, queries.address)
            _ADDRESS.pack_into(params, OUT_AT, out.address)
            _LENGTH.pack_into(params, LENGTH_AT, length)
            for launch in self._launches:
                launch(self._arguments)
            state.last_launch = None
            state.hold((queries, out))
            return stream.mark()


def attend_again(device: CudaDevice, stream: CudaStream, work: AttendWork) -> CudaAgain | None:
    """See ``Device.attend_again``. The stream's lock is held, the context current."""
    work = checks.attend(work)
    if work.end is None or not is_reachable(work) or stream.state.captures.look():
        return None
    listener = Listener(device, stream)
    try:
        enqueue_attend(listener, stream, work, work.end)
    except NotAgainError:
        return None
    return CudaAgain(device, stream, work, listener) if listener.prepared else None
