"""Rounds that cannot be enqueued, and starts that cannot be: nothing is lost, nothing changed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

from hsswap.driver.base import Stream
from hsswap.errors import ArgumentError, DeviceError
from hsswap.rounds import Choice, RoundOptions, SequenceStart, StreamBufs
from tests.rounds.models import greedy
from tests.rounds.opened import VOCAB, opened

PROMPT = [3, 1, 4]
COUNT = 60
START = SequenceStart(PROMPT, 2, len(PROMPT) + COUNT)
RIGHT = greedy([*PROMPT, 2], COUNT, VOCAB)


async def collect(tokens: AsyncIterator[int], made: list[int]) -> None:
    """Every token into a list that outlives an error."""
    async for token in tokens:
        made.append(token)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("refused", range(1, 10))
async def test_a_refused_launch_loses_no_token(
    refused: int, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rounds of a burst that are on the stream when one is refused are drained all the same."""
    options = RoundOptions(captured=captured)
    async with opened([PROMPT], "often", k=3, rounds=3, room=90, options=options) as opening:
        stream, target = opening
        verify, calls, errors = target.verify, 0, 0

        def full(on: Stream, bufs: StreamBufs) -> None:
            nonlocal calls
            calls += 1
            if calls == refused:
                raise DeviceError("the stream is full; wait")
            verify(on, bufs)

        monkeypatch.setattr(target, "verify", full)
        await stream.start([START])
        made: list[int] = []
        while len(made) < COUNT:
            try:
                await collect(stream.tokens(), made)
                break
            except DeviceError:
                errors += 1
        assert made == RIGHT
        assert errors == (calls >= refused)


@pytest.mark.parametrize("refused", range(1, 4))
async def test_results_that_cannot_be_fetched_are_not_passed_over(
    refused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error stays: no token comes behind a gap."""
    async with opened([PROMPT], "often", k=3, rounds=2, room=90) as (stream, _):
        publish, calls = StreamBufs.publish, 0

        def full(self: StreamBufs, on: Stream) -> Any:
            nonlocal calls
            calls += 1
            if calls == refused:
                raise DeviceError("the stream is full; wait")
            return publish(self, on)

        monkeypatch.setattr(StreamBufs, "publish", full)
        await stream.start([START])
        made: list[int] = []
        for _ in range(3):
            with pytest.raises(DeviceError, match="full"):
                await collect(stream.tokens(), made)
        assert made == RIGHT[: len(made)]


BAD_STARTS: list[Callable[[], SequenceStart]] = [
    lambda: SequenceStart([-1], 2, 40),
    lambda: SequenceStart([1 << 40], 2, 40),
    lambda: SequenceStart([VOCAB], 2, 40),
    lambda: SequenceStart(PROMPT, VOCAB, 40),
    lambda: SequenceStart(PROMPT, -1, 40),
    lambda: SequenceStart(PROMPT, 1 << 33, 40),
    lambda: SequenceStart(PROMPT, None, 40, last_pred=-1),
    lambda: SequenceStart(PROMPT, 2, 40.5),  # type: ignore[arg-type]
    lambda: SequenceStart(PROMPT, 2, None),  # type: ignore[arg-type]
    lambda: SequenceStart("abc", 2, 40),  # type: ignore[arg-type]
    lambda: SequenceStart([1.5], 2, 40),  # type: ignore[list-item]
    lambda: SequenceStart([[1], [1, 2]], 2, 40),  # type: ignore[list-item]
    lambda: SequenceStart(PROMPT, 2, 40, choice=None),  # type: ignore[arg-type]
    lambda: SequenceStart(PROMPT, 2, 40, choice=Choice(temperature="a")),  # type: ignore[arg-type]
    lambda: SequenceStart(PROMPT, 2, 40, choice=Choice(seed=1.5)),  # type: ignore[arg-type]
    lambda: SequenceStart(PROMPT, 2, 40, choice=Choice(min_p=None)),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("bad", BAD_STARTS)
async def test_a_bad_start_is_refused_and_the_old_one_goes_on(
    bad: Callable[[], SequenceStart],
) -> None:
    async with opened([PROMPT], "often", k=2, rounds=2, room=90) as (stream, _):
        await stream.start([START])
        with pytest.raises(ArgumentError):
            await stream.start([bad()])
        assert [token async for token in stream.tokens()] == RIGHT


@pytest.mark.parametrize("stops", [[-1], [1 << 40], None, 5, ["a"], [1.5], np.zeros((1, 1))])
async def test_stop_tokens_and_sequences_of_another_kind(stops: Any) -> None:
    async with opened([PROMPT], "often", k=2, rounds=2, room=90) as (stream, _):
        await stream.start([START])
        with pytest.raises(ArgumentError, match="stop tokens"):
            await stream.start([START], stops)
        for sequences in (None, [None], 5, START):
            with pytest.raises(ArgumentError):
                await stream.start(sequences)  # type: ignore[arg-type]
        assert [token async for token in stream.tokens()] == RIGHT
