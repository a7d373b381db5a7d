"""The device ``cuda:N``: the contract on a GPU, on the caller's stream handles.

Kernels are compiled and loaded by :meth:`CudaDevice.prepare` (once on a machine, then from the
cache on disk), or else at their first use, which then waits for the compiler.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar, cast

from numpy.typing import NDArray

from hsswap.driver import (
    checks,
    codes_checks,
    cuda_again,
    cuda_append,
    cuda_attention,
    cuda_codes,
    cuda_operations,
    cuda_rounds,
    cuda_skipping,
    cuda_top_k,
    round_checks,
)
from hsswap.driver.base import AttendAgain, Buffer, Device, Graph, Stream
from hsswap.driver.choice_operations import FetchWork, LearnWork, TrimWork
from hsswap.driver.codes_operations import EncodeCodesWork, ScoreCodesWork
from hsswap.driver.cubin_cache import CubinCache, cache_folder
from hsswap.driver.cuda_context import Context
from hsswap.driver.cuda_errors import CudaError, checked
from hsswap.driver.cuda_events import EventPool, Waiter
from hsswap.driver.cuda_graph import CudaGraph
from hsswap.driver.cuda_memory import DeviceBuffer, MappedBuffer
from hsswap.driver.cuda_modules import Modules, Prepared, key_of
from hsswap.driver.cuda_prepare import kernels_of
from hsswap.driver.cuda_reach import make_reachable
from hsswap.driver.cuda_seam import Launch, Launcher
from hsswap.driver.cuda_stream import CudaStream, Shared, StreamState, handle_number
from hsswap.driver.nvrtc import Compiler
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
from hsswap.errors import ArgumentError, ClosedError, DeviceError

W = TypeVar("W")

CALLERS_STREAMS = 256
"""Different handles from callers at most: nobody says when a stream is gone, and each costs 3 MiB.
torch has 32 streams a priority, and gives them in turn."""


def _attend(device: Launcher, stream: Stream, work: AttendWork) -> None:
    cuda_attention.enqueue_attend(device, stream, work, work.end)


def arch_of(compute_capability: tuple[int, int]) -> str:
    """What kernels are compiled for. On Hopper with its own instructions (wgmma, setmaxnreg)."""
    major, minor = compute_capability
    return f"sm_{major}{minor}" + ("a" if compute_capability == (9, 0) else "")


class CudaDevice(Device, Launcher):
    """GPU ``ordinal``, see :class:`Device` and, for launch code, :class:`Launcher`.

    Every method may be called from any thread. Closing waits for the streams made here and for what
    was enqueued on the caller's, then frees everything.
    """

    def __init__(self, ordinal: int) -> None:
        self.name = f"cuda:{ordinal}"
        self._lock = threading.Lock()
        self._closed = False
        self.context = context = Context(self.name, ordinal)
        self.compute_capability = context.compute_capability
        self.sm_count = context.sm_count
        self.shared_bytes_limit = context.shared_bytes_limit
        self.arch = arch_of(context.compute_capability)
        self._shared = Shared(context, EventPool(context), Waiter(context))
        self._states: dict[int, StreamState] = {}
        # Weak: what nobody holds any more warns by itself and is gone.
        self._streams: weakref.WeakSet[CudaStream] = weakref.WeakSet()
        self._buffers: weakref.WeakSet[Buffer] = weakref.WeakSet()
        cache = CubinCache(cache_folder(os.environ))
        self._modules = Modules(context, Compiler(self.arch, cache))

    @property
    def live_count(self) -> int:
        """See :class:`Device`. Streams made from a handle do not count."""
        with self._lock:
            streams = sum(s.is_owner for s in self._streams)
            return streams + len(self._buffers) + len(self._shared.graphs)

    # --- memory and streams

    def allocate(self, nbytes: int) -> Buffer:
        """Zeroed memory of the GPU. Blocks. Raises DeviceError when there is none."""
        self.check_open()
        return self._keep(DeviceBuffer(self.context, nbytes, self._forget_buffer))

    def allocate_host(self, nbytes: int) -> Buffer:
        """Zeroed host memory, pinned and mapped. Blocks. Raises DeviceError when there is none."""
        self.check_open()
        return self._keep(MappedBuffer(self.context, nbytes, self._forget_buffer))

    def _keep(self, buffer: Buffer) -> Buffer:
        with self._lock:
            self._buffers.add(buffer)
        return buffer

    def stream(self, handle: object | None = None, *, urgent: bool = False) -> Stream:
        """A new stream, or the caller's own by its handle.

        What hsswap keeps for a caller's handle (a ring, a workspace: 3 MiB) stays until the device
        closes. Raises DeviceError for more handles than CALLERS_STREAMS.
        """
        self.check_open()
        with self._lock, self.context:
            is_new = handle is None
            number = self._new_stream(urgent) if handle is None else handle_number(handle)
            state = self._states.get(number)
            if is_new and state is not None:
                state.close()  # of a caller's stream that is gone: the driver gives its handle anew
            if state is None or state.closed:
                if not is_new:
                    self._check_handle(number)
                state = StreamState(self._shared, number, owned=is_new)
                self._states[number] = state
            stream = CudaStream(state, self._forget_stream, owner=is_new)
            self._streams.add(stream)
        return stream

    def _new_stream(self, urgent: bool) -> int:
        driver, what = self.context.driver, f"{self.name}: cuStreamCreate"
        flags = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        if not urgent:
            return int(checked(driver.cuStreamCreate(flags), what))
        _, greatest = checked(driver.cuCtxGetStreamPriorityRange(), what)
        return int(checked(driver.cuStreamCreateWithPriority(flags, greatest), what))

    def _check_handle(self, number: int) -> None:
        """Refuse a stream of another context, and one too many."""
        what = f"{self.name}: stream handle {number}"
        owner = checked(self.context.driver.cuStreamGetCtx(number), what)
        if int(owner) != int(self.context.handle):
            raise ArgumentError(
                f"{what} is of another GPU or context; hand in a stream made on {self.name}"
            )
        if sum(not state.owned for state in self._states.values()) >= CALLERS_STREAMS:
            raise DeviceError(f"{what} is one too many; give the first {CALLERS_STREAMS} in turn")

    def span_tokens(self, length: int) -> int:
        """See :func:`hsswap.driver.cuda_attention.span_tokens`."""
        return cuda_attention.span_tokens(length)

    def reads_in_place(self, rows: int) -> bool:
        return cuda_attention.reads_in_place(rows)

    def prepare(self, work: PrepareWork) -> None:
        """Compile and load :func:`~hsswap.driver.cuda_prepare.kernels_of`; seconds at most."""
        self.check_open()
        keys = [key_of(kernel, constants) for kernel, constants in kernels_of(self, work)]
        with self.context:
            self._modules.load(keys)

    # --- operations

    def append(self, stream: Stream, work: AppendWork) -> None:
        """See :class:`AppendWork`."""
        self._enqueue(stream, "append", checks.append, cuda_append.append, work)

    def append_at(self, stream: Stream, work: AppendAtWork) -> None:
        """See :class:`AppendAtWork`."""
        self._enqueue(stream, "append_at", checks.append_at, cuda_append.append_at, work)

    def gather(self, stream: Stream, work: GatherWork) -> None:
        """See :class:`GatherWork`."""
        self._enqueue(stream, "gather", checks.move, cuda_operations.gather, work)

    def scatter(self, stream: Stream, work: ScatterWork) -> None:
        """See :class:`ScatterWork`."""
        self._enqueue(stream, "scatter", checks.move, cuda_operations.scatter, work)

    def attend(self, stream: Stream, work: AttendWork) -> None:
        """See :class:`AttendWork`."""
        self._enqueue(stream, "attend", checks.attend, _attend, work)

    def attend_again(self, stream: Stream, work: AttendWork) -> AttendAgain | None:
        """See :meth:`Device.attend_again`."""
        state = self._state_of(stream, "attend")
        with state.lock, self.context:
            return cuda_again.attend_again(self, cast(CudaStream, stream), work)

    def prepared(self, stream: CudaStream, launch: Launch) -> Prepared:
        """See :meth:`Modules.prepared`."""
        return self._modules.prepared(stream.state, launch)

    def finalize(self, stream: Stream, work: FinalizeWork) -> None:
        """See :class:`FinalizeWork`."""
        self._enqueue(stream, "finalize", checks.finalize, cuda_attention.enqueue_finalize, work)

    def encode(self, stream: Stream, work: EncodeWork | EncodeCodesWork) -> None:
        """See :class:`EncodeWork` and :class:`EncodeCodesWork`."""
        if isinstance(work, EncodeCodesWork):
            self._enqueue(stream, "encode", codes_checks.encode, cuda_codes.encode, work)
            return
        self._enqueue(stream, "encode", checks.encode, cuda_operations.encode, work)

    def score(self, stream: Stream, work: ScoreWork | ScoreCodesWork) -> None:
        """See :class:`ScoreWork` and :class:`ScoreCodesWork`."""
        if isinstance(work, ScoreCodesWork):
            outputs = ("scores",)
            self._enqueue(
                stream, "score", codes_checks.score, cuda_codes.score, work, outputs=outputs
            )
            return
        self._enqueue(stream, "score", checks.score, cuda_top_k.score, work, outputs=("scores",))

    def select(self, stream: Stream, work: SelectWork) -> None:
        """See :class:`SelectWork`."""
        self._enqueue(stream, "select", checks.select, cuda_top_k.select, work)

    def trim(self, stream: Stream, work: TrimWork) -> None:
        """See :class:`TrimWork`."""
        self._enqueue(stream, "trim", checks.trim, cuda_top_k.trim, work)

    def fetch(self, stream: Stream, work: FetchWork) -> None:
        """See :class:`FetchWork`."""
        self._enqueue(stream, "fetch", checks.fetch, cuda_top_k.fetch, work)

    def learn(self, stream: Stream, work: LearnWork) -> None:
        """See :class:`LearnWork`."""
        self._enqueue(stream, "learn", codes_checks.learn, cuda_attention.learn, work)

    def checksum(self, stream: Stream, work: ChecksumWork) -> None:
        """See :class:`ChecksumWork`."""
        self._enqueue(stream, "checksum", checks.checksum, cuda_operations.checksum, work)

    def copy_words(self, stream: Stream, work: CopyWork) -> None:
        """See :class:`CopyWork`."""
        self._enqueue(stream, "copy_words", round_checks.copy, cuda_operations.copy_words, work)

    def skipping(self, graph: Graph, work: RunningWork) -> Graph:
        """See :class:`Device`."""
        self.check_open()
        if graph.closed or graph.raw is None:
            raise ArgumentError(f"{graph!r} is no captured graph of a GPU, or closed")
        work = round_checks.running(work)
        made = CudaGraph(self._shared)
        try:
            with self.context, self.context.relaxed():
                work = make_reachable(self.context, work, None)
                raw = cuda_skipping.conditional(self.context, self._modules, graph.raw, work)
            made.end(raw)
        except BaseException:
            made.close()
            raise
        made.hold(work)
        made.hold(graph)
        return made

    def round_kernels(self) -> RoundKernels:
        return RoundKernels(self._enqueue, cuda_rounds)

    def _enqueue(
        self,
        stream: Stream,
        name: str,
        check: Callable[[W], W],
        function: Callable[[Launcher, Stream, W], None],
        work: W,
        *,
        outputs: tuple[str, ...] = (),
    ) -> None:
        state = self._state_of(stream, name)
        work = check(work)
        with state.lock, self.context:
            if not state.captures.look():
                work = make_reachable(
                    self.context, work, lambda array: state.upload(array, False), outputs=outputs
                )
                self._launch(state, function, stream, work)
                return
            with self.context.relaxed():
                work = make_reachable(self.context, work, None, outputs=outputs)
                self._launch(state, function, stream, work)

    def _launch(
        self,
        state: StreamState,
        function: Callable[[Launcher, Stream, W], None],
        stream: Stream,
        work: W,
    ) -> None:
        try:
            function(self, stream, work)
        finally:
            state.hold(work)

    def _state_of(self, stream: Stream, name: str) -> StreamState:
        self.check_open()
        if not isinstance(stream, CudaStream):
            raise ArgumentError(f"{name}: {stream!r} is no stream of {self.name}")
        state = stream.state
        if stream.closed:
            raise ClosedError(f"{name}: the stream is closed; make a new one")
        if state.shared is not self._shared:
            raise ArgumentError(f"{name}: the stream is of another device")
        return state

    # --- what launch code uses (cuda_seam.Launcher)

    def start(self, stream: Stream, launch: Launch) -> None:
        """See :meth:`Launcher.launch`."""
        # Launch code passes on the stream it was given.
        self._modules.launch(cast(CudaStream, stream).state, launch)

    def upload(self, stream: Stream, array: NDArray[Any], *, direct: bool = False) -> int:
        """See :meth:`Launcher.upload`."""
        return cast(CudaStream, stream).state.upload(array, direct)

    def copy(self, stream: Stream, target: int, source: int, nbytes: int) -> None:
        """See :meth:`Launcher.copy`."""
        driver, handle = self.context.driver, cast(CudaStream, stream).handle
        checked(driver.cuMemcpyAsync(target, source, nbytes, handle), f"{self.name}: cuMemcpyAsync")

    def keep(self, stream: Stream, name: str, array: NDArray[Any]) -> int:
        """See :meth:`Launcher.keep`."""
        return cast(CudaStream, stream).state.keep(name, array)

    def workspace(self, stream: Stream, nbytes: int) -> int:
        """See :meth:`Launcher.workspace`."""
        return cast(CudaStream, stream).state.workspace(nbytes)

    def max_active_clusters(self, launch: Launch) -> int:
        """See :meth:`Launcher.max_active_clusters`."""
        return self._modules.max_active_clusters(launch)

    # --- the end

    def close(self) -> None:
        """Wait for the streams, then free everything. A second call does nothing."""
        self.check_unheld()
        with self._lock:
            if self._closed:
                return
            self._closed = True
            states, buffers = list(self._states.values()), list(self._buffers)
        for graph in list(self._shared.graphs):
            graph.close()
        for state in states:
            state.close()
        for buffer in buffers:
            buffer.close()
        self._shared.waiter.stop()
        self._shared.events.close()
        with suppress(CudaError), self.context:
            self._modules.close()
        self.context.release()
        with self._lock:
            self._streams.clear()

    def check_open(self) -> None:
        """Raise ClosedError once it was closed."""
        if self._closed:
            raise ClosedError(f"{self.name} is closed")

    def _forget_stream(self, stream: CudaStream) -> None:
        with self._lock:
            self._streams.discard(stream)
            if stream.is_owner:
                self._states.pop(stream.handle, None)

    def _forget_buffer(self, buffer: Buffer) -> None:
        with self._lock:
            self._buffers.discard(buffer)
