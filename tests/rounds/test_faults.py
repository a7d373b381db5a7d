"""What goes wrong in a round stream is told, typed, and loses nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from hsswap.driver.host import HostDevice
from hsswap.errors import ArgumentError, BadDraft, ClosedError, DeviceError, ModelError
from hsswap.rounds import Choice, End, NgramDrafter, RoundOptions, RoundStream, SequenceStart
from tests.rounds.models import GuessDrafter, TableTarget, enqueue, greedy
from tests.rounds.opened import VOCAB, opened
from tests.swap_watch import turns

PROMPT = [1, 2, 3]
FIRST = greedy(PROMPT, 1, VOCAB)[0]


def begin(count: int) -> SequenceStart:
    """``count`` tokens after the pending one."""
    return SequenceStart(PROMPT, FIRST, len(PROMPT) + count)


def expected(count: int) -> list[int]:
    """What must come."""
    return greedy(PROMPT, count + 1, VOCAB)[1:]


class Gate:
    """Holds the target's passes until it is opened; ``reached`` says that one is held."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._loop = asyncio.get_running_loop()
        self.open = self._open.set
        self.reached = asyncio.Event()

    def wait(self) -> None:
        """On the stream's worker."""
        self._loop.call_soon_threadsafe(self.reached.set)
        assert self._open.wait(20)


async def collect(tokens: AsyncIterator[int], made: list[int]) -> None:
    """Every token into a list that outlives an error."""
    async for token in tokens:
        made.append(token)


@pytest.mark.parametrize("bad", [[0, -1], [-1], [VOCAB], [0, 1 << 31]])
async def test_a_bad_draft_ends_the_sequence_and_not_its_tokens(bad: list[int]) -> None:
    """Too few drafts or one outside the vocabulary: the tokens so far come, then the error; another
    drafter goes on from them.
    """

    def guess(tokens: list[int], k: int) -> list[int]:
        right = greedy(tokens, k, VOCAB)
        return right if len(tokens) < 12 else [*bad, *right][:k]

    async with opened([PROMPT], GuessDrafter(guess), k=3, rounds=4, room=60) as (stream, _):
        await stream.start([begin(40)])
        made: list[int] = []
        with pytest.raises(BadDraft, match="sequence 0"):
            await collect(stream.tokens(), made)
        assert made
        assert made == expected(40)[: len(made)]
        assert stream.positions == [len(PROMPT) + len(made)]
    tokens = [*PROMPT, FIRST, *made]
    async with opened([tokens[:-1]], "ngram", k=3, rounds=4, room=60) as (stream, _):
        await stream.start([SequenceStart(tokens[:-1], tokens[-1], len(PROMPT) + 40)])
        rest = [token async for token in stream.tokens()]
    assert made + rest == expected(40)


async def test_logits_of_nan_end_the_sequence() -> None:
    """The tokens before come, then the error; the other sequence of the batch goes on."""
    async with opened([PROMPT, [4]], "perfect", k=3, rounds=3, room=60) as (stream, target):
        target.bad_at = len(PROMPT) + 17
        other = greedy([4], 1, VOCAB)[0]
        await stream.start([begin(40), SequenceStart([4], other, 1 + 12)])
        made: list[list[int]] = [[], []]
        errors = []
        ended: list[End | None] = []
        async for burst in stream.bursts():
            for mine, tokens in zip(made, burst.tokens, strict=True):
                mine += tokens
            errors += [e for e in burst.errors if e is not None]
            ended = burst.ended
        assert made[0] == expected(40)[:17]
        assert made[1] == greedy([4], 13, VOCAB)[1:]
        assert ended == [End.FAILED, End.LENGTH]
        assert len(errors) == 1
        assert isinstance(errors[0], ModelError)


async def test_a_failed_launch_is_told_and_stays() -> None:
    """An error on the device comes out of the iteration, and out of the next one."""

    def guess(tokens: list[int], k: int) -> list[int]:
        if len(tokens) > 20:
            raise RuntimeError("no idea")
        return greedy(tokens, k, VOCAB)

    async with opened([PROMPT], GuessDrafter(guess), k=2, rounds=2, room=60) as (stream, _):
        await stream.start([begin(40)])
        made: list[int] = []
        with pytest.raises(DeviceError, match="no idea"):
            await collect(stream.tokens(), made)
        assert made == expected(40)[: len(made)]
        with pytest.raises(DeviceError, match="no idea"):
            await anext(stream.tokens())


@pytest.mark.parametrize("passes", [0, 1, 2, 5, 9])
async def test_cancelled_at_any_point_and_resumed(passes: int) -> None:
    """A cancelled consumer loses no token: what is under way is drained by the next one."""
    async with opened([PROMPT], "often", k=3, rounds=2, room=90) as (stream, target):
        await stream.start([begin(80)])
        gate = Gate()
        target.hold = lambda: gate.wait() if target.passes == passes else None
        made: list[int] = []
        task = asyncio.create_task(collect(stream.tokens(), made))
        await gate.reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.open()
        await collect(stream.tokens(), made)
        assert made == expected(80)


async def test_closed_while_bursts_are_under_way() -> None:
    """Closing waits for the device, though nobody wants the tokens; twice is fine."""
    async with opened([PROMPT], "often", k=3, rounds=4, room=90) as (stream, target):
        await stream.start([begin(80)])
        gate = Gate()
        target.hold = gate.wait
        task = asyncio.create_task(collect(stream.tokens(), []))
        await gate.reached.wait()
        with pytest.raises(ArgumentError, match="two tasks"):
            await anext(stream.bursts())
        with pytest.raises(ArgumentError, match="under way"):
            await stream.start([begin(3)])
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        closing = asyncio.create_task(stream.close())
        await asyncio.sleep(0)
        assert not closing.done()
        gate.open()
        await closing
        await stream.close()
        with pytest.raises(ClosedError):
            await stream.start([begin(80)])
        with pytest.raises(ClosedError):
            await anext(stream.tokens())


async def test_closing_goes_on_when_it_is_cancelled() -> None:
    """Memory is freed only behind the work, whoever lost patience, how often ever; and who closes
    too waits for the same end.
    """
    async with opened([PROMPT], "often", k=3, rounds=4, room=90) as (stream, target):
        await stream.start([begin(80)])
        gate = Gate()
        target.hold = gate.wait
        task = asyncio.create_task(collect(stream.tokens(), []))
        await gate.reached.wait()
        task.cancel()
        closing, other = (asyncio.create_task(stream.close()) for _ in range(2))
        await asyncio.sleep(0)
        for _ in range(3):
            closing.cancel()
            await turns(5)
            assert not closing.done()
            assert not other.done()
        gate.open()
        with pytest.raises(asyncio.CancelledError):
            await closing
        await other


async def test_breaking_off_and_going_on() -> None:
    """``break`` between bursts, then another iteration: bursts() gives every burst once."""
    async with opened([PROMPT], "often", k=2, rounds=3, room=90) as (stream, _):
        await stream.start([begin(80)])
        made: list[int] = []
        while len(made) < 80:
            async for burst in stream.bursts():
                made += burst.tokens[0]
                break
        assert made == expected(80)


async def test_the_next_burst_is_under_way_while_one_drains() -> None:
    """Tokens of the first burst come while the device is held in the second."""
    async with opened([PROMPT], "perfect", k=2, rounds=2, room=90) as (stream, target):
        gate = Gate()

        def hold() -> None:
            if target.passes >= 1:
                gate.wait()

        target.hold = hold
        await stream.start([begin(60)])
        bursts = stream.bursts()
        first = await anext(bursts)
        assert first.tokens[0] == expected(60)[:3]
        assert len(target.admitted) == 2
        gate.open()
        rest = [token async for burst in bursts for token in burst.tokens[0]]
        assert first.tokens[0] + rest == expected(60)


async def test_fewer_rounds_than_asked_for_are_told() -> None:
    """Where the target admits one round, bursts have one, none is issued ahead, and it says why."""
    sizes, eager = {"k": 2, "rounds": 4, "room": 60}, RoundOptions(captured=False)
    async with opened([PROMPT], "often", **sizes, options=eager) as (stream, target):
        target.most_rounds = 1
        await stream.start([begin(30)])
        made, count = [], 0
        async for burst in stream.bursts():
            made += burst.tokens[0]
            count += 1
            assert burst.rounds == 1
            assert target.issued == count
            assert burst.why in ("the table says so", "")
        assert made == expected(30)


@pytest.mark.parametrize(
    ("k", "rounds", "batch", "history"), [(0, 4, 1, 9), (3, 0, 1, 9), (3, 4, 0, 9), (3, 4, 1, 0)]
)
def test_sizes_under_one_are_refused(k: int, rounds: int, batch: int, history: int) -> None:
    """Before anything is made."""
    with (
        HostDevice() as device,
        TableTarget(device, 3, [PROMPT], vocab=VOCAB, room=9) as target,
        pytest.raises(ArgumentError),
    ):
        RoundStream(
            *(device, target, NgramDrafter(device)),
            k=k,
            rounds=rounds,
            batch=batch,
            history_tokens=history,
        )


def test_a_target_of_another_k_is_refused() -> None:
    """Its logits have another number of rows."""
    with (
        HostDevice() as device,
        TableTarget(device, 3, [PROMPT], vocab=VOCAB, room=9) as target,
        pytest.raises(ArgumentError, match="logits"),
    ):
        RoundStream(device, target, NgramDrafter(device), k=4, rounds=1, history_tokens=9)


@pytest.mark.parametrize(("shortest", "longest"), [(3, 2), (0, 2), (1, 9), (1.0, 2), (None, 3)])
def test_n_grams_that_no_kernel_looks_up(shortest: Any, longest: Any) -> None:
    """Said when the drafter is made, not in the first round."""
    with HostDevice() as device, pytest.raises(ArgumentError, match="n-grams"):
        NgramDrafter(device, shortest=shortest, longest=longest)


@pytest.mark.parametrize(
    "wrong",
    [
        {"p_min": 2.0},
        {"p_min": -0.1},
        {"p_min": float("nan")},
        {"p_min": "half"},
        {"adapt_from": 0},
        {"adapt_from": 1.5},
        {"adapt_from": True},
        {"choosing": "greedy"},
    ],
)
def test_options_out_of_range(wrong: dict[str, Any]) -> None:
    """A probability is one, a depth is a whole number of at least 1."""
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        RoundOptions(**wrong)


async def test_starts_that_cannot_be() -> None:
    """Too many sequences, tokens or stop tokens are refused, and nothing is changed; a second start
    is fine.
    """
    async with opened([PROMPT], "often", k=2, rounds=4, room=60) as (stream, _):
        with pytest.raises(ArgumentError, match="batch"):
            await stream.start([begin(3), begin(3)])
        with pytest.raises(ArgumentError, match="capacity"):
            await stream.start([begin(60)])
        with pytest.raises(ArgumentError, match="capacity"):
            await stream.start([begin(-1)])
        with pytest.raises(ArgumentError, match="stop"):
            await stream.start([begin(3)], range(9))
        with pytest.raises(ArgumentError, match="temperature"):
            await stream.start([SequenceStart(PROMPT, FIRST, 20, choice=Choice(1.0))])
        await stream.start([begin(30)])
        await collect(stream.tokens(), [])
        await stream.start([begin(3)])
        assert [token async for token in stream.tokens()] == expected(3)


async def test_nothing_to_make() -> None:
    """A capacity that is reached already gives no token."""
    async with opened([PROMPT], "often", k=2, rounds=4, room=60) as (stream, target):
        await stream.start([begin(0)])
        assert [token async for token in stream.tokens()] == []
        assert target.passes == 0


async def test_closed_right_after_a_start() -> None:
    """Memory is freed behind what the start enqueued, and behind what was on the stream before."""
    async with opened([PROMPT], "often", k=2, rounds=4, room=60) as (stream, target):
        gate = Gate()
        await stream.start([begin(20)])
        enqueue(stream.stream, "gate", gate.wait)
        starting = asyncio.create_task(stream.start([begin(30)]))
        await gate.reached.wait()
        starting.cancel()
        closing = asyncio.create_task(stream.close())
        for _ in range(3):
            await asyncio.sleep(0)
        assert not closing.done()
        gate.open()
        await closing
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert target.passes == 0
