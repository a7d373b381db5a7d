"""The same swap for callers without an event loop: ``with hsswap.blocking(config) as swap``.

A thread of its own runs the loop. Attention and appends are enqueued from the caller's thread and
cross to the loop only when blocks must come from disk, or room for them must be made.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import warnings
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

import uvloop
from numpy.typing import ArrayLike

from hsswap.attending import AttendResult
from hsswap.captured import CapturedSteps
from hsswap.config import SwapConfig
from hsswap.diagnostics import DiagnosticSummary
from hsswap.driver.base import Device
from hsswap.errors import ArgumentError, ClosedError, shown
from hsswap.forked import REFUSED, watch
from hsswap.io.base import BlockIO
from hsswap.metrics import SwapStatistics
from hsswap.sequence import Sequence
from hsswap.swap import HighSpeedSwap
from hsswap.topk import TopK
from hsswap.whole import Whole

T = TypeVar("T")
P = ParamSpec("P")


WATCH_INTERVAL_S = 0.5
"""How often the loop looks whether the main thread has ended without closing."""


class _Executor(concurrent.futures.ThreadPoolExecutor):
    """The loop's threads for what can wait; the caller's once the interpreter ends and has none."""

    def submit(
        self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> concurrent.futures.Future[T]:
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError:
            done: concurrent.futures.Future[T] = concurrent.futures.Future()
            try:
                done.set_result(fn(*args, **kwargs))
            except Exception as error:
                done.set_exception(error)
            return done


class _LoopThread:
    """An event loop in a thread of its own; :meth:`run` waits for a coroutine on it."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._loop.set_default_executor(_Executor(thread_name_prefix="hsswap-wait"))
        self._lock, self._ending = threading.Lock(), threading.Lock()
        self._calls: set[concurrent.futures.Future[Any]] = set()
        self._closing = ""  # why calls are refused
        self._thread = threading.Thread(target=self._loop.run_forever, name="hsswap-loop")
        self._thread.start()
        watch(self, _LoopThread._in_child)

    def _in_child(self) -> None:
        self._lock = threading.Lock()
        self._closing = REFUSED

    def check_thread(self) -> None:
        """Raise ArgumentError on the loop's own thread, which cannot wait for itself."""
        if threading.current_thread() is self._thread:
            raise ArgumentError("a blocking call on the loop's own thread would never return")

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result. An exception here (Ctrl-C) cancels it and waits for its end.

        Raises ClosedError once :meth:`close` began.
        """
        try:
            self.check_thread()
        except ArgumentError:
            work.close()
            raise
        future: concurrent.futures.Future[T] | None = None
        try:
            with Whole(), self._lock:
                if self._closing:
                    raise ClosedError(self._closing)
                future = asyncio.run_coroutine_threadsafe(work, self._loop)
                self._calls.add(future)
            return future.result()
        except BaseException:
            if future is None:
                work.close()
            elif not future.done():
                future.cancel()
                concurrent.futures.wait([future])
            raise
        finally:
            with self._lock:
                if future is not None:
                    self._calls.discard(future)

    def watch(self, swap: HighSpeedSwap) -> None:
        """Close the swap when the main thread ends without having done so.

        Python waits for threads before it exits, so the loop's would keep it for ever.
        """

        def look() -> None:
            if threading.main_thread().is_alive():
                self._loop.call_later(WATCH_INTERVAL_S, look)
                return
            warnings.warn(
                "a swap was not closed; use 'with hsswap.blocking(...)'", ResourceWarning, 1
            )
            closing = self._loop.create_task(swap.close())
            closing.add_done_callback(lambda _: self._loop.stop())

        self._loop.call_soon_threadsafe(look)

    def close(self) -> None:
        """Stop the loop and join the thread, when the calls of other threads have ended. Twice is
        fine, and after Ctrl-C in the middle.
        """
        with self._lock:
            self._closing = "the swap is closed; open a new one"
            calls = list(self._calls)
        concurrent.futures.wait(calls)
        with Whole(), self._ending:
            if self._loop.is_closed():
                return
            ended = self._loop.shutdown_default_executor()
            asyncio.run_coroutine_threadsafe(ended, self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


class BlockingSequence:
    """One sequence, one thread at a time. See :class:`hsswap.Sequence` for the arguments."""

    def __init__(self, sequence: Sequence, loop: _LoopThread) -> None:
        self._sequence = sequence
        self._loop = loop

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """Whether it was closed, by itself or with its swap."""
        return self._sequence.closed

    @property
    def awaitable(self) -> Sequence:
        """The same sequence, for what is awaited in :meth:`BlockingSwap.run`."""
        return self._sequence

    @property
    def length(self) -> int:
        """Tokens of the layer that is furthest."""
        return self._sequence.length

    def layer_length(self, layer: int) -> int:
        """Tokens appended to one layer."""
        return self._sequence.layer_length(layer)

    def append(
        self, layer: int, keys: object, values: object, *, stream: object | None = None
    ) -> None:
        """Add rows at the end of a layer; returns when the copy is enqueued."""
        with Whole():
            done = self._sequence.try_append(layer, keys, values, stream=stream)
        if not done:
            self._loop.run(self._sequence.append(layer, keys, values, stream=stream))

    def attend(
        self,
        layer: int,
        queries: object,
        out: object | None = None,
        *,
        exact: bool | None = None,
        lse_out: object | None = None,
        sinks: object | None = None,
        stream: object | None = None,
    ) -> AttendResult:
        """Attention of the layer's last rows, enqueued; ``result.synchronize()`` waits for it."""
        sequence = self._sequence
        options = {"exact": exact, "lse_out": lse_out, "sinks": sinks, "stream": stream}
        with Whole():
            result = sequence.try_attend(layer, queries, out, **options)  # type: ignore[arg-type]
        if result is None:
            result = self._loop.run(
                sequence.attend(layer, queries, out, **options)  # type: ignore[arg-type]
            )
        return result

    def look_ahead(self, layer: int, queries: object, *, stream: object | None = None) -> int:
        """Read what a layer will probably choose. See :meth:`hsswap.Sequence.look_ahead`."""
        return self._loop.run(self._sequence.look_ahead(layer, queries, stream=stream))

    def truncate(self, length: int, *, stream: object | None = None) -> None:
        """Forget all but the first ``length`` tokens. See :meth:`hsswap.Sequence.truncate`."""
        with Whole():
            done = self._sequence.try_truncate(length, stream=stream)
        if not done:
            self._loop.run(self._sequence.truncate(length, stream=stream))

    def fork(self, *, stream: object | None = None) -> BlockingSequence:
        """Another sequence with the same tokens. See :meth:`hsswap.Sequence.fork`."""
        return _kept(lambda: self._sequence.fork(stream=stream), self._loop)

    def commit(self, tokens: ArrayLike) -> int:
        """Store the first blocks under these tokens. See :meth:`hsswap.Sequence.commit`."""
        return self._loop.run(self._sequence.commit(tokens))

    def reserve(self, tokens: int) -> None:
        """Take ids and host slots ahead. See :meth:`hsswap.Sequence.reserve`."""
        self._loop.run(self._sequence.reserve(tokens))

    @contextmanager
    def captured(
        self, tokens: int, *, rows: int = 1, stream: object | None = None
    ) -> Iterator[CapturedSteps]:
        """Steps for an engine's CUDA graph. See :meth:`hsswap.Sequence.captured`.

        What this gives has plain functions only, for the caller's thread.
        """
        opened = self._sequence.captured(tokens, rows=rows, stream=stream)
        steps: list[CapturedSteps] = []

        async def enter() -> None:
            steps.append(await opened.__aenter__())

        try:
            self._loop.run(enter())
            yield steps[0]
        finally:
            if steps:  # also when the call was interrupted just after its end
                with suppress(ClosedError):  # with the swap went all of it
                    self._loop.run(opened.__aexit__(None, None, None))

    def close(self) -> None:
        """Give back slots and ids. Twice is fine, and after the swap was closed."""
        with suppress(ClosedError):
            self._loop.run(self._sequence.close())


def _kept(make: Callable[[], Sequence], loop: _LoopThread) -> BlockingSequence:
    """What was made, or nothing: closed again where Ctrl-C keeps it from the caller."""
    made: Sequence | None = None
    try:
        with Whole():
            made = make()
        return BlockingSequence(made, loop)
    except BaseException:
        if made is not None:
            loop.run(made.close())
        raise


def _listed(sequences: Iterable[BlockingSequence]) -> list[BlockingSequence]:
    try:
        return list(sequences)
    except TypeError as error:
        raise ArgumentError(
            f"sequences is {shown(sequences)}; give a list of this swap's sequences"
        ) from error


class BlockingSwap:
    """A swap without async calls. Get it from :func:`blocking`; close it or use ``with``."""

    def __init__(self, swap: HighSpeedSwap, loop: _LoopThread) -> None:
        self._swap = swap
        self._loop = loop
        loop.watch(swap)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def config(self) -> SwapConfig:
        """The settings it was opened with."""
        return self._swap.config

    def sequence(self, *, top_k: TopK | None = None) -> BlockingSequence:
        """A new, empty sequence. See :meth:`hsswap.HighSpeedSwap.sequence`."""
        return _kept(lambda: self._swap.sequence(top_k=top_k), self._loop)

    def open_prefix(self, tokens: ArrayLike, *, top_k: TopK | None = None) -> BlockingSequence:
        """A sequence that holds a stored prefix. See :meth:`hsswap.HighSpeedSwap.open_prefix`."""
        opened = self._loop.run(self._swap.open_prefix(tokens, top_k=top_k))
        return BlockingSequence(opened, self._loop)

    def attend_batch(
        self,
        layer: int,
        sequences: Iterable[BlockingSequence],
        queries: object,
        out: object,
        *,
        rows: ArrayLike | None = None,
        exact: bool | None = None,
        lse_out: object | None = None,
        sinks: object | None = None,
        stream: object | None = None,
    ) -> list[AttendResult]:
        """Many sequences of a layer in one call. See :meth:`hsswap.HighSpeedSwap.attend_batch`."""
        asked: list[Sequence] = []
        for each in _listed(sequences):
            if not isinstance(each, BlockingSequence):
                raise ArgumentError(f"{shown(each)} is no sequence of this swap")
            asked.append(each._sequence)
        return self._loop.run(
            self._swap.attend_batch(
                layer, asked, queries, out, rows=rows, exact=exact, lse_out=lse_out, sinks=sinks,
                stream=stream,
            )
        )  # fmt: skip

    def flush(self) -> None:
        """Wait until every full block appended so far is on disk."""
        self._loop.run(self._swap.flush())

    def run(self, work: Callable[[HighSpeedSwap], Coroutine[Any, Any, T]]) -> T:
        """What any awaited call of :class:`hsswap.HighSpeedSwap` gives, such as those on blocks by
        id: ``swap.run(lambda swap: swap.offload_block(...))``. Waits for it on the loop's thread.
        Raises ArgumentError for a function that returns nothing to be awaited.
        """
        made = work(self._swap)
        if not asyncio.iscoroutine(made):
            raise ArgumentError(
                f"run was given a function that returns {shown(made)}; call the swap's awaited "
                "functions in it: run(lambda swap: swap.flush())"
            )
        return self._loop.run(made)

    def statistics(self) -> SwapStatistics:
        """What happened since the swap was opened, and what is in use now."""
        return self._swap.statistics()

    def diagnostic_summary(self) -> DiagnosticSummary:
        """Occupancy, hits, bytes, waits, errors and the path in use."""
        return self._swap.diagnostic_summary()

    def close(self) -> None:
        """Close the swap and end its thread. Twice is fine. Raises ArgumentError on that thread."""
        self._loop.check_thread()
        if self._swap.is_inherited:
            return
        try:
            with suppress(ClosedError):  # from an earlier close on
                self._loop.run(self._swap.close())
        finally:
            self._loop.close()


def blocking(
    config: SwapConfig, *, io: BlockIO | None = None, device: Device | None = None
) -> BlockingSwap:
    """Open a swap with a loop thread of its own: ``with hsswap.blocking(config) as swap``.

    Works also where a loop is running (a notebook), whose thread it then blocks. Raises what
    :meth:`hsswap.HighSpeedSwap.create` raises.
    """
    loop = _LoopThread()
    try:
        return BlockingSwap(loop.run(HighSpeedSwap.create(config, io=io, device=device)), loop)
    except BaseException:
        loop.close()
        raise
