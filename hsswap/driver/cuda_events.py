"""Events of a CUDA device, and the one thread that wakes who waits for them.

Completion reaches the CPU through ``sem_post`` of the C library, which the driver calls as a host
function on a stream of its own behind the event (no Python there: the driver holds a lock while it
calls, and Python's own lock could be held by a thread that waits for the driver's). The thread
sleeps in ``sem_wait``, then asks all pending events at once, so one wake-up serves a batch. After a
sticky error the driver calls nothing any more: while events are pending the thread also looks every
``POLL_S``.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from hsswap.driver.base import Event
from hsswap.driver.cuda_context import Context
from hsswap.driver.cuda_errors import CudaError, checked, error_of
from hsswap.forked import awaited

POLL_S = 0.05
"""Seconds. The latency of a failure, and of a wake-up that got lost."""

_SEM_BYTES = 64  # sem_t is 32 bytes on 64-bit Linux
_CLOCK_MONOTONIC = 1


class EventPool:
    """Raw events, made once and used again. Closing destroys all, given out or not."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.closed = False
        self._idle: deque[Any] = deque()
        self._all: list[Any] = []

    def take(self) -> RawEvent:
        """An event to record. The context must be current."""
        try:
            raw = self._idle.pop()
        except IndexError:
            driver = self.context.driver
            # Blocking: cuEventSynchronize sleeps, where it would keep a core busy otherwise.
            flags = driver.CUevent_flags
            kind = flags.CU_EVENT_DISABLE_TIMING | flags.CU_EVENT_BLOCKING_SYNC
            raw = checked(driver.cuEventCreate(int(kind)), f"{self.context.name}: cuEventCreate")
            self._all.append(raw)
        return RawEvent(self, raw)

    def give_back(self, raw: Any) -> None:
        """The event is used by nobody; any thread, also a collector's."""
        self._idle.append(raw)

    def close(self) -> None:
        """Destroy all; the work behind them has run."""
        self.closed = True
        with suppress(CudaError), self.context:
            for raw in self._all:
                self.context.driver.cuEventDestroy(raw)
        self._all.clear()
        self._idle.clear()


class RawEvent:
    """One use of a pooled event; goes back to the pool with its last holder."""

    __slots__ = ("_pool", "handle")

    def __init__(self, pool: EventPool, handle: Any) -> None:
        self._pool = pool
        self.handle = handle

    def reached(self) -> bool:
        """Whether the work before it has run; raises CudaError. The context must be current."""
        if self._pool.closed:
            return True
        status = self._pool.context.driver.cuEventQuery(self.handle)[0]
        if not status:
            return True
        if status == self._pool.context.driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        raise error_of(status, f"work on {self._pool.context.name}")

    def __del__(self) -> None:
        if not self._pool.closed:
            self._pool.give_back(self.handle)


class CudaEvent(Event):
    """A point in a stream's work. Made by :meth:`CudaStream.record`."""

    __slots__ = ("_done", "_failure", "_wakes", "context", "raw", "waiter")

    def __init__(self, context: Context, raw: RawEvent, waiter: Waiter, wakes: Any) -> None:
        self.context = context
        self.raw: RawEvent | None = raw
        self.waiter = waiter
        self._wakes = wakes
        self._done = False
        self._failure: CudaError | None = None

    def is_done(self) -> bool:
        """Whether all work before the point has run; raises DeviceError when it failed."""
        if self._failure is not None:
            raise CudaError(str(self._failure), self._failure.code) from self._failure
        if not self._done:
            raw = self.raw
            with self.context, self.context.relaxed():
                self._done = raw is None or raw.reached()
            if self._done:
                self.raw = None
        return self._done

    def is_over(self) -> bool:
        """Whether the work has run or failed; never raises."""
        try:
            return self.is_done()
        except CudaError as error:
            if self._failure is None:
                self._failure = error
            return True

    def synchronize(self) -> None:
        """Block the calling thread until the point is reached; raises DeviceError on failure."""
        raw = self.raw
        if not self.is_done() and raw is not None:
            with self.context, self.context.relaxed():
                what = f"work on {self.context.name}"
                checked(self.context.driver.cuEventSynchronize(raw.handle), what)
            self.is_done()

    def call_when_done(self, callback: Callable[[], None]) -> None:
        """Call ``callback()`` on the device's waiter thread, or here and now if it is reached."""
        if self.is_over():
            callback()
        else:
            self.waiter.add(self, callback, self._wakes)

    async def wait(self) -> None:
        """Wait on the running loop; raises DeviceError on failure. Cancelling changes nothing."""
        if not self.is_done():
            loop = asyncio.get_running_loop()
            reached: asyncio.Future[None] = awaited(loop.create_future())
            self.waiter.add(self, _Wake(loop, reached), self._wakes)
            await reached
            self.is_done()


class _Wake(NamedTuple):
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[None]


class Waiter:
    """The thread. It starts at the first :meth:`add` and ends with :meth:`stop`."""

    def __init__(self, context: Context) -> None:
        self._context = context
        libc = ctypes.CDLL(None, use_errno=True)
        self._libc = libc
        # Calls that never wait keep the interpreter: to get it back among busy threads takes long.
        self._at_once = ctypes.PyDLL(None)
        self._memory = ctypes.create_string_buffer(_SEM_BYTES + 16)
        self._semaphore = (ctypes.addressof(self._memory) + 15) // 16 * 16
        for name in ("sem_init", "sem_wait"):
            getattr(libc, name).restype = ctypes.c_int
        libc.sem_init(ctypes.c_void_p(self._semaphore), 0, 0)
        address = ctypes.cast(libc.sem_post, ctypes.c_void_p).value
        self._post = context.driver.CUhostFn(address)
        self._lock = threading.Lock()
        self._incoming: list[tuple[CudaEvent, Callable[[], None] | _Wake]] = []
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._is_idle = False

    def add(self, event: CudaEvent, wake: Callable[[], None] | _Wake, stream: Any) -> None:
        """Call or set ``wake`` once ``event`` is over. ``stream``: a raw stream for host functions,
        on which nothing but waits for one stream's events are enqueued.
        """
        with self._lock:
            self._incoming.append((event, wake))
            if self._thread is None:
                name = f"hsswap-waiter-{self._context.name}"
                # A daemon: a device never closed must not keep the interpreter from ending.
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()
            # With nothing pending it sleeps without an end, and a failure would not wake it.
            if self._is_idle:
                self._is_idle = False
                self._at_once.sem_post(ctypes.c_void_p(self._semaphore))
        raw, driver = event.raw, self._context.driver
        with suppress(CudaError), self._context:
            if raw is not None and not driver.cuStreamWaitEvent(stream, raw.handle, 0)[0]:
                status = driver.cuLaunchHostFunc(stream, self._post, self._semaphore)[0]
                if not status:
                    return
        self._at_once.sem_post(ctypes.c_void_p(self._semaphore))

    def stop(self) -> None:
        """End the thread once nothing is pending. A callback of an event may call it."""
        with self._lock:
            self._stopping = True
            thread = self._thread
        if thread is not None:
            self._at_once.sem_post(ctypes.c_void_p(self._semaphore))
            if thread is not threading.current_thread():
                thread.join()

    def _run(self) -> None:
        pending: list[tuple[CudaEvent, Callable[[], None] | _Wake]] = []
        while True:
            with self._lock:
                self._is_idle = not pending and not self._incoming and not self._stopping
            self._sleep(None if self._is_idle else POLL_S)
            with self._lock:
                pending += self._incoming
                self._incoming.clear()
                is_last = self._stopping
            over, still = [], []
            for event, wake in pending:
                if event.is_over():
                    over.append(wake)
                else:
                    still.append((event, wake))
            pending = still
            _wake_all(over)
            over.clear()  # and with it what the wakes hold, before the next sleep
            if is_last and not pending and not self._incoming:
                return

    def _sleep(self, seconds: float | None) -> None:
        """Until the semaphore was posted, or the time is over; takes all posts."""
        semaphore = ctypes.c_void_p(self._semaphore)
        if seconds is None:
            self._libc.sem_wait(semaphore)
        else:
            until = time.monotonic() + seconds
            limit = (ctypes.c_long * 2)(int(until), int(until % 1 * 1e9))
            self._libc.sem_clockwait(semaphore, _CLOCK_MONOTONIC, limit)
        while self._at_once.sem_trywait(semaphore) == 0:
            pass


def _wake_all(wakes: list[Callable[[], None] | _Wake]) -> None:
    """Callbacks one by one; futures by one call a loop."""
    futures: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for wake in wakes:
        if isinstance(wake, _Wake):
            futures.setdefault(wake.loop, []).append(wake.future)
            continue
        try:
            wake()
        except Exception:  # a thread that died would leave every event waiting
            traceback.print_exc()
    for loop, group in futures.items():
        with suppress(RuntimeError):  # the loop of a cancelled wait may be closed by now
            loop.call_soon_threadsafe(_set_all, group)


def _set_all(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():  # else the wait was cancelled
            future.set_result(None)
