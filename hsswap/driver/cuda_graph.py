"""Graphs of a CUDA device, and the memory that what was captured uses at every launch.

A kernel in a graph finds its parameters as they were at the capture. So lists that an operation
uploads must stay where they are for the graph's life: not in the stream's ring, which is used
again, but in memory of the capture. The workspace is the capture's own too, since a graph may run
beside other work of the stream it was captured on.
"""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hsswap.driver.base import Graph, Stream
from hsswap.driver.cuda_context import Context
from hsswap.driver.cuda_errors import CudaError, checked
from hsswap.driver.cuda_memory import DeviceBuffer
from hsswap.errors import ArgumentError, CaptureError, ClosedError

if TYPE_CHECKING:
    from hsswap.driver.cuda_stream import Shared

LIST_BYTES = 1 << 18
"""First size of the memory for lists."""

WORKSPACE_BYTES = 1 << 20
"""First size of a workspace."""

ALIGNMENT = 256

MOST_CAPTURES = 256
"""Graphs of the caller's on one handle; each may keep 2 MiB for as long as the handle is known."""

# The legacy default stream. 2 would be the calling thread's own, another one on every thread.
SPECIAL_HANDLES = (0, 1)


class CaptureMemory:
    """Device memory of one capture. The context must be current, and the thread's mode relaxed."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._lists: list[DeviceBuffer] = []
        self._taken = 0
        self._workspaces: list[DeviceBuffer] = []

    def upload(self, array: NDArray[Any]) -> int:
        """Address of a copy that is there when this returns: no part of the graph."""
        array = np.ascontiguousarray(array)
        nbytes = max(1, array.nbytes)
        if not self._lists or self._taken + nbytes > self._lists[-1].nbytes:
            last = self._lists[-1].nbytes if self._lists else LIST_BYTES // 2
            self._lists.append(self._allocate(max(nbytes, 2 * last)))
            self._taken = 0
        address = self._lists[-1].address + self._taken
        self._taken += -(-nbytes // ALIGNMENT) * ALIGNMENT
        if array.nbytes:
            driver, stream = self._context.driver, self._context.memory_stream
            source = array.__array_interface__["data"][0]
            what = f"{self._context.name}: cuMemcpyHtoDAsync"
            checked(driver.cuMemcpyHtoDAsync(address, source, array.nbytes, stream), what)
            checked(driver.cuStreamSynchronize(stream), what)
        return address

    def workspace(self, nbytes: int) -> int:
        """See ``Launcher.workspace``."""
        if not self._workspaces or self._workspaces[-1].nbytes < nbytes:
            last = self._workspaces[-1].nbytes if self._workspaces else WORKSPACE_BYTES // 2
            self._workspaces.append(self._allocate(max(nbytes, 2 * last)))
        return self._workspaces[-1].address

    def _allocate(self, nbytes: int) -> DeviceBuffer:
        return DeviceBuffer(self._context, nbytes, lambda _: None)

    def free(self) -> None:
        """Close it, from any thread in any mode."""
        with self._context, self._context.relaxed():
            self.close()

    def close(self) -> None:
        """Free it; the driver waits for what is in flight. Twice is fine."""
        for buffer in (*self._lists, *self._workspaces):
            buffer.close()
        self._lists.clear()
        self._workspaces.clear()


class CudaGraph(Graph):
    """A graph that can be launched. :meth:`CudaStream.capture` makes it."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._captured: Any = None
        self._executable: Any = None
        self._closed = False
        self._works: list[object] = []
        self.memory = CaptureMemory(shared.context)
        shared.graphs.add(self)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    @property
    def raw(self) -> int | None:
        """See :class:`Graph`."""
        return None if self._captured is None else int(self._captured)

    def hold(self, work: object) -> None:
        """Keep a record until the graph is closed; a graph is closed then."""
        self._works.append(work)

    def end(self, captured: Any) -> None:
        """Make ``captured``, a raw graph, ready to launch; it is this one's. Blocks for
        milliseconds.
        """
        self._captured = captured
        context = self._shared.context
        driver = context.driver
        with context, context.relaxed():
            what = f"{context.name}: cuGraphInstantiate"
            self._executable = checked(driver.cuGraphInstantiate(captured, 0), what)
            # Else the first launch does it.
            what = f"{context.name}: cuGraphUpload"
            checked(driver.cuGraphUpload(self._executable, context.memory_stream), what)

    def launch(self, stream: Stream) -> None:
        """Launch it on a stream of its device."""
        if self._closed:
            raise ClosedError("the graph is closed; capture a new one")
        if self._executable is None:
            raise CaptureError("the graph is still being captured; leave its with block first")
        state = getattr(stream, "state", None)
        if state is None or state.shared is not self._shared:
            raise ArgumentError(f"{stream!r} is no stream of the graph's device")
        context = self._shared.context
        if stream.closed:  # type: ignore[attr-defined]
            raise ClosedError("the stream is closed; make a new one")
        with state.lock, context:
            state.captures.refuse("graphs are launched")
            state.captures.memory = None
            status = context.driver.cuGraphLaunch(self._executable, state.handle)
            checked(status, f"{context.name}: cuGraphLaunch")
            state.last_launch = None
            state.hold(self)

    def close(self) -> None:
        """Free it; blocks until launches in flight have run. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._shared.graphs.discard(self)
        context = self._shared.context
        driver = context.driver
        with suppress(CudaError), context, context.relaxed():
            if self._executable is not None:
                checked(driver.cuGraphExecDestroy(self._executable), "cuGraphExecDestroy")
            if self._captured is not None:
                driver.cuGraphDestroy(self._captured)
            self.memory.close()
        for work in self._works:
            if isinstance(work, Graph):
                work.close()
        self._works.clear()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            warnings.warn("a graph was not closed", ResourceWarning, 2)


class Captures:
    """What is known of captures on one raw handle. The stream's lock is held, the context current.

    ``memory`` is where lists of what is enqueued now go, if into a graph, as :meth:`look` found.
    """

    def __init__(self, context: Context, handle: int) -> None:
        self._context = context
        self._handle = handle
        self._graph: CudaGraph | None = None
        self._of_caller: dict[int, CaptureMemory] = {}
        self.memory: CaptureMemory | None = None

    def is_capturing(self) -> bool:
        """Whether a graph is being made of what is enqueued, by us or by the caller."""
        if self._handle in SPECIAL_HANDLES:  # they cannot be captured, and may not be asked
            return False
        driver, what = self._context.driver, f"{self._context.name}: cuStreamIsCapturing"
        return int(checked(driver.cuStreamIsCapturing(self._handle), what)) != 0

    def look(self) -> bool:
        """Notice whether what is enqueued now goes into a graph.

        Before each operation: a caller may capture on the raw handle at any time. Raises
        CaptureError when he captured too often.
        """
        self.memory = None
        if not self.is_capturing():
            return False
        self.memory = self._memory_for_caller() if self._graph is None else self._graph.memory
        return True

    def last_of_callers(self) -> int | None:
        """Number of the callers' last capture whose memory is here."""
        return next(reversed(self._of_caller), None)

    def take(self, number: int) -> CaptureMemory | None:
        """The memory of a caller's capture, which has ended; it is the taker's to close."""
        return self._of_caller.pop(number, None)

    def _memory_for_caller(self) -> CaptureMemory:
        """It stays until it is taken or the stream closes: nobody says when the caller's graph is
        gone.
        """
        what = f"{self._context.name}: cuStreamGetCaptureInfo"
        number = int(checked(self._context.driver.cuStreamGetCaptureInfo(self._handle), what)[1])
        if number not in self._of_caller:
            if len(self._of_caller) >= MOST_CAPTURES:
                raise CaptureError(
                    f"{MOST_CAPTURES} graphs were captured on stream {self._handle}, and what they "
                    "read is kept; take it with Stream.take_captured, and close it with the graph"
                )
            self._of_caller[number] = CaptureMemory(self._context)
        return self._of_caller[number]

    def refuse(self, what: str) -> None:
        """Raise CaptureError during a capture, in which ``what`` cannot happen."""
        if self.is_capturing():
            raise CaptureError(
                f"stream {self._handle} is being captured into a graph, which takes operations "
                f"only; see to it that {what} outside of the capture"
            )

    def begin(self, graph: CudaGraph) -> None:
        """What is enqueued from now on goes into ``graph``."""
        if self._handle in SPECIAL_HANDLES:
            raise CaptureError("the default stream cannot be captured; make a stream")
        self.refuse("another capture begins")
        driver = self._context.driver
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        what = f"{self._context.name}: cuStreamBeginCapture"
        checked(driver.cuStreamBeginCapture(self._handle, mode), what)
        self._graph = graph

    def end(self) -> Any:
        """The raw graph. Raises CudaError where something made the capture invalid."""
        self._graph = self.memory = None
        what = f"{self._context.name}: cuStreamEndCapture"
        return checked(self._context.driver.cuStreamEndCapture(self._handle), what)

    def hold(self, work: object) -> None:
        """Keep a record as long as its graph. What a caller captures is his to keep."""
        if self._graph is not None:
            self._graph.hold(work)

    def close(self) -> None:
        """Free what callers' graphs read; they must be gone."""
        for memory in self._of_caller.values():
            memory.close()
        self._of_caller.clear()
