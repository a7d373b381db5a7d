"""The grid of K, M, p-min and stop tokens on a device that the host does not look into: hundreds of
seeds as one batch. The stream equals plain greedy for every drafter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest

from hsswap.driver import open_device
from hsswap.driver.base import Device
from hsswap.rounds import Choosing, End, RoundOptions, RoundStream, SequenceStart, Stream
from tests.rounds.models import DRAFTERS, OPTIONS, greedy
from tests.rounds.test_sampling import CHOICES, COUNT, PROMPTS, sampled
from tests.soaking import note

torch = pytest.importorskip("torch")

from tests.rounds.torch_models import Place, TorchGuess, TorchTable  # noqa: E402  (imports torch)

VOCAB, LONGEST = 7, 48
STOPS: tuple[tuple[int, ...], ...] = ((), (3,), (5, 0))


@dataclass(frozen=True)
class Seeds:
    """Random starts and what plain decoding makes of them: a batch for the whole grid."""

    starts: list[SequenceStart]
    wanted: list[list[int]]
    stops: tuple[int, ...]

    @classmethod
    def of(cls, count: int, stops: tuple[int, ...]) -> Seeds:
        """``count`` of them, one in four without a pending token."""
        rng = np.random.default_rng(len(stops))
        starts: list[SequenceStart] = []
        wanted: list[list[int]] = []
        while len(starts) < count:
            prompt = rng.integers(0, VOCAB, int(rng.integers(1, 9))).tolist()
            tokens = greedy(prompt, int(rng.integers(2, LONGEST - 8)), VOCAB, stops)
            with_pending = bool(rng.random() < 0.75) and len(tokens) > 1
            end = len(prompt) + len(tokens) - 1
            if stops and tokens[-1] in stops:
                end += int(rng.integers(0, 3))  # there is room behind the stop token, or not
            pending = tokens[0] if with_pending else None
            starts.append(SequenceStart(prompt, pending, end, last_pred=tokens[0]))
            wanted.append(tokens[1:] if with_pending else tokens)
        return cls(starts, wanted, stops)


@dataclass(frozen=True)
class Done:
    """How much was compared."""

    combinations: int
    sequences: int
    tokens: int


def table_on(
    place: Place, opened: ExitStack, k: int, batch: int
) -> tuple[Device, Stream, TorchTable]:
    """The table's target with a device and a stream of its own, closed with ``opened``."""
    device = opened.enter_context(open_device("host" if place.name == "cpu" else place.name))
    handle = None if place.torch_stream is None else place.torch_stream.cuda_stream
    stream = opened.enter_context(device.stream(handle))
    target = TorchTable(device, place, k, batch, vocab=VOCAB, room=LONGEST)
    opened.enter_context(target)
    return device, stream, target


async def check(
    where: str,
    seeds: Sequence[Seeds],
    k: int,
    m: int,
    options: Sequence[RoundOptions],
    drafters: Sequence[str],
) -> Done:
    """Every option and stop list, in one batch every drafter with every seed."""
    place, each = Place(where), len(seeds[0].starts)
    batch, runs, tokens = each * len(drafters), 0, 0
    kinds = [kind for kind in drafters for _ in range(each)]
    with ExitStack() as opened:
        device, stream, target = table_on(place, opened, k, batch)
        for chosen in options:
            async with RoundStream(
                *(device, target, TorchGuess(device, place, kinds, VOCAB, seed=k * m)),
                k=k,
                rounds=m,
                batch=batch,
                history_tokens=LONGEST + 1,
                stops=max(len(some.stops) for some in seeds),
                options=replace(chosen, captured=where != "cpu"),
                stream=stream,
            ) as rounds:
                for some in seeds:
                    starts = some.starts * len(drafters)
                    target.hold_tokens(stream, [list(s.tokens) for s in starts])
                    await rounds.start(starts, some.stops)
                    tokens += await compare(rounds, some, kinds, f"K {k}, M {m}, {chosen}")
                    runs += 1
    return Done(runs * len(drafters), runs * batch, tokens)


async def compare(rounds: RoundStream, seeds: Seeds, kinds: Sequence[str], what: str) -> int:
    """One run of a batch, whose sequences are the seeds for one kind of drafter, for the next, ...;
    the tokens there were.
    """
    wanted = seeds.wanted * (len(kinds) // len(seeds.wanted))
    made: list[list[int]] = [[] for _ in wanted]
    ended: list[End | None] = []
    async for burst in rounds.bursts():
        assert not any(burst.errors), what
        ended = burst.ended
        for mine, tokens in zip(made, burst.tokens, strict=True):
            mine += tokens
    wrong = [s for s, (a, b) in enumerate(zip(made, wanted, strict=True)) if a != b]
    assert wrong == [], (
        f"{what}: {len(wrong)} sequences, the first, {kinds[wrong[0]]}: {made[wrong[0]]}"
    )
    for end, tokens in zip(ended, wanted, strict=True):
        assert end == (End.STOPPED if tokens[-1] in seeds.stops else End.LENGTH), what
    total = sum(map(len, made))
    assert rounds.acceptance.tokens == total
    return total


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def where(request: pytest.FixtureRequest) -> str:
    """Where torch works: beside the host device, or on a GPU."""
    return str(request.param)


@pytest.mark.parametrize("drafter", DRAFTERS)
async def test_a_part_of_the_grid(where: str, drafter: str) -> None:
    """Corners of it, every drafter, a few seeds."""
    seeds = [Seeds.of(9, stops) for stops in STOPS]
    for k, m, options in ((1, 8, OPTIONS[3]), (3, 1, OPTIONS[2]), (8, 4, OPTIONS[4])):
        done = await check(where, seeds, k, m, [options], [drafter])
        assert done.combinations == len(STOPS)


@cache
def all_seeds() -> list[Seeds]:
    """500 for each list of stop tokens."""
    return [Seeds.of(500, stops) for stops in STOPS]


async def test_a_seed_gives_its_tokens(where: str) -> None:
    """Sampled: those of plain sampling, whatever K, M and drafter."""
    place = Place(where)
    wanted = [sampled(p, COUNT + 1, c) for p, c in zip(PROMPTS, CHOICES, strict=True)]
    starts = [
        SequenceStart(p, tokens[0], len(p) + COUNT, choice=c)
        for p, tokens, c in zip(PROMPTS, wanted, CHOICES, strict=True)
    ]
    for k, m in ((4, 3), (1, 1), (8, 2)):
        options = RoundOptions(choosing=Choosing.SAMPLE, captured=where != "cpu")
        kinds = ["perfect", "random", "ngram"]
        with ExitStack() as opened:
            device, stream, target = table_on(place, opened, k, len(kinds))
            async with RoundStream(
                *(device, target, TorchGuess(device, place, kinds, VOCAB, seed=k)),
                k=k,
                rounds=m,
                batch=len(kinds),
                history_tokens=LONGEST + 1,
                options=options,
                stream=stream,
            ) as rounds:
                target.hold_tokens(stream, PROMPTS)
                await rounds.start(starts)
                made = [tokens[:1] for tokens in wanted]
                async for burst in rounds.bursts():
                    for mine, tokens in zip(made, burst.tokens, strict=True):
                        mine += tokens
        assert made == wanted


@pytest.mark.soak
@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("m", [1, 2, 4, 8])
def test_the_whole_grid(where: str, k: int, m: int) -> None:
    """500 seeds for every combination of K, M, p-min, stop tokens and drafter."""
    # A GPU takes all drafters at once; the host a sequence at a time, also those that have ended.
    at_once = [(each,) for each in DRAFTERS] if where == "cpu" else [DRAFTERS]
    runs = [asyncio.run(check(where, all_seeds(), k, m, OPTIONS, drafters)) for drafters in at_once]
    combinations = sum(done.combinations for done in runs)
    assert combinations == len(OPTIONS) * len(STOPS) * len(DRAFTERS)
    sequences, tokens = (sum(done.sequences for done in runs), sum(done.tokens for done in runs))
    assert sequences == 500 * combinations
    case = {"combinations": combinations, "sequences": sequences, "tokens": tokens}
    note("rounds", **{f"{where}, K {k}, M {m}": case})
