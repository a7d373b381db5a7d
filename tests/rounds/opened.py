"""A round stream over the table's target, opened and closed, with nothing left behind."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from hsswap.driver.host import HostDevice
from hsswap.rounds import Drafter, NgramDrafter, RoundOptions, RoundStream
from tests.rounds.models import GuessDrafter, TableTarget, guesses

VOCAB = 7


@asynccontextmanager
async def opened(
    prompts: Sequence[Sequence[int]],
    drafter: str | Drafter,
    *,
    k: int,
    rounds: int,
    room: int,
    options: RoundOptions | None = None,
    seed: int = 0,
) -> AsyncIterator[tuple[RoundStream, TableTarget]]:
    """A stream over the table's target on a host device; all is closed, and nothing left."""
    with HostDevice() as device:
        with TableTarget(device, k, prompts, vocab=VOCAB, room=room) as target:
            if isinstance(drafter, str):
                by_name = guesses(VOCAB, seed)
                drafter = (
                    NgramDrafter(device)
                    if drafter == "ngram"
                    else GuessDrafter(by_name[drafter], seed)
                )
            async with RoundStream(
                device,
                target,
                drafter,
                k=k,
                rounds=rounds,
                batch=len(prompts),
                history_tokens=room + 1,
                options=options,
            ) as stream:
                yield stream, target
        assert device.live_count == 0
