"""Rounds over captured steps of a swap: tokens of plain steps, and the sequences go on after."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import numpy as np
import pytest

import hsswap
from hsswap.config import SwapConfig
from hsswap.errors import ArgumentError
from hsswap.io.memory import MemoryIO
from hsswap.rounds import (
    Drafter,
    NgramDrafter,
    RoundStream,
    SequenceStart,
    StepsEarlyExit,
    StepsTarget,
)
from tests.rounds.attention_model import DIMS, VOCAB, Rows, run_rows
from tests.rounds.models import GuessDrafter

PROMPTS = [[1, 2, 3] * 30, [5, 4] * 3]
COUNT = 90


@asynccontextmanager
async def swap_of(
    *, host_slots: int = 120, tokens: int = 800
) -> AsyncIterator[hsswap.HighSpeedSwap]:
    """With fewer device slots than blocks."""
    config = SwapConfig(
        DIMS, tokens, device_slots=44, host_slots=host_slots, max_sequences=2, tile_tokens=256
    )
    async with hsswap.HighSpeedSwap.open(config, io=MemoryIO()) as swap:
        yield swap


async def plain(prompt: list[int], count: int) -> list[int]:
    """Greedy tokens, one at a time."""
    async with swap_of() as swap, swap.sequence() as sequence:
        tokens = list(prompt)
        tokens.append(await first_token(sequence, prompt))
        while len(tokens) < len(prompt) + count:
            logits = await run_rows(sequence, tokens[-1:], len(tokens) - 1)
            tokens.append(int(np.argmax(logits[-1])))
        return tokens[len(prompt) :]


@asynccontextmanager
async def speculating(
    swap: hsswap.HighSpeedSwap,
    sequences: Sequence[hsswap.Sequence],
    drafter: str | Drafter = "ngram",
    *,
    k: int = 3,
    rounds: int = 2,
    session: int = 512,
    streams: int = 1,
) -> AsyncIterator[tuple[StepsTarget, list[RoundStream]]]:
    """Round streams over one target, of sequences that have their prompts; they are given back at
    the end. ``drafter`` "exit-N": the first N layers.
    """
    stream, model = swap.device.stream(), Rows(k + 1)
    target = StepsTarget(
        *(swap.device, stream, sequences, model), k=k, vocab_size=VOCAB, session_tokens=session
    )
    with StepsEarlyExit(
        swap.device, target, model, layers=2 if drafter == "exit-2" else 1
    ) as early:
        if isinstance(drafter, str):
            drafter = NgramDrafter(swap.device) if drafter == "ngram" else early
        async with AsyncExitStack() as opened:
            parts = (swap.device, target, drafter)
            yield (
                target,
                [
                    await opened.enter_async_context(
                        RoundStream(
                            *parts,
                            k=k,
                            rounds=rounds,
                            batch=len(sequences),
                            history_tokens=700,
                            stream=stream,
                        )
                    )
                    for _ in range(streams)
                ],
            )
    await target.close()
    await target.close()
    stream.close()


async def first_token(sequence: hsswap.Sequence, prompt: list[int]) -> int:
    """Prefill; the model's choice behind it."""
    return int(np.argmax((await run_rows(sequence, prompt, 0))[-1]))


class Guesser(GuessDrafter):
    """Knows what comes, and says something else now and then."""

    def __init__(self, expected: list[list[int]]) -> None:
        super().__init__(self._guess_next)
        self._expected = expected
        self._doubts = np.random.default_rng(5)

    def _guess_next(self, tokens: list[int], k: int) -> list[int]:
        for prompt, wanted in zip(PROMPTS, self._expected, strict=True):
            whole = prompt + wanted
            if tokens == whole[: len(tokens)]:
                right, doubts = whole[len(tokens) : len(tokens) + k], self._doubts
                return [t if doubts.random() < 0.8 else int(doubts.integers(VOCAB)) for t in right]
        raise AssertionError("the stream has tokens of nobody")


# An exit behind the last layer is the model itself: every draft must stand.
LEAST_SHARE = {"guess": 0.4, "exit-1": 0.01, "exit-2": 1.0}


@pytest.mark.parametrize("drafter", list(LEAST_SHARE))
@pytest.mark.parametrize(("k", "rounds", "session"), [(3, 4, 512), (4, 2, 20)])
async def test_tokens_are_those_of_plain_steps(
    drafter: str, k: int, rounds: int, session: int
) -> None:
    """Two sequences, drafts often right, steps opened once and many times; then a plain step."""
    expected = [await plain(prompt, COUNT + 2) for prompt in PROMPTS]
    async with swap_of() as swap, swap.sequence() as one, swap.sequence() as two:
        sequences = [one, two]
        firsts = [await first_token(s, p) for s, p in zip(sequences, PROMPTS, strict=True)]
        made = [[first] for first in firsts]
        async with speculating(
            *(swap, sequences, Guesser(expected) if drafter == "guess" else drafter),
            k=k,
            rounds=rounds,
            session=session,
        ) as (_, [stream]):
            await stream.start(
                [
                    SequenceStart(prompt, first, len(prompt) + COUNT)
                    for prompt, first in zip(PROMPTS, firsts, strict=True)
                ]
            )
            async for burst in stream.bursts():
                for mine, tokens in zip(made, burst.tokens, strict=True):
                    mine += tokens
            assert stream.acceptance.share >= LEAST_SHARE[drafter]
        for sequence, prompt, mine, wanted in zip(sequences, PROMPTS, made, expected, strict=True):
            assert mine == wanted[: COUNT + 1]
            assert sequence.length == len(prompt) + COUNT
            logits = await run_rows(sequence, mine[-1:], sequence.length)
            assert int(np.argmax(logits[-1])) == wanted[COUNT + 1]


@pytest.mark.parametrize("drafter", ["ngram", "exit-1", "exit-2"])
async def test_blocks_only_on_disk_make_rounds_single(drafter: str) -> None:
    """Where the tiers hold less than the sequence: one round at a time, which says why; the tokens
    are the same up to the end of the store, and the sequence goes on.
    """
    prompt, count = [1, 2, 3] * 200, 39  # with one token more the last block is full
    wanted = await plain(prompt, count + 2)
    async with swap_of(host_slots=34, tokens=len(prompt) + count + 1) as swap:
        sequence = swap.sequence()
        made = [await first_token(sequence, prompt)]
        async with speculating(swap, [sequence], drafter) as (_, [stream]):
            await stream.start([SequenceStart(prompt, made[0], len(prompt) + count)])
            async for burst in stream.bursts():
                made += burst.tokens[0]
                assert burst.rounds == 1
                assert "host_slots" in burst.why
            assert stream.acceptance.share >= LEAST_SHARE.get(drafter, 0)
        assert made == wanted[: count + 1]
        assert sequence.length == len(prompt) + count
        logits = await run_rows(sequence, made[-1:], sequence.length)
        assert int(np.argmax(logits[-1])) == wanted[count + 1]
        assert swap.statistics().blocks_read > 100
        await sequence.close()


@pytest.mark.parametrize("session", [4, 512])
async def test_a_second_start_goes_back(session: int) -> None:
    """The same prompt once more, from the K and V that are there: the same tokens, within the steps
    that are open, or with new ones behind a block that is final.
    """
    prompt = PROMPTS[0]
    wanted = await plain(prompt, COUNT + 1)
    async with swap_of() as swap, swap.sequence() as sequence:
        assert await first_token(sequence, prompt) == wanted[0]
        async with speculating(swap, [sequence], rounds=4, session=session) as (target, [stream]):
            seen: list[object] = []
            for count in (5, 5, COUNT, 7, COUNT):
                start = SequenceStart(prompt, wanted[0], len(prompt) + count)
                await stream.start([start])
                assert [t async for t in stream.tokens()] == wanted[1 : count + 1]
                if all(target.steps is not each for each in seen):
                    seen.append(target.steps)
            assert len(seen) == 4
        assert sequence.length == len(prompt) + COUNT


async def test_two_streams_take_turns_on_one_target() -> None:
    """A start puts lengths back that another stream has moved."""
    prompt = PROMPTS[0]
    wanted = await plain(prompt, COUNT + 1)
    async with swap_of() as swap, swap.sequence() as sequence:
        assert await first_token(sequence, prompt) == wanted[0]
        async with speculating(swap, [sequence], streams=2) as (_, streams):
            for turn in range(4):
                stream = streams[turn % 2]
                await stream.start([SequenceStart(prompt, wanted[0], len(prompt) + COUNT)])
                assert [t async for t in stream.tokens()] == wanted[1 : COUNT + 1]


async def test_a_start_behind_more_than_the_sequence_holds_is_refused() -> None:
    """Else what was never written counts as K and V of the tokens, and may be committed."""
    prompt = PROMPTS[0]
    wanted = await plain(prompt, COUNT + 1)
    start = SequenceStart(prompt, wanted[0], len(prompt) + COUNT)
    async with swap_of() as swap, swap.sequence() as sequence:
        await run_rows(sequence, prompt[:50], 0)
        async with speculating(swap, [sequence]) as (_, [stream]):
            with pytest.raises(ArgumentError, match=f"behind {len(prompt)} tokens .* of 50"):
                await stream.start([start])
            await run_rows(sequence, prompt[50:], 50)
            await stream.start([start])
            assert [t async for t in stream.tokens()] == wanted[1 : COUNT + 1]
            longer = [*prompt, *wanted[: COUNT + 1]]
            with pytest.raises(ArgumentError, match="append the others first"):
                await stream.start([SequenceStart(longer, None, len(longer) + 5)])
            await stream.start([start])
            assert [t async for t in stream.tokens()] == wanted[1 : COUNT + 1]
        assert sequence.length == len(prompt) + COUNT


@pytest.mark.parametrize("session", [4, 512])
async def test_a_start_from_another_token_changes_no_full_block(session: int) -> None:
    """Back before where steps were opened again: full blocks there are on disk, and keep the bytes
    that were written. What comes behind the prompt gets blocks of its own.
    """
    prompt, count = PROMPTS[0], 40
    wanted = await plain(prompt, count + 1)
    other = (wanted[0] + 1) % VOCAB
    wanted_other = await plain([*prompt, other], 10)
    async with swap_of() as swap, swap.sequence() as sequence:
        await first_token(sequence, prompt)
        async with speculating(swap, [sequence], session=session) as (_, [stream]):
            await stream.start([SequenceStart(prompt, wanted[0], len(prompt) + count)])
            assert [t async for t in stream.tokens()] == wanted[1 : count + 1]
            await stream.start([SequenceStart(prompt, other, len(prompt) + 9)])
            assert [t async for t in stream.tokens()] == wanted_other[:9]
        assert sequence.length == len(prompt) + 9
        logits = await run_rows(sequence, wanted_other[8:9], sequence.length)
        assert int(np.argmax(logits[-1])) == wanted_other[9]


@pytest.mark.parametrize(("host_slots", "openings"), [(120, 1), (64, 2)])
async def test_steps_are_opened_as_far_as_there_is_use_and_room(
    host_slots: int, openings: int
) -> None:
    """Not past the capacity, which is all that the store has room for; and where host slots are
    scarce, not for a burst at a time.
    """
    prompt, count = PROMPTS[0], 310
    wanted = await plain(prompt, count + 1)
    async with swap_of(host_slots=host_slots, tokens=len(prompt) + count) as swap:
        sequence = swap.sequence()
        made = [await first_token(sequence, prompt)]
        async with speculating(swap, [sequence]) as (target, [stream]):
            await stream.start([SequenceStart(prompt, made[0], len(prompt) + count)])
            seen: list[object] = []
            async for burst in stream.bursts():
                made += burst.tokens[0]
                assert burst.why == ""
                if all(target.steps is not each for each in seen):
                    seen.append(target.steps)
            assert len(seen) == openings
            await swap.flush()  # what is final is written while steps are open
            blocks = (len(prompt) + count) // DIMS.block_size
            assert swap.statistics().blocks_written == DIMS.layers * blocks
        assert made == wanted
        await sequence.close()
