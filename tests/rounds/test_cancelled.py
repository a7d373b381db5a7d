"""Cancelled at every point where it waits, a round stream loses no token and mixes up no two."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import pytest

from hsswap.errors import ArgumentError
from hsswap.rounds import NgramDrafter, RoundStream, SequenceStart, StepsTarget
from tests.rounds.attention_model import VOCAB as ROWS_VOCAB
from tests.rounds.attention_model import Rows, run_rows
from tests.rounds.models import greedy
from tests.rounds.opened import VOCAB, opened
from tests.rounds.test_steps_target import plain, swap_of

T = TypeVar("T")
PROMPT = [3, 1, 4]
COUNT = 30
OTHER = [2, 2, 6, 5]


class CancelAt(Generic[T]):
    """Awaits ``work`` and cancels its own task at the ``point``-th time that it waits."""

    def __init__(self, work: Awaitable[T], point: int) -> None:
        self._work, self._left = work, point

    def __await__(self) -> Generator[Any, Any, T]:
        steps = self._work.__await__()
        go_on: Callable[[], Any] = partial(steps.send, None)
        while True:
            try:
                waits_for = go_on()
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            if not self._left:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
            self._left -= 1
            try:
                go_on = partial(steps.send, (yield waits_for))
            except BaseException as error:
                go_on = partial(steps.throw, error)


async def cancelled_at(point: int, make: Callable[[], Awaitable[object]]) -> bool:
    """Whether ``make()`` was cancelled there; False: it had ended before."""

    async def run() -> None:
        await CancelAt(make(), point)

    try:
        await asyncio.create_task(run())
    except asyncio.CancelledError:
        return True
    return False


async def collect(tokens: AsyncIterator[int], made: list[int]) -> None:
    """Every token into a list that outlives a cancellation."""
    async for token in tokens:
        made.append(token)


async def test_an_iteration_goes_on_where_it_was_cancelled() -> None:
    """Whatever it was waiting for: every token once."""
    start = SequenceStart(PROMPT, 2, len(PROMPT) + COUNT)
    for point in range(1000):
        async with opened([PROMPT], "often", k=3, rounds=2, room=60) as (stream, _):
            await stream.start([start])
            made: list[int] = []
            cancelled = await cancelled_at(point, lambda: collect(stream.tokens(), made))  # noqa: B023
            await collect(stream.tokens(), made)
            assert made == greedy([*PROMPT, 2], COUNT, VOCAB)
        if not cancelled:
            break
    assert point > 4  # how often it waits depends on who is faster


async def test_a_start_that_was_cancelled_is_no_start() -> None:
    """Half of it may be on the device: nothing is made until there is a whole one."""
    first = SequenceStart(PROMPT, 2, len(PROMPT) + COUNT)
    second = SequenceStart(OTHER, 1, len(OTHER) + COUNT)
    for point in range(1000):
        async with opened([PROMPT], "often", k=3, rounds=2, room=60) as (stream, target):
            await stream.start([first])
            assert [await anext(stream.tokens()) for _ in range(2)] == (
                greedy([*PROMPT, 2], 2, VOCAB)
            )
            await collect(stream.tokens(), [])
            target.hold_tokens([OTHER])
            cancelled = await cancelled_at(point, lambda: stream.start([second]))
            if cancelled:
                with pytest.raises(ArgumentError, match="start"):
                    await anext(stream.tokens())
                assert stream.positions == []
                await stream.start([second])
            made: list[int] = []
            await collect(stream.tokens(), made)
            assert made == greedy([*OTHER, 1], COUNT, VOCAB)
        if not cancelled:
            break
    assert point > 1


async def test_closing_is_done_when_it_was_cancelled() -> None:
    """The leak checks of the device and of the test see whether anything stayed."""
    for point in range(1000):
        async with opened([PROMPT], "often", k=3, rounds=2, room=60) as (stream, _):
            await stream.start([SequenceStart(PROMPT, 2, len(PROMPT) + COUNT)])
            await anext(stream.tokens())
            cancelled = await cancelled_at(point, stream.close)
        if not cancelled:
            break
    assert point > 0


async def test_steps_of_a_swap_are_opened_again() -> None:
    """Cancelled in the middle of opening and closing captured steps, of two sequences."""
    k, count = 2, 24
    wanted = await plain(OTHER, count + 1)
    prompts = [OTHER, OTHER]
    for point in (*range(10), *range(10, 1000, 7)):
        async with swap_of() as swap, swap.sequence() as one, swap.sequence() as two:
            stream, sequences = swap.device.stream(), [one, two]
            for sequence, prompt in zip(sequences, prompts, strict=True):
                logits = await run_rows(sequence, prompt, 0)
                assert int(np.argmax(logits[-1])) == wanted[0]
            target = StepsTarget(
                *(swap.device, stream, sequences, Rows(k + 1)),
                k=k,
                vocab_size=ROWS_VOCAB,
                session_tokens=6,
            )
            async with RoundStream(
                *(swap.device, target, NgramDrafter(swap.device)),
                k=k,
                rounds=2,
                batch=2,
                history_tokens=100,
                stream=stream,
            ) as rounds:
                end = len(OTHER) + count
                await rounds.start([SequenceStart(OTHER, wanted[0], end) for _ in sequences])
                made: list[list[int]] = [[], []]

                async def go_on() -> None:
                    async for burst in rounds.bursts():
                        for mine, tokens in zip(made, burst.tokens, strict=True):  # noqa: B023
                            mine += tokens

                cancelled = await cancelled_at(point, go_on)
                await go_on()
                assert made == [wanted[1:], wanted[1:]]
            await target.close()
            stream.close()
        if not cancelled:
            break
