"""Every awaited call of a sequence and of blocks by id, cancelled after any number of turns.

The same must hold as where the device refuses something: nothing is lost, the sequence goes on or
says what can be done, and another sequence does not notice.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from tests.swap_watch import turns, within
from tests.ways import MIXED, WAYS, Way, ready

AWAITED = [way for way in WAYS if not way.name.startswith(("try_", "fork"))]
MOST_TURNS = 60


async def cancelled_after(way: Way, count: int) -> bool:
    """One call cancelled after so many turns of the loop; whether it had ended before."""
    async with ready(way, MIXED) as bench:
        ended = way.call(bench)
        assert ended is not None
        call = asyncio.ensure_future(ended)
        await turns(count)
        was_done = call.done()
        call.cancel()
        with suppress(asyncio.CancelledError):
            await within(lambda: call)
    return was_done


@pytest.mark.parametrize("way", AWAITED, ids=lambda way: way.name)
async def test_a_call_cancelled_anywhere(way: Way) -> None:
    for count in [*range(12), *range(12, MOST_TURNS, 3)]:
        try:
            if await cancelled_after(way, count):
                return
        except BaseException as error:
            raise AssertionError(f"cancelled after {count} turns: {error!r}") from error
