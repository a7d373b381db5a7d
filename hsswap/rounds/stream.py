"""ROUND-STREAM: M rounds of speculative decoding issued ahead, drained once.

``async for`` gives tokens as bursts drain, while the next burst is already under way: the device
never waits for the host, and the host sees values once a burst.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Generic, Self, TypeVar

from hsswap.driver.base import Device, Stream
from hsswap.errors import ArgumentError, ClosedError, HsswapError, shown
from hsswap.io.waiting import until_done
from hsswap.loop import in_thread
from hsswap.rounds.buffers import Drained, Published, SequenceStart, StreamBufs
from hsswap.rounds.choosing import Choosing
from hsswap.rounds.contracts import Admission, Drafter, Target
from hsswap.rounds.ends import End, end_of, error_of
from hsswap.rounds.pacing import furthest, rounds_to_issue
from hsswap.rounds.round import RoundOptions, Rounds

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Burst:
    """What one burst made. Of each sequence: ``tokens`` in order, ``ended`` (None: it goes on) and
    ``errors`` (None: none). ``rounds`` that it had: one in the first burst, which is not captured,
    few at the end; ``why`` others had fewer than asked for, or "".
    """

    tokens: list[list[int]]
    ended: list[End | None]
    errors: list[HsswapError | None]
    rounds: int
    why: str


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Since the start, over all sequences: rounds (of one sequence each), drafts verified, drafts
    accepted, and tokens made.
    """

    rounds: int
    drafted: int
    accepted: int

    @property
    def tokens(self) -> int:
        """Tokens made: one a round, and one more for each accepted draft."""
        return self.rounds + self.accepted

    @property
    def share(self) -> float:
        """Of the drafts verified, those accepted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_a_round(self) -> float:
        """1 without a draft accepted, k + 1 at best."""
        return self.tokens / self.rounds if self.rounds else 0.0


@dataclass(frozen=True, slots=True)
class _UnderWay:
    published: Published
    rounds: int
    why: str


class _Each(AsyncIterator[T], Generic[T]):
    """Calls ``following`` until it gives None. It has no state that breaking off could lose."""

    def __init__(self, following: Callable[[], Awaitable[T | None]]) -> None:
        self._following = following

    async def __anext__(self) -> T:
        item = await self._following()
        if item is None:
            raise StopAsyncIteration
        return item


def _check_kind(value: object, kind: type | tuple[type, ...], what: str) -> None:
    """Raise ArgumentError for what is no such thing."""
    if not isinstance(value, kind):
        first = kind if isinstance(kind, type) else kind[0]
        raise ArgumentError(f"{what} is {shown(value)}; give a {first.__name__}")


class RoundStream:
    """Speculative decoding of ``batch`` sequences, ``rounds`` rounds of ``k`` drafts a burst.

    Give it a target and a drafter of ``device``, :meth:`start` it, and iterate :meth:`tokens` (a
    batch of one) or :meth:`bursts`. Breaking off, or being cancelled, loses nothing: what is under
    way ends by itself, and the next iteration goes on behind it. Close it, or leave its ``async
    with``, before the target.

    ``history_tokens``: the longest a sequence gets, prompt included. ``stops``: stop tokens at
    most. ``stream``: where the work goes (None: a stream of its own), an attribute later.

    Raises ArgumentError for sizes under 1 and a target that does not fit; DeviceError.
    """

    def __init__(
        self,
        device: Device,
        target: Target,
        drafter: Drafter,
        *,
        k: int,
        rounds: int,
        history_tokens: int,
        batch: int = 1,
        stops: int = 8,
        options: RoundOptions | None = None,
        stream: Stream | None = None,
    ) -> None:
        _check_kind(device, Device, "device")
        _check_kind(target, Target, "target")
        _check_kind(drafter, Drafter, "drafter")
        _check_kind(options, (RoundOptions, type(None)), "options")
        _check_kind(stream, (Stream, type(None)), "stream")
        self._target = target
        self._bufs = StreamBufs(
            device, k, rounds, batch=batch, history_tokens=history_tokens, stops=stops
        )
        self._owned: list[StreamBufs | Rounds | Stream] = [self._bufs]
        try:
            self._options = options or RoundOptions()
            self._rounds = Rounds(device, self._bufs, target, drafter, self._options)
            self._owned.append(self._rounds)
            self.stream = device.stream() if stream is None else stream
            if stream is None:
                self._owned.append(self.stream)
        except BaseException:
            self._free()
            raise
        # One thread for launches that take long: frameworks keep handles and workspaces a thread,
        # and a capture must find those that the eager rounds made.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hsswap-rounds")
        self._starts: Sequence[SequenceStart] = ()
        self._positions: list[int] = []
        self._ended: list[End | None] = []
        self._under_way: deque[_UnderWay] = deque()
        self._undelivered: deque[Burst] = deque()
        self._drained: Drained | None = None
        self._failure: BaseException | None = None
        self._tokens: deque[int] = deque()
        self._error: HsswapError | None = None
        self._iterating = asyncio.Lock()
        self._closed = False
        self._ending: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def positions(self) -> list[int]:
        """Of each sequence, the tokens whose K and V are final, as last drained."""
        return list(self._positions)

    @property
    def acceptance(self) -> Acceptance:
        """How drafts fared, as last drained."""
        if self._drained is None:
            return Acceptance(0, 0, 0)
        return Acceptance(*self._drained.tally.sum(axis=0, dtype=int).tolist())

    @property
    def why_all_run(self) -> str:
        """Why rounds issued ahead of an end run all the same, where the device takes no graph that
        is passed over; else "".
        """
        return self._rounds.why_all_run

    async def start(
        self, sequences: Sequence[SequenceStart], stop_tokens: Sequence[int] = ()
    ) -> None:
        """Begin with new sequences, one for each place of the batch.

        The target must hold each one's K and V; it may hold more, of an earlier start. Raises
        ArgumentError, and nothing is changed, for lists of the wrong size, a capacity under the
        tokens that are there, a temperature where the stream is greedy, and while bursts are under
        way.
        """
        self._check_open()
        if self._under_way or self._iterating.locked():
            raise ArgumentError("start() while bursts are under way; iterate to the end, or close")
        greedy = self._options.choosing is Choosing.GREEDY
        self._bufs.check_starts(sequences, self._target.vocab_size, greedy=greedy)
        async with self._iterating:
            await self._begin(list(sequences), stop_tokens)

    def tokens(self) -> AsyncIterator[int]:
        """The tokens of a batch of one, in order, without the pending one that it started with.

        Ends behind a stop token and at the capacity. Raises BadDraft or ModelError behind the
        tokens that were right, and what :meth:`bursts` raises.
        """
        if self._bufs.batch != 1:
            raise ArgumentError(f"tokens() of a batch of {self._bufs.batch}; use bursts()")
        return _Each(self._next_token)

    def bursts(self) -> AsyncIterator[Burst]:
        """What bursts make, as they drain; ends when every sequence has ended.

        Raises DeviceError when a launch failed, and what the target raises for want of room.
        """
        return _Each(self._next_burst)

    async def _next_token(self) -> int | None:
        while not self._tokens:
            if self._error is not None:
                raise self._error
            burst = await self._next_burst()
            if burst is None:
                return None
            self._tokens.extend(burst.tokens[0])
            self._error = burst.errors[0]
        return self._tokens.popleft()

    async def _next_burst(self) -> Burst | None:
        self._check_open()
        if self._iterating.locked():
            raise ArgumentError("two tasks iterate one round stream; let one of them do it")
        async with self._iterating:
            if self._failure is not None:
                raise self._failure
            if not self._undelivered:
                if not self._under_way and not await self._issue():
                    return None
                await self._issue()
                await self._drain()
            return self._undelivered.popleft()

    async def close(self) -> None:
        """Wait for what is under way and free everything. Twice is fine: each waits for the end,
        and goes on to it when cancelled meanwhile.
        """
        self._closed = True
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end())
        await until_done(self._ending)

    async def _end(self) -> None:
        try:
            await self._end_quietly()
        finally:  # memory is freed only when nothing runs on it
            self._free()

    async def _end_quietly(self) -> None:
        async with self._iterating:  # who iterates may be enqueuing
            # Behind everything: bursts, and what a start enqueued. A failure has been told, or
            # nobody asks for its result any more.
            with suppress(HsswapError):
                await self.stream.record().wait()

    async def _begin(self, sequences: list[SequenceStart], stop_tokens: Sequence[int]) -> None:
        self._bufs.check_sizes(sequences, stop_tokens)
        positions = [len(sequence.tokens) for sequence in sequences]
        self._target.check_start(positions)
        # Until all of it is there, whatever ends it half-way.
        self._failure = ArgumentError("the last start was not finished; start again")
        self._starts, self._positions, self._ended = [], [], []
        self._drained, self._error = None, None
        self._undelivered.clear()
        self._tokens.clear()
        await self._bufs.start(self.stream, sequences, stop_tokens)
        reset = partial(self._rounds.reset, self.stream)
        await in_thread(reset, executor=self._thread)
        self._starts = sequences
        self._positions = positions
        self._ended = [
            # Without a pending token there is one to make: the model's choice behind the last.
            End.LENGTH if s.pending is not None and len(s.tokens) >= s.capacity else None
            for s in sequences
        ]
        await self._target.settle(self._positions)
        self._failure = None

    async def _issue(self) -> bool:
        """Enqueue one more burst, if there is use for it and room. Whether one was."""
        under_way = sum(burst.rounds for burst in self._under_way)
        running = [s for s, ended in enumerate(self._ended) if ended is None]
        left = [self._tokens_left(s) for s in running]
        wanted = rounds_to_issue(left, under_way, self._bufs.m_rounds)
        if not wanted or len(self._under_way) > 1:
            return False
        ends = [
            furthest(position, under_way + wanted, self._bufs.k, start.capacity)
            for position, start in zip(self._positions, self._starts, strict=True)
        ]
        capacities = [start.capacity for start in self._starts]
        admission = await self._target.admit(wanted, under_way, ends, capacities)
        rounds = min(wanted, admission.rounds)
        if not rounds:
            return False
        await self._enqueue(rounds, admission)
        return True

    async def _enqueue(self, rounds: int, admission: Admission) -> None:
        """Put a burst on the stream: from here if that is quick, else from a thread, to its end."""
        prepare = partial(self._rounds.launches, self.stream, waits=admission.waits)
        launches = await in_thread(prepare, executor=self._thread)

        def enqueue() -> None:
            done, wanted = 0, min(rounds, launches.most)
            self._bufs.begin(self.stream)
            try:
                while done < wanted:
                    launches.one()
                    done += 1
            finally:
                if done:  # a round that was refused half-way has committed nothing
                    self._publish(done, admission.why)

        if launches.is_quick:
            enqueue()
        else:
            await in_thread(enqueue, executor=self._thread)

    def _publish(self, rounds: int, why: str) -> None:
        """Behind rounds that are on the stream; if that is refused their tokens are lost."""
        try:
            published = self._bufs.publish(self.stream)
        except BaseException as error:
            self._failure = error
            raise
        self._under_way.append(_UnderWay(published, rounds, why))

    async def _drain(self) -> None:
        """Take in the oldest burst. Cancelled while waiting, it stays the oldest."""
        burst = self._under_way[0]
        try:
            drained = await self._bufs.drain_ring(burst.published)
        except HsswapError as error:
            self._failure = error
            raise
        self._under_way.popleft()
        self._drained, self._positions = drained, drained.positions
        errors = [error_of(flags, s) for s, flags in enumerate(drained.flags)]
        fresh = [ended is None for ended in self._ended]
        self._ended = [
            end_of(flags, start.capacity - position)
            for flags, position, start in zip(
                drained.flags, drained.positions, self._starts, strict=True
            )
        ]
        self._undelivered.append(
            Burst(
                drained.tokens,
                list(self._ended),
                [error if new else None for error, new in zip(errors, fresh, strict=True)],
                burst.rounds,
                burst.why,
            )
        )
        await self._target.settle(drained.positions)

    def _tokens_left(self, s: int) -> int:
        """Tokens that a running sequence may still make, as last drained."""
        return max(1, self._starts[s].capacity - self._positions[s])

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the round stream is closed; make a new one")

    def _free(self) -> None:
        for resource in reversed(self._owned):
            resource.close()
        if hasattr(self, "_thread"):
            self._thread.shutdown(wait=False)
