"""The host device: every operation in NumPy, on worker threads, with memory of the host.

Used where there is no GPU, as the default of the quick start, and as an oracle in tests.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np

from hsswap.config import SPAN_TOKENS
from hsswap.driver import (
    checks,
    codes_checks,
    host_attention,
    host_codes,
    host_finalize,
    host_ops,
    host_rounds,
    host_select,
    round_checks,
)
from hsswap.driver.base import (
    AttendAgain,
    Buffer,
    Device,
    Event,
    Graph,
    Stream,
    protocol_handle,
)
from hsswap.driver.check_parts import refuse_gpu_memory
from hsswap.driver.choice_operations import FetchWork, LearnWork, TrimWork
from hsswap.driver.codes_operations import EncodeCodesWork, ScoreCodesWork
from hsswap.driver.host_memory import HostBuffer, Scratch
from hsswap.driver.host_stream import HostGraph, HostStream
from hsswap.driver.operations import (
    AppendAtWork,
    AppendWork,
    AttendWork,
    ChecksumWork,
    EncodeWork,
    FinalizeWork,
    GatherWork,
    ScatterWork,
    ScoreWork,
    SelectWork,
)
from hsswap.driver.preparing import PrepareWork
from hsswap.driver.round_operations import CopyWork, RunningWork
from hsswap.driver.rounds_base import RoundKernels
from hsswap.driver.tensor import Tensor
from hsswap.errors import ArgumentError, ClosedError

W = TypeVar("W")


class HostDevice(Device):
    """A :class:`Device` whose device memory is host memory.

    Index arrays of a record are copied when it is enqueued; tensors are read when it runs.
    Closing waits for the streams, then unmaps every buffer. Every method may be called from any
    thread.
    """

    name = "host"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = False
        # Weak: what nobody holds any more warns by itself and is gone.
        self._streams: weakref.WeakValueDictionary[int, HostStream] = weakref.WeakValueDictionary()
        self._buffers: weakref.WeakValueDictionary[int, HostBuffer] = weakref.WeakValueDictionary()
        self._graphs: weakref.WeakSet[HostGraph] = weakref.WeakSet()

    @property
    def live_count(self) -> int:
        """See :class:`Device`. Streams made from a handle do not count."""
        with self._lock:
            return len(self._streams) + len(self._buffers) + len(self._graphs)

    def allocate(self, nbytes: int) -> Buffer:
        """Zeroed, page-aligned memory. Raises DeviceError when there is none."""
        with self._lock:
            self._check_open()
            buffer = HostBuffer(nbytes, self._forget_buffer)
            self._buffers[id(buffer)] = buffer
        return buffer

    def allocate_host(self, nbytes: int) -> Buffer:
        """The same as :meth:`allocate`."""
        return self.allocate(nbytes)

    def stream(self, handle: object | None = None, *, urgent: bool = False) -> Stream:
        """A new stream with its thread, or another holder of the one that ``handle`` names.

        Threads are alike: ``urgent`` changes nothing.
        """
        with self._lock:
            self._check_open()
            if handle is None:
                stream = HostStream(self)
                self._streams[stream.handle] = stream
                return stream
            number = _handle_number(handle)
            owner = self._streams.get(number)
            if owner is None:
                raise ArgumentError(
                    f"stream handle {number} names no open stream of this device; hand in one that "
                    "stream() gave, or None for a new one"
                )
            return HostStream(self, owner)

    def span_tokens(self, length: int) -> int:
        """256 for every length."""
        return SPAN_TOKENS

    def reads_in_place(self, rows: int) -> bool:
        return True  # one memory: a gather is a copy more

    def prepare(self, work: PrepareWork) -> None:
        """Nothing: NumPy is ready."""

    def append(self, stream: Stream, work: AppendWork) -> None:
        """See :class:`AppendWork`."""
        self._enqueue(stream, "append", checks.append, host_ops.append, work)

    def append_at(self, stream: Stream, work: AppendAtWork) -> None:
        """See :class:`AppendAtWork`."""
        self._enqueue(stream, "append_at", checks.append_at, host_ops.append_at, work)

    def gather(self, stream: Stream, work: GatherWork) -> None:
        """See :class:`GatherWork`."""
        self._enqueue(stream, "gather", checks.move, host_ops.gather, work)

    def scatter(self, stream: Stream, work: ScatterWork) -> None:
        """See :class:`ScatterWork`."""
        self._enqueue(stream, "scatter", checks.move, host_ops.scatter, work)

    def attend(self, stream: Stream, work: AttendWork) -> None:
        """See :class:`AttendWork`."""
        self._enqueue(stream, "attend", checks.attend, _attend, work)

    def attend_again(self, stream: Stream, work: AttendWork) -> AttendAgain | None:
        """See :meth:`Device.attend_again`."""
        return None if work.end is None else _Again(self, stream, work, work.end)

    def finalize(self, stream: Stream, work: FinalizeWork) -> None:
        """See :class:`FinalizeWork`."""
        self._enqueue(stream, "finalize", checks.finalize, host_finalize.finalize, work)

    def encode(self, stream: Stream, work: EncodeWork | EncodeCodesWork) -> None:
        """See :class:`EncodeWork` and :class:`EncodeCodesWork`."""
        if isinstance(work, EncodeCodesWork):
            self._enqueue(stream, "encode", codes_checks.encode, host_codes.encode, work)
            return
        self._enqueue(stream, "encode", checks.encode, host_ops.encode, work)

    def score(self, stream: Stream, work: ScoreWork | ScoreCodesWork) -> None:
        """See :class:`ScoreWork` and :class:`ScoreCodesWork`."""
        if isinstance(work, ScoreCodesWork):
            self._enqueue(stream, "score", codes_checks.score, host_codes.score, work)
            return
        self._enqueue(stream, "score", checks.score, host_ops.score, work)

    def select(self, stream: Stream, work: SelectWork) -> None:
        """See :class:`SelectWork`."""
        self._enqueue(stream, "select", checks.select, host_select.select, work)

    def trim(self, stream: Stream, work: TrimWork) -> None:
        """See :class:`TrimWork`."""
        self._enqueue(stream, "trim", checks.trim, host_select.trim, work)

    def fetch(self, stream: Stream, work: FetchWork) -> None:
        """See :class:`FetchWork`."""
        self._enqueue(stream, "fetch", checks.fetch, host_select.fetch, work)

    def learn(self, stream: Stream, work: LearnWork) -> None:
        """See :class:`LearnWork`."""
        self._enqueue(stream, "learn", codes_checks.learn, host_finalize.learn, work)

    def checksum(self, stream: Stream, work: ChecksumWork) -> None:
        """See :class:`ChecksumWork`."""
        self._enqueue(stream, "checksum", checks.checksum, host_ops.checksum, work)

    def copy_words(self, stream: Stream, work: CopyWork) -> None:
        """See :class:`CopyWork`."""
        self._enqueue(stream, "copy_words", round_checks.copy, host_rounds.copy_add, work)

    def skipping(self, graph: Graph, work: RunningWork) -> Graph:
        """See :class:`Device`."""
        self._check_open()
        if not isinstance(graph, HostGraph) or graph.closed:
            raise ArgumentError(f"{graph!r} is no graph of the host device, or closed")
        checked = round_checks.running(work)
        refuse_gpu_memory(checked)
        return graph.skipping(partial(host_rounds.is_running, checked))

    def round_kernels(self) -> RoundKernels:
        return RoundKernels(self._enqueue, host_rounds)

    def close(self) -> None:
        """Close graphs, wait for the streams, unmap every buffer. A second call does nothing."""
        self.check_unheld()
        with self._lock:
            self._closed = True
            streams, buffers = list(self._streams.values()), list(self._buffers.values())
            graphs = list(self._graphs)
        for graph in graphs:
            graph.close()
        for stream in streams:
            stream.close()
        for buffer in buffers:
            buffer.close()

    def _enqueue(
        self,
        stream: Stream,
        name: str,
        check: Callable[[W], W],
        function: Callable[[W, Scratch], None],
        work: W,
    ) -> None:
        self._check_open()
        if not isinstance(stream, HostStream):
            raise ArgumentError(f"{name}: {stream!r} is no stream of the host device")
        # A look-up in a dictionary is atomic; the lock is not needed for it.
        if stream.handle not in self._streams:
            if stream.closed:
                raise ClosedError(f"{name}: the stream is closed; make a new one")
            raise ArgumentError(f"{name}: the stream is of another device")
        checked = check(work)
        refuse_gpu_memory(checked)
        stream.enqueue(name, function, checked)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the host device is closed")

    def forget_stream(self, stream: HostStream) -> None:
        """A stream was closed."""
        with self._lock:
            self._streams.pop(stream.handle, None)

    def keep_graph(self, graph: HostGraph) -> None:
        """A graph was made."""
        with self._lock:
            self._graphs.add(graph)

    def forget_graph(self, graph: HostGraph) -> None:
        """A graph was closed."""
        with self._lock:
            self._graphs.discard(graph)

    def _forget_buffer(self, buffer: HostBuffer) -> None:
        with self._lock:
            self._buffers.pop(id(buffer), None)


def _attend(work: AttendWork, scratch: Scratch) -> None:
    if work.fetch is not None:
        host_select.fetch(work.fetch, scratch)
    host_attention.attend(work, scratch)


def _handle_number(handle: object) -> int:
    if isinstance(handle, HostStream):
        return handle.handle
    if isinstance(handle, int) and not isinstance(handle, bool):
        return handle
    number = protocol_handle(handle)
    if number is not None:
        return number
    raise ArgumentError(
        f"a stream handle is a {type(handle).__name__}; an int, a Stream of this device or an "
        "object with __cuda_stream__ is needed"
    )


class _Again(AttendAgain):
    """The call itself."""

    def __init__(
        self, device: HostDevice, stream: Stream, work: AttendWork, end: FinalizeWork
    ) -> None:
        self._device, self._stream, self._work, self._end = device, stream, work, end

    def __call__(self, queries: Tensor, out: Tensor, length: int) -> Event:
        work = replace(
            self._work,
            queries=queries.as_batch(),
            lengths=np.array([length], np.int64),
            end=replace(self._end, out=out.as_batch()),
        )
        self._device.attend(self._stream, work)
        return self._stream.record()
