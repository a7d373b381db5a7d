"""A round stream gives what plain greedy decoding gives, whoever drafts and however many rounds."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

import numpy as np
import pytest

from hsswap.driver.host import HostDevice
from hsswap.errors import DeviceError
from hsswap.rounds import End, RoundOptions, SequenceStart
from hsswap.rounds.buffers import StreamBufs
from hsswap.rounds.round import Rounds
from tests.rounds.models import (
    DRAFTERS,
    OPTIONS,
    GuessDrafter,
    TableTarget,
    enqueue,
    greedy,
    guesses,
)
from tests.rounds.opened import VOCAB, opened


async def decode(
    prompts: list[list[int]],
    counts: list[int],
    drafter: str,
    *,
    k: int,
    rounds: int,
    options: RoundOptions,
    stops: Sequence[int] = (),
    with_pending: bool = True,
    seed: int = 0,
) -> list[list[int]]:
    """All tokens of each sequence, with the invariants of every burst checked on the way."""
    room = max(len(p) + c for p, c in zip(prompts, counts, strict=True))
    async with opened(
        prompts, drafter, k=k, rounds=rounds, room=room, options=options, seed=seed
    ) as (stream, target):
        first = [greedy(prompt, 1, VOCAB)[0] for prompt in prompts]
        await stream.start(
            [
                SequenceStart(
                    prompt, token if with_pending else None, len(prompt) + count, last_pred=token
                )
                for prompt, token, count in zip(prompts, first, counts, strict=True)
            ],
            stops,
        )
        made: list[list[int]] = [[] for _ in prompts]
        async for burst in stream.bursts():
            assert 1 <= burst.rounds <= rounds
            assert burst.errors == [None] * len(prompts)
            for s, tokens in enumerate(burst.tokens):
                made[s] += tokens
                assert len(tokens) <= burst.rounds * (k + 1)
                if burst.ended[s] is None:
                    assert len(tokens) >= burst.rounds
                base_tokens = len(made[s]) - (0 if with_pending else 1)
                assert stream.positions[s] == len(prompts[s]) + base_tokens
        acceptance = stream.acceptance
        assert acceptance.tokens == sum(map(len, made))
        assert acceptance.accepted <= acceptance.drafted <= acceptance.rounds * k
        assert target.settled[-1] == stream.positions
    return [[f, *m] for f, m in zip(first, made, strict=True)] if with_pending else made


async def check(seed: int, k: int, rounds: int, drafter: str, options: RoundOptions) -> None:
    """One random batch."""
    rng = np.random.default_rng(seed)
    batch = int(rng.integers(1, 4))
    prompts = [rng.integers(0, VOCAB, int(rng.integers(1, 9))).tolist() for _ in range(batch)]
    counts = rng.integers(1, 40, batch).tolist()
    stops = rng.choice(VOCAB, int(rng.integers(0, 3)), replace=False).tolist()
    with_pending = bool(rng.random() < 0.7)
    made = await decode(
        prompts,
        counts,
        drafter,
        k=k,
        rounds=rounds,
        options=options,
        stops=stops,
        with_pending=with_pending,
        seed=seed,
    )
    for prompt, count, tokens in zip(prompts, counts, made, strict=True):
        expected = greedy(prompt, count + 1, VOCAB, stops)
        # A pending token that is a stop token is its owner's to see: he would not go on.
        if with_pending and expected[-1] in stops and len(expected) == 1:
            continue
        assert tokens == expected


GRID = list(itertools.product((1, 2, 3, 5, 8), (1, 2, 4, 8)))


@pytest.mark.parametrize("drafter", DRAFTERS)
async def test_stream_equals_greedy(drafter: str) -> None:
    """A corner of the grid, every drafter."""
    for seed, (k, rounds) in enumerate(((1, 1), (1, 8), (3, 2), (8, 4), (5, 8))):
        options = OPTIONS[seed % len(OPTIONS)]
        await check(seed, k, rounds, drafter, options)


@pytest.mark.soak
@pytest.mark.parametrize("drafter", DRAFTERS)
async def test_whole_grid(drafter: str) -> None:
    """500 seeds over all K, M and options."""
    for seed in range(500):
        k, rounds = GRID[seed % len(GRID)]
        await check(seed, k, rounds, drafter, OPTIONS[seed % len(OPTIONS)])


async def test_long_run() -> None:
    """600 tokens of four sequences."""
    prompts = [[1], [2, 2], [3, 4, 5], [6] * 9]
    made = await decode(prompts, [600] * 4, "often", k=4, rounds=4, options=RoundOptions())
    assert made == [greedy(prompt, 601, VOCAB) for prompt in prompts]


async def test_a_perfect_drafter_takes_fewest_rounds() -> None:
    """K + 1 tokens a round, and bursts that shrink to what is left."""
    async with opened([[1, 2]], "perfect", k=3, rounds=4, room=50) as (stream, target):
        await stream.start([SequenceStart([1, 2], greedy([1, 2], 1, VOCAB)[0], 2 + 41)])
        tokens = [token async for token in stream.tokens()]
        assert tokens == greedy([1, 2], 42, VOCAB)[1:]
        assert stream.acceptance.rounds == 11  # ten of four tokens, one of what is left
        assert stream.acceptance.accepted == 30
        assert max(map(max, target.admitted)) == 43  # never more room than the capacity


@pytest.mark.parametrize("stops", [False, True])
async def test_rounds_behind_the_end_are_passed_over(stops: bool) -> None:
    """Whatever was issued ahead: behind a stop token or the capacity the target has no pass."""
    tokens = greedy([1, 2], 41, VOCAB)
    last = max(map(tokens.index, tokens)) if stops else 40
    assert last > 2  # behind the first burst, which is no graph
    async with opened([[1, 2]], "adversarial", k=2, rounds=2, room=99) as (stream, target):
        capacity = 2 + (90 if stops else last)
        await stream.start([SequenceStart([1, 2], tokens[0], capacity)], tokens[last:][:stops])
        assert [token async for token in stream.tokens()] == tokens[1 : last + 1]
        assert stream.acceptance.rounds == target.passes == last


async def test_a_device_that_passes_nothing_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so, and makes the same tokens."""

    def refuse(*_: object, **__: object) -> None:
        raise DeviceError("no conditional nodes here")

    monkeypatch.setattr(HostDevice, "skipping", refuse)
    async with opened([[1, 2]], "often", k=2, rounds=3, room=99) as (stream, target):
        tokens = greedy([1, 2], 41, VOCAB)
        await stream.start([SequenceStart([1, 2], tokens[0], 42)])
        assert [token async for token in stream.tokens()] == tokens[1:]
        assert target.issued == 1 + 1
        assert stream.why_all_run == "no conditional nodes here"


async def test_depth_follows_acceptance() -> None:
    """Drafts that are never right are soon fewer; right ones are all verified."""
    for drafter, depth in (("adversarial", 2), ("perfect", 6)):
        options = RoundOptions(adapt_from=2)
        async with opened([[1]], drafter, k=6, rounds=4, room=99, options=options) as (stream, _):
            await stream.start([SequenceStart([1], greedy([1], 1, VOCAB)[0], 85)])
            assert len([token async for token in stream.tokens()]) == 84
            done = stream.acceptance
            whole = 6 + (done.rounds - 1) * depth
            assert whole - 2 * depth <= done.drafted <= whole  # the last rounds are cut


async def test_ends_are_told() -> None:
    """A stop token, the capacity, and a sequence that goes on meanwhile."""
    prompts = [[1], [2]]
    stop = greedy([1], 9, VOCAB)[-1]
    lengths = [len(greedy(p, 30, VOCAB, [stop])) for p in prompts]
    async with opened(prompts, "often", k=2, rounds=2, room=40) as (stream, _):
        firsts = [greedy(p, 1, VOCAB)[0] for p in prompts]
        await stream.start(
            [SequenceStart(p, f, 30) for p, f in zip(prompts, firsts, strict=True)], [stop]
        )
        ended: list[End | None] = []
        async for burst in stream.bursts():
            ended = burst.ended
        expected = [End.STOPPED if n < 30 else End.LENGTH for n in lengths]
        assert ended == expected


async def test_rounds_are_captured_once() -> None:
    """The first burst is an eager round, all others launch a graph; lengths that moved make both
    anew.
    """
    async with opened([[1]], "often", k=2, rounds=3, room=99) as (stream, target):
        await stream.start([SequenceStart([1], greedy([1], 1, VOCAB)[0], 91)])
        made = []
        async for burst in stream.bursts():
            made += burst.tokens[0]
        assert made == greedy([1], 91, VOCAB)[1:]
        assert target.issued == 1 + 1
        assert target.passes > 20
        assert target.length_addresses is not None
        target.length_addresses = target.length_addresses.copy()
        target.hold_tokens([[1]])
        await stream.start([SequenceStart([1], greedy([1], 1, VOCAB)[0], 41)])
        assert [token async for token in stream.tokens()] == greedy([1], 41, VOCAB)[1:]
        assert target.issued == 2 + 1


def test_a_round_made_anew_leaves_the_old_one_to_the_stream() -> None:
    """What is enqueued reads the old table of lengths when it runs, perhaps later."""
    gate = threading.Event()
    with (
        HostDevice() as device,
        TableTarget(device, 2, [[1]], vocab=VOCAB, room=20) as target,
        StreamBufs(device, 2, 1, history_tokens=21) as bufs,
        device.stream() as stream,
    ):
        drafter = GuessDrafter(guesses(VOCAB, 0)["often"], 0)
        with Rounds(device, bufs, target, drafter, RoundOptions()) as rounds:
            enqueue(stream, "gate", lambda: require(gate.wait(60)))
            rounds.reset(stream)
            held = device.live_count
            assert target.length_addresses is not None
            target.length_addresses = target.length_addresses.copy()
            rounds.reset(stream)
            assert device.live_count == held + 1
            gate.set()
            stream.synchronize()
            target.length_addresses = target.length_addresses.copy()
            rounds.reset(stream)  # the first one is gone, the second waits for its turn
            assert device.live_count == held + 1
            stream.synchronize()


def require(ok: bool) -> None:
    """An assertion as an expression."""
    assert ok
