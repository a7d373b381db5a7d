"""The Device contract: memory, streams, events, and one method an operation.

Two devices keep it: ``host`` (NumPy, :mod:`hsswap.driver.host`) and ``cuda:N``. What runs on one
runs on the other; the same tests run on both.

Rules for every device:

* An operation is *enqueued* on a stream and returns at once; operations of one stream run in the
  order they were enqueued. Arguments are checked before anything is enqueued
  (:class:`~hsswap.errors.ArgumentError`). Index arrays (NumPy arrays in a record) are copied then;
  tensors are read and written when the operation runs.
* What an operation reads or writes must stay allocated until an event recorded behind it is done.
  Records hold their tensors' owners, and the stream holds the records, so that NumPy arrays handed
  in survive by themselves; closing a :class:`Buffer` early is the caller's error.
* An operation that fails marks its stream: events recorded behind it raise
  :class:`~hsswap.errors.DeviceError` with the first failure as cause.
* Nothing here may be called with the event loop waiting for it, except what is said to return at
  once; :meth:`Event.synchronize` and :meth:`Stream.synchronize` block the calling thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from operator import index
from types import TracebackType
from typing import TYPE_CHECKING, Self

from hsswap.driver.choice_operations import FetchWork, LearnWork, TrimWork
from hsswap.driver.codes_operations import EncodeCodesWork, ScoreCodesWork
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
from hsswap.errors import ArgumentError

if TYPE_CHECKING:
    from hsswap.driver.preparing import PrepareWork
    from hsswap.driver.round_operations import CopyWork, RunningWork
from hsswap.driver.rounds_base import RoundKernels
from hsswap.driver.tensor import Tensor


class Closeable(ABC):
    """Something with an owner: closing twice is fine, leaving the ``with`` block closes."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back. A second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Buffer(Closeable):
    """A span of memory: the protocol by which device and I/O meet (address, nbytes, on_device).

    ``address`` is an integer pointer. Host buffers are page-aligned, readable and writable by the
    CPU and, on cuda, mapped for the device under the same address. Zeroed when made.
    """

    address: int
    nbytes: int
    on_device: bool

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""


class Event(ABC):
    """A point in a stream's work."""

    @abstractmethod
    def is_done(self) -> bool:
        """Whether all work before the point has run. Never waits.

        Raises DeviceError when that work failed.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Block the calling thread until the work has run; raises DeviceError when it failed."""

    @abstractmethod
    async def wait(self) -> None:
        """Wait on the running event loop, without blocking it; raises DeviceError on failure.

        Cancelling the wait leaves the work alone.
        """

    @abstractmethod
    def call_when_done(self, callback: Callable[[], None]) -> None:
        """Call ``callback()`` once the work has run or failed, at once if it already has.

        It runs on a thread of the device (or the caller's, if done already): it must be short, must
        not raise, and must not wait. This is the bridge to loops: hand over with
        ``loop.call_soon_threadsafe``.
        """


class Graph(Closeable):
    """Operations that were captured once and can be launched any number of times.

    :meth:`Stream.capture` makes it. It holds the captured records, and so their tensors' owners;
    what they read and write must stay allocated until the last launch has run.
    """

    @abstractmethod
    def launch(self, stream: Stream) -> None:
        """Enqueue all of it, in the captured order, on a stream of the device. Returns at once.

        Launches of one graph run one after the other, whatever their streams. Raises CaptureError
        before its ``with`` block has ended and while ``stream`` is being captured.
        """

    @property
    def raw(self) -> int | None:
        """The driver's handle of what was captured, None where there is no driver."""
        return None

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""


class Stream(Closeable):
    """A queue of work in order. ``handle`` is the raw stream handle, an int."""

    handle: int

    @property
    @abstractmethod
    def is_capturing(self) -> bool:
        """Whether what is enqueued now goes into a graph and does not run.

        Also where a caller captures on the raw handle.
        """

    @abstractmethod
    def capture(self) -> AbstractContextManager[Graph]:
        """Capture into a graph what is enqueued on this stream inside the ``with`` block.

        Nothing runs. Tensors, and with them all that the device holds, are read and written at each
        launch. Index arrays, and numbers of the records, are *baked*: every launch has those of the
        capture. On a GPU tensors must be in memory that it can reach: an ordinary array is refused.
        Inside the block :meth:`record`, :meth:`wait_for`, :meth:`synchronize`, a second
        :meth:`capture` and the launch of a graph raise CaptureError.

        The end of the block makes the graph ready to launch, which takes milliseconds for hundreds
        of operations: on an event loop use a thread (``asyncio.to_thread``). An exception in the
        block closes the graph.
        """

    def take_captured(self) -> ExitStack:
        """What the graph reads at each launch that a caller captured last from the raw handle; to
        be closed when that graph is gone.

        For who captures again and again: otherwise it stays until the device closes, and a handle
        has so many. Raises CaptureError during a capture.
        """
        return ExitStack()  # not every device has raw handles

    @abstractmethod
    def record(self) -> Event:
        """An event behind everything enqueued so far. Returns at once."""

    @abstractmethod
    def wait_for(self, event: Event) -> None:
        """Let later work of this stream run only after ``event``. Returns at once.

        A failure of the work before ``event`` passes to this stream.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Block the calling thread until all work has run; raises DeviceError when some failed."""


def protocol_handle(stream: object) -> int | None:
    """The raw handle that ``__cuda_stream__`` gives, None without it. Raises ArgumentError.

    A method, once a property, that gives version and handle (the CUDA stream protocol of
    cuda.core).
    """
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is None:
        return None
    try:
        _version, number = protocol() if callable(protocol) else protocol
        return index(number)
    except Exception as error:
        raise ArgumentError(
            f"__cuda_stream__ of a {type(stream).__name__} gives no version and handle ({error}); "
            "give the raw handle as an int"
        ) from error


class AttendAgain(ABC):
    """A call of :meth:`Device.attend` that is made again. It keeps the records of the first."""

    @abstractmethod
    def __call__(self, queries: Tensor, out: Tensor, length: int) -> Event:
        """Enqueue it; returns an event behind it.

        ``queries`` ``[1, Q, dk]`` and ``out`` ``[1, Q, dv]`` are like the first ones in all but
        their addresses, which the device reaches, and ``length`` needs no more entries. The caller
        sees to it: nothing is checked again. Raises CaptureError during a capture.
        """


class Device(Closeable):
    """Memory, streams and operations of one device. Closing waits for its streams.

    ``name`` is ``"host"`` or ``"cuda:N"``. ``live_count`` counts open buffers, streams and graphs,
    for leak checks.
    """

    name: str
    is_held = False
    """Whether an open swap has it, which closes it in the end: nobody else may."""

    def check_unheld(self) -> None:
        """Raise ArgumentError while a swap has it: its memory would go from under work."""
        if self.is_held:
            raise ArgumentError(
                f"the device {self.name} belongs to an open swap, which closes it; close the swap, "
                "and give each swap a device of its own"
            )

    @property
    @abstractmethod
    def live_count(self) -> int:
        """Buffers, streams and graphs made here and not closed."""

    @abstractmethod
    def allocate(self, nbytes: int) -> Buffer:
        """Device memory, zeroed, aligned to 4096 bytes. Raises DeviceError when there is none."""

    @abstractmethod
    def allocate_host(self, nbytes: int) -> Buffer:
        """Host memory for I/O, zeroed, page-aligned, mapped for the device.

        Raises DeviceError when there is none.
        """

    @abstractmethod
    def stream(self, handle: object | None = None, *, urgent: bool = False) -> Stream:
        """A new stream, or with ``handle`` the caller's own, which closing does not destroy.

        ``urgent``: work of a new stream gets multiprocessors before that of other streams.

        ``handle``: an int, an object with ``__cuda_stream__``, or a :class:`Stream` of this device.
        Raises ArgumentError for anything else or a stream of another device.
        """

    @abstractmethod
    def span_tokens(self, length: int) -> int:
        """Tokens of a span for a row that sees ``length`` tokens; a multiple of 256.

        Depends on ``length`` rounded up to 1,024 alone, so that results do not depend on tiles,
        batch or arrival (promise 1).
        """

    @abstractmethod
    def reads_in_place(self, rows: int) -> bool:
        """Whether attention of so many query rows should read units where they lie in host slots.

        False where the rows would read them more than once over a link: then they are gathered into
        device slots first. Once True it is True for all fewer rows.
        """

    @abstractmethod
    def prepare(self, work: PrepareWork) -> None:
        """Have ready what operations need, so that none of these waits for a compiler. Blocks.

        From any thread, any number of times. Without it the first operation of each kind, or of
        each shape, takes that time itself. Raises DeviceError when something does not compile.
        """

    @abstractmethod
    def append(self, stream: Stream, work: AppendWork) -> None:
        """Copy an engine's rows of K and V into units, in device slots and host slots."""

    @abstractmethod
    def append_at(self, stream: Stream, work: AppendAtWork) -> None:
        """The same at positions, and by tables, that the device holds."""

    @abstractmethod
    def gather(self, stream: Stream, work: GatherWork) -> None:
        """Copy units out of host slots into device slots, any number in one call."""

    @abstractmethod
    def scatter(self, stream: Stream, work: ScatterWork) -> None:
        """Copy units of device slots into host slots, the dual of :meth:`gather`."""

    @abstractmethod
    def attend(self, stream: Stream, work: AttendWork) -> None:
        """Attention of query rows over one tile of units; carries (m, l, o)."""

    @abstractmethod
    def attend_again(self, stream: Stream, work: AttendWork) -> AttendAgain | None:
        """What makes a call like ``work``, of one row that ends here, again at less cost; nothing
        is enqueued. None for calls that are not made quicker. Raises like :meth:`attend`.
        """

    @abstractmethod
    def finalize(self, stream: Stream, work: FinalizeWork) -> None:
        """Turn carried state into output, and logsumexp and block masses where asked."""

    @abstractmethod
    def encode(self, stream: Stream, work: EncodeWork | EncodeCodesWork) -> None:
        """Compress the keys of blocks into the predictor's codes."""

    @abstractmethod
    def score(self, stream: Stream, work: ScoreWork | ScoreCodesWork) -> None:
        """Rank a sequence's blocks for a query, per KV head, from codes."""

    @abstractmethod
    def select(self, stream: Stream, work: SelectWork) -> None:
        """Choose the top-k units of each KV head and the cache slots that hold them."""

    @abstractmethod
    def trim(self, stream: Stream, work: TrimWork) -> None:
        """Give up of what select chose what a bound on the share left out does not need."""

    @abstractmethod
    def fetch(self, stream: Stream, work: FetchWork) -> None:
        """Gather what select found missing, by a table of host slots that the device holds."""

    @abstractmethod
    def learn(self, stream: Stream, work: LearnWork) -> None:
        """Fit what stands in for blocks that a choice leaves out to rows of exact attention."""

    @abstractmethod
    def checksum(self, stream: Stream, work: ChecksumWork) -> None:
        """CRC-32 of blocks in host slots or device memory."""

    @abstractmethod
    def copy_words(self, stream: Stream, work: CopyWork) -> None:
        """Words from one tensor to another, with a number added: tables, counters, results."""

    @abstractmethod
    def skipping(self, graph: Graph, work: RunningWork) -> Graph:
        """A graph that launches ``graph``, unless no sequence runs when its turn comes.

        It owns ``graph``: closing it closes both. Blocks for milliseconds. Raises ArgumentError,
        and DeviceError where ``graph`` cannot be a part of another; then ``graph`` is left alone.
        """

    @abstractmethod
    def round_kernels(self) -> RoundKernels:
        """The kernels of speculative rounds. Raises DeviceError where the device has none."""
