"""Streams of a CUDA device: raw handles, what is in flight on them, and memory for small uploads.

What an operation holds (the record with its tensors' owners, its part of the upload ring) is given
back in *epochs*: every ``EPOCH_WORKS`` operations, and with every event a caller records, an event
closes the epoch; when it is reached, all that the epoch held is let go. So nothing ever waits to
give back, and nothing is given back while a kernel may read it.
"""

from __future__ import annotations

import ctypes
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsswap.driver.base import Event, Graph, Stream, protocol_handle
from hsswap.driver.cuda_context import Context
from hsswap.driver.cuda_errors import CudaError, checked
from hsswap.driver.cuda_events import CudaEvent, EventPool, RawEvent, Waiter
from hsswap.driver.cuda_graph import SPECIAL_HANDLES, Captures, CudaGraph
from hsswap.driver.cuda_memory import DeviceBuffer, UploadRing, copy_to
from hsswap.driver.cuda_seam import Launch
from hsswap.errors import ArgumentError, CaptureError, ClosedError

EPOCH_WORKS = 32
"""Operations. Events cost 1 us each; held longer, memory of finished work is given back late."""

MARKS_A_REAP = 4
"""Epochs from one look at finished ones to the next: a look is three calls of the driver."""

RING_BYTES = 1 << 20
"""First size of a ring; index arrays of a launch are some KiB. It doubles when it is too small."""

DIRECT_BYTES = 1 << 14
"""Longer lists are copied even if kernels may read them over the link."""

WORKSPACE_BYTES = 1 << 20
"""First size of a workspace."""

PARAM_BYTES = 4096
"""Most bytes of kernel parameters (CUDA C++ programming guide, sm_80)."""

LOWEST_POINTER = 4096


@dataclass(frozen=True, slots=True)
class Shared:
    """What all streams of a device use."""

    context: Context
    events: EventPool
    waiter: Waiter
    graphs: weakref.WeakSet[CudaGraph] = field(default_factory=weakref.WeakSet)
    captures: weakref.WeakSet[Captures] = field(default_factory=weakref.WeakSet)


@dataclass(frozen=True, slots=True)
class _Epoch:
    event: RawEvent
    ring: UploadRing
    ring_head: int
    works: list[object]


@dataclass(frozen=True, slots=True)
class _Kept:
    content: bytes
    memory: DeviceBuffer


class StreamState:
    """One raw handle: its epochs, ring, workspace and a stream for its wake-ups.

    Shared by all :class:`CudaStream` that name the handle. ``lock`` is held around every enqueue.
    The context must be current for every method but :meth:`close`.
    """

    def __init__(self, shared: Shared, handle: int, *, owned: bool) -> None:
        self.shared = shared
        self.handle = handle
        self.owned = owned
        self.closed = False
        self.lock = threading.RLock()
        driver, name = shared.context.driver, shared.context.name
        self.configs: dict[tuple[int, bool], Any] = {}
        """Launch configurations, each with its attributes: blocks of a cluster, may follow."""
        self.params = ctypes.create_string_buffer(PARAM_BYTES)
        self.param_list = (ctypes.c_void_p * 1)(ctypes.addressof(self.params))
        self.last_launch: Launch | None = None  # None behind a graph, or a call made again
        self._held: list[object] = []
        self._works = self._marks = 0
        self._epochs: deque[_Epoch] = deque()
        self._rings = [UploadRing(shared.context, RING_BYTES)]
        self._kept: dict[str, _Kept] = {}
        self.captures = Captures(shared.context, handle)
        shared.captures.add(self.captures)
        self._workspaces = [self._new_workspace(WORKSPACE_BYTES)]
        flags = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self.wakes = checked(driver.cuStreamCreate(flags), f"{name}: cuStreamCreate")

    def _new_workspace(self, nbytes: int) -> DeviceBuffer:
        return DeviceBuffer(self.shared.context, nbytes, lambda _: None)

    def hold(self, work: object) -> None:
        """Keep ``work`` until all that is enqueued now has run.

        What a caller captures is his to keep; a graph of ours keeps its works.
        """
        if self.captures.memory is not None:
            self.captures.hold(work)
            return
        self._held.append(work)
        self._works += 1
        if self._works >= EPOCH_WORKS:
            self.mark()

    def mark(self) -> RawEvent:
        """Close the epoch; the event behind everything enqueued so far. Not during a capture."""
        event = self.shared.events.take()
        context = self.shared.context
        status = context.driver.cuEventRecord(event.handle, self.handle)
        checked(status, f"{context.name}: cuEventRecord")
        if self._held or self._works:
            ring = self._rings[-1]
            self._epochs.append(_Epoch(event, ring, ring.head, self._held))
            self._held, self._works = [], 0
        self._marks += 1
        if self._marks % MARKS_A_REAP == 0:
            self.reap()
        return event

    def reap(self) -> None:
        """Let go of what finished epochs held. Never waits; raises CudaError on failed work."""
        if not self._epochs:
            return
        with self.shared.context.relaxed():
            while self._epochs and self._epochs[0].event.reached():
                epoch = self._epochs.popleft()
                epoch.ring.free_until(epoch.ring_head)

    def upload(self, array: NDArray[Any], direct: bool) -> int:
        """See ``Launcher.upload``."""
        if self.captures.memory is not None:
            return self.captures.memory.upload(array)
        nbytes = array.nbytes
        offset = self._fill(array)
        ring = self._rings[-1]
        if direct and nbytes <= DIRECT_BYTES:
            return ring.host_address(offset)
        target, context = ring.device_address(offset), self.shared.context
        if nbytes:
            status = context.driver.cuMemcpyHtoDAsync(
                target, ring.host_address(offset), nbytes, self.handle
            )
            checked(status, f"{context.name}: cuMemcpyHtoDAsync")
        return target

    def keep(self, name: str, array: NDArray[Any]) -> int:
        """See ``Launcher.keep``. One that outgrows its memory blocks for an allocation."""
        if self.captures.memory is not None:  # what is kept may be other bytes when the graph runs
            return self.captures.memory.upload(array)
        content = array.tobytes()
        known = self._kept.get(name)
        if known is not None and known.content == content:
            return known.memory.address
        context = self.shared.context
        if known is not None and known.memory.nbytes >= len(content):
            memory = known.memory
        else:
            memory = self._new_workspace(max(256, 2 * len(content)))
            self._workspaces.insert(0, memory)  # the last one is the workspace
        # In stream order behind the kernels that read what was there.
        source = self._rings[-1].host_address(self._fill(array))
        status = context.driver.cuMemcpyHtoDAsync(memory.address, source, len(content), self.handle)
        checked(status, f"{context.name}: cuMemcpyHtoDAsync")
        self._kept[name] = _Kept(content, memory)
        return memory.address

    def _fill(self, array: NDArray[Any]) -> int:
        """Offset in the newest ring of a copy of the array."""
        array = np.ascontiguousarray(array)
        offset = self._take(max(1, array.nbytes))
        copy_to(self._rings[-1].host_address(offset), array)
        return offset

    def _take(self, nbytes: int) -> int:
        ring = self._rings[-1]
        offset = ring.take(nbytes)
        if offset is None:
            self.reap()
            offset = ring.take(nbytes)
        if offset is None:
            # Old rings are kept until the stream closes: together they are no larger than this one.
            ring = UploadRing(self.shared.context, max(2 * ring.nbytes, 4 * nbytes))
            self._rings.append(ring)
            offset = ring.take(nbytes)
            assert offset is not None
        self._works += 1
        return offset

    def workspace(self, nbytes: int) -> int:
        """See ``Launcher.workspace``. A larger one blocks for its allocation."""
        if self.captures.memory is not None:
            return self.captures.memory.workspace(nbytes)
        if self._workspaces[-1].nbytes < nbytes:
            # The old one may be in use; it goes with the stream, and sizes at least double.
            size = max(nbytes, 2 * self._workspaces[-1].nbytes)
            self._workspaces.append(self._new_workspace(size))
        return self._workspaces[-1].address

    def synchronize(self) -> None:
        """Block until what was enqueued through hsswap has run; raises CudaError."""
        context = self.shared.context
        with self.lock, context:
            self.captures.refuse("it is waited for")
            event = self.mark()
        with context, context.relaxed():  # not under the lock: others may enqueue meanwhile
            status = context.driver.cuEventSynchronize(event.handle)
            checked(status, f"work on {context.name}")
        with self.lock, context:
            self.reap()

    def close(self) -> None:
        """Wait for the work, then free everything. Twice is fine. Failures were reported before."""
        with self.lock:
            if self.closed:
                return
            self.closed = True
        driver = self.shared.context.driver
        with suppress(CudaError, CaptureError):
            if self.owned:
                self.synchronize()
            elif self._epochs:  # the caller may have destroyed his stream; its events remain
                with self.shared.context, self.shared.context.relaxed():
                    driver.cuEventSynchronize(self._epochs[-1].event.handle)
        with suppress(CudaError), self.shared.context:
            driver.cuStreamSynchronize(self.wakes)
            driver.cuStreamDestroy(self.wakes)
            if self.owned:
                driver.cuStreamDestroy(self.handle)
        self._epochs.clear()
        self._held.clear()
        for ring in self._rings:
            ring.close()
        for workspace in self._workspaces:
            workspace.close()
        self.captures.close()


class CudaStream(Stream):
    """A stream; :meth:`CudaDevice.stream` makes them. One from a handle leaves it alive."""

    def __init__(
        self, state: StreamState, on_close: Callable[[CudaStream], None], *, owner: bool
    ) -> None:
        self.state = state
        self.handle = state.handle
        self.is_owner = owner
        self._on_close = on_close
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called, here or on the owner."""
        return self._closed or self.state.closed

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"stream {self.handle} is closed; make a new one")

    @property
    def is_capturing(self) -> bool:
        """Whether what is enqueued goes into a graph, ours or the caller's."""
        self._check_open()
        with self.state.shared.context:
            return self.state.captures.is_capturing()

    @contextmanager
    def capture(self) -> Iterator[Graph]:
        """Capture what is enqueued on this stream in the ``with`` block. Its end blocks."""
        self._check_open()
        state = self.state
        graph = CudaGraph(state.shared)
        try:
            with state.lock, state.shared.context:
                state.captures.begin(graph)
            try:
                yield graph
            except BaseException:
                with suppress(CudaError), state.lock, state.shared.context:
                    state.shared.context.driver.cuGraphDestroy(state.captures.end())
                raise
            with state.lock, state.shared.context:
                captured = state.captures.end()
            graph.end(captured)
        except BaseException:
            graph.close()
            raise

    def take_captured(self) -> ExitStack:
        """See :class:`Stream`; of all handles that took part in the capture."""
        self._check_open()
        state, taken = self.state, ExitStack()
        with state.lock, state.shared.context:
            state.captures.refuse("what graphs read is taken")
            number = state.captures.last_of_callers()
        if number is not None:
            for memory in [each.take(number) for each in list(state.shared.captures)]:
                if memory is not None:
                    taken.callback(memory.free)
        return taken

    def record(self) -> Event:
        """An event behind everything enqueued so far."""
        self._check_open()
        state = self.state
        shared = state.shared
        with state.lock, shared.context:
            state.captures.refuse("events are recorded")
            return self.mark()

    def mark(self) -> Event:
        """The same where the stream's lock is held, the context current and nothing captured."""
        state, shared = self.state, self.state.shared
        return CudaEvent(shared.context, state.mark(), shared.waiter, state.wakes)

    def wait_for(self, event: Event) -> None:
        """Let later work run only after ``event``, one of any stream of this process' GPUs.

        Raises ArgumentError for an event that is not of a CUDA device: wait for it first.
        """
        self._check_open()
        if not isinstance(event, CudaEvent):
            raise ArgumentError(f"event is a {type(event).__name__}; a CUDA event is needed")
        raw = event.raw
        if raw is not None:
            context = self.state.shared.context
            with self.state.lock, context:
                self.state.captures.refuse("it waits for events")
                status = context.driver.cuStreamWaitEvent(self.handle, raw.handle, 0)
                checked(status, f"{context.name}: cuStreamWaitEvent")

    def synchronize(self) -> None:
        """Block the calling thread until all work has run; raises DeviceError when some failed."""
        self._check_open()
        self.state.synchronize()

    def close(self) -> None:
        """Wait for the work and destroy the stream, unless it is the caller's. Twice is fine."""
        if self._closed:
            return
        self._closed = True
        self._on_close(self)
        if self.is_owner:
            self.state.close()
        elif not self.state.closed:
            with suppress(CudaError), self.state.lock, self.state.shared.context:
                if not self.state.captures.is_capturing():
                    self.state.mark()

    def __del__(self) -> None:
        if getattr(self, "is_owner", False) and not self._closed and not self.state.closed:
            warnings.warn(f"stream {self.handle} was not closed", ResourceWarning, 2)


def handle_number(handle: object) -> int:
    """The raw handle in what a caller gave; raises ArgumentError for anything else.

    An int; a :class:`CudaStream`; an object with ``__cuda_stream__``; torch's ``cuda_stream``,
    CuPy's ``ptr``.
    """
    number: object = handle
    if isinstance(handle, CudaStream):
        number = handle.handle
    elif (given := protocol_handle(handle)) is not None:
        number = given
    else:
        for name in ("cuda_stream", "ptr"):
            if hasattr(handle, name):
                number = getattr(handle, name)
                break
    if not isinstance(number, int) or isinstance(number, bool):
        raise ArgumentError(
            f"a stream handle is a {type(handle).__name__}; an int, a Stream of this device or an "
            "object with __cuda_stream__ is needed"
        )
    if number not in SPECIAL_HANDLES and number < LOWEST_POINTER:
        raise ArgumentError(
            f"stream handle {number} names no stream that all threads share; make one"
        )
    return number
