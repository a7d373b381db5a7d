"""The arms of ``hsswap bench rounds``: ways to decode the same prompts.

Every arm makes the same tokens, which is checked at each run.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from hsswap.driver.base import Closeable, Device, Event, Stream
from hsswap.errors import VerifyError
from hsswap.rounds import (
    Acceptance,
    Drafter,
    RoundOptions,
    RoundStream,
    SequenceStart,
    StreamBufs,
    Target,
)
from hsswap.rounds.round import Rounds


@dataclass(frozen=True, slots=True)
class Way:
    """One way to decode: ``rounds`` a burst. ``part`` of the tokens are made, where that is enough
    for a figure. ``reads_back``: the result of each round before the next one is issued.
    """

    name: str
    rounds: int = 1
    options: RoundOptions = field(default_factory=lambda: RoundOptions(adapt_from=1))
    drafter: str = "ngram"
    part: float = 1.0
    reads_back: bool = False


PLAIN = Way("plain")
READ_BACK = Way("read-back", reads_back=True)
WAYS = (
    PLAIN,
    Way("eager", options=RoundOptions(adapt_from=1, captured=False), part=0.1, reads_back=True),
    READ_BACK,
    Way("ahead", 1),
    Way("stream", 4),
    Way("stream-8", 8),
    Way("early-exit", 4, drafter="early-exit", part=0.25),
)
"""``plain`` makes a token a step, one graph each, and reads them at the end. ``eager`` and
``read-back`` look at each round in a plain loop, without asyncio; ``ahead`` has one more round on
the way meanwhile."""


@dataclass(slots=True)
class Told:
    """What an arm did in its last run, beside its time: host seconds are of the calling thread."""

    tokens: int = 0
    host_s: float = 0.0
    acceptance: Acceptance = field(default_factory=lambda: Acceptance(0, 0, 0))


@dataclass(frozen=True, slots=True)
class Idle:
    """Of a run's rounds: the device's median microseconds for one that had something to do, and the
    share of the time from the first to the last in which none ran.
    """

    round_us: float
    share: float


@dataclass(frozen=True, slots=True)
class Setting:
    """What the rounds of a way run on."""

    device: Device
    stream: Stream
    target: Target
    drafter: Drafter
    k: int
    batch: int
    history_tokens: int


class Engine(Protocol):
    """A model with prefilled sequences, which can go back to their prompts."""

    def starts(self, way: Way) -> list[SequenceStart]:
        """Back to the prompts, for a run of ``way``; where each sequence starts then."""
        ...

    async def plain(self) -> list[list[int]]:
        """The tokens of plain steps, by code without rounds."""
        ...

    def setting(self, way: Way) -> Setting:
        """The engine closes what it gives."""
        ...

    def watched(self, way: Way) -> AbstractContextManager[Callable[[], Idle | None]]:
        """A run inside the block is watched on the device; None where that cannot be."""
        ...


class ReadBack(Closeable):
    """Rounds whose results the host reads one by one, in a loop that blocks: what the stream is
    compared with. Captured as the stream's are, or not at all.
    """

    def __init__(self, setting: Setting, options: RoundOptions) -> None:
        self._setting = setting
        self._bufs = StreamBufs(
            *(setting.device, setting.k, 1),
            batch=setting.batch,
            history_tokens=setting.history_tokens,
        )
        try:
            parts = (setting.device, self._bufs, setting.target, setting.drafter)
            self._rounds = Rounds(*parts, options)
        except BaseException:
            self._bufs.close()
            raise

    async def run(self, starts: list[SequenceStart]) -> tuple[list[list[int]], Acceptance]:
        """All tokens behind the pending ones."""
        bufs, rounds, stream = self._bufs, self._rounds, self._setting.stream
        await bufs.start(stream, starts)
        await self._setting.target.settle([len(start.tokens) for start in starts])
        capacities = [start.capacity for start in starts]
        await self._setting.target.admit(1, 0, capacities, capacities)
        rounds.reset(stream)
        made: list[list[int]] = [[] for _ in starts]
        while True:
            launches = rounds.launches(stream, waits=False)
            bufs.begin(stream)
            launches.one()
            published = bufs.publish(stream)
            self._wait(published.event)
            drained = await bufs.drain_ring(published)
            for mine, tokens in zip(made, drained.tokens, strict=True):
                mine += tokens
            ends = zip(drained.flags, drained.positions, starts, strict=True)
            if all(flags or position >= start.capacity for flags, position, start in ends):
                return made, Acceptance(*drained.tally.sum(axis=0, dtype=int).tolist())

    def _wait(self, event: Event) -> None:
        """As fast as can be: sleeping would cost tens of microseconds a round on a GPU. Where a
        thread of this process is the device, it needs the interpreter.
        """
        if self._setting.device.name == "host":
            event.synchronize()
        while not event.is_done():
            pass

    def close(self) -> None:
        """Free everything; nothing runs."""
        self._setting.stream.synchronize()
        self._rounds.close()
        self._bufs.close()


def stream_of(setting: Setting, way: Way) -> RoundStream:
    """A way's round stream."""
    return RoundStream(
        *(setting.device, setting.target, setting.drafter),
        k=setting.k,
        rounds=way.rounds,
        batch=setting.batch,
        history_tokens=setting.history_tokens,
        options=way.options,
        stream=setting.stream,
    )


async def in_bursts(
    stream: RoundStream, starts: list[SequenceStart]
) -> tuple[list[list[int]], Acceptance]:
    """All tokens behind the pending ones, of a round stream."""
    await stream.start(starts)
    made: list[list[int]] = [[] for _ in starts]
    async for burst in stream.bursts():
        for mine, tokens in zip(made, burst.tokens, strict=True):
            mine += tokens
    return made, stream.acceptance


Decode = Callable[[list[SequenceStart]], Awaitable[tuple[list[list[int]], Acceptance]]]


def arm_of(
    engine: Engine, way: Way, decode: Decode, expected: list[list[int]], told: Told
) -> Callable[[], Awaitable[float]]:
    """One run from the prompts: seconds a token. Raises VerifyError for other tokens than
    ``expected``, of which a run may make a part.
    """

    async def run() -> float:
        starts = shortened(engine.starts(way), way.part)
        began, worked = time.perf_counter(), time.thread_time()
        made, told.acceptance = await decode(starts)
        seconds = time.perf_counter() - began
        told.host_s = time.thread_time() - worked
        told.tokens = sum(map(len, made))
        same = [_same(mine, wanted) for mine, wanted in zip(made, expected, strict=True)]
        if sum(same) < told.tokens:
            raise VerifyError(
                f"{way.name} makes other tokens than another arm (of each sequence, the first: "
                f"{same}); report it"
            )
        return seconds / told.tokens

    return run


def shortened(starts: list[SequenceStart], part: float) -> list[SequenceStart]:
    """As many starts with a part of the tokens to be made, at least one."""
    if part == 1:
        return starts
    lengths = [(start, len(start.tokens)) for start in starts]
    return [
        replace(start, capacity=length + max(1, round(part * (start.capacity - length))))
        for start, length in lengths
    ]


def _same(mine: list[int], wanted: list[int]) -> int:
    """Tokens before two lists begin to differ, of the shorter one."""
    pairs = enumerate(zip(mine, wanted, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(mine), len(wanted)))


def prompts_of(tokens: Sequence[int], count: int, length: int) -> list[list[int]]:
    """``count`` prompts of ``length`` tokens out of one text, each from another place."""
    text = np.resize(np.asarray(tokens), length + count)
    return [text[start : start + length].tolist() for start in range(count)]
