"""The grid of K, M, p-min and stop tokens on a device that the host does not look into: hundreds of
seeds as one batch. The stream equals plain greedy for every drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest

from hsswap.driver import open_device
from hsswap.rounds import Drafter, End, NgramDrafter, RoundOptions, RoundStream, SequenceStart
from tests.rounds.models import greedy

torch = pytest.importorskip("torch")

from tests.rounds.torch_models import Place, TorchGuess, TorchTable  # noqa: E402  (imports torch)

VOCAB, LONGEST = 7, 48
DRAFTERS = ("perfect", "adversarial", "random", "often", "short", "ngram")
OPTIONS = (
    RoundOptions(),
    RoundOptions(p_min=0.5),
    RoundOptions(p_min=0.7, p_min_first=True),
    RoundOptions(adapt_from=1),
    RoundOptions(p_min=0.4, adapt_from=2),
)
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


async def check(
    where: str,
    seeds: Sequence[Seeds],
    ks: Sequence[int],
    ms: Sequence[int],
    options: Sequence[RoundOptions],
    drafters: Sequence[str],
) -> int:
    """Every combination; how many there were."""
    place, done = Place(where), 0
    count = len(seeds[0].starts)
    with ExitStack() as opened:
        device = opened.enter_context(open_device("host" if where == "cpu" else where))
        handle = None if place.torch_stream is None else place.torch_stream.cuda_stream
        stream = opened.enter_context(device.stream(handle))
        for k in ks:
            target = TorchTable(device, place, k, count, vocab=VOCAB, room=LONGEST)
            opened.enter_context(target)
            for m, chosen, kind in product(ms, options, drafters):
                drafter: Drafter = NgramDrafter(device)
                if kind != "ngram":
                    drafter = TorchGuess(place, kind, VOCAB, seed=k * m)
                async with RoundStream(
                    *(device, target, drafter),
                    k=k,
                    rounds=m,
                    batch=count,
                    history_tokens=LONGEST + 1,
                    options=replace(chosen, captured=where != "cpu"),
                    stream=stream,
                ) as rounds:
                    for each in seeds:
                        target.hold_tokens(stream, [list(s.tokens) for s in each.starts])
                        await rounds.start(each.starts, each.stops)
                        await compare(rounds, each, f"{kind}, K {k}, M {m}, {chosen}")
                        done += 1
    return done


async def compare(rounds: RoundStream, seeds: Seeds, what: str) -> None:
    """One run of a batch."""
    made: list[list[int]] = [[] for _ in seeds.starts]
    ended: list[End | None] = []
    async for burst in rounds.bursts():
        assert not any(burst.errors), what
        ended = burst.ended
        for mine, tokens in zip(made, burst.tokens, strict=True):
            mine += tokens
    wrong = [s for s, (a, b) in enumerate(zip(made, seeds.wanted, strict=True)) if a != b]
    assert wrong == [], f"{what}: {len(wrong)} sequences, the first: {made[wrong[0]]}"
    for end, tokens in zip(ended, seeds.wanted, strict=True):
        assert end == (End.STOPPED if tokens[-1] in seeds.stops else End.LENGTH), what
    assert rounds.acceptance.tokens == sum(map(len, made))


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def where(request: pytest.FixtureRequest) -> str:
    """Where torch works: beside the host device, or on a GPU."""
    return str(request.param)


@pytest.mark.parametrize("drafter", DRAFTERS)
async def test_a_part_of_the_grid(where: str, drafter: str) -> None:
    """Corners of it, every drafter, a few seeds."""
    seeds = [Seeds.of(9, stops) for stops in STOPS]
    for k, m, options in ((1, 8, OPTIONS[3]), (3, 1, OPTIONS[2]), (8, 4, OPTIONS[4])):
        assert await check(where, seeds, [k], [m], [options], [drafter]) == len(STOPS)


@pytest.mark.gpu
@pytest.mark.soak
@pytest.mark.parametrize("drafter", DRAFTERS)
async def test_the_whole_grid_on_a_gpu(drafter: str) -> None:
    """500 seeds for every combination of K, M, p-min and stop tokens."""
    seeds = [Seeds.of(500, stops) for stops in STOPS]
    done = await check("cuda:0", seeds, (1, 2, 3, 5, 8), (1, 2, 4, 8), OPTIONS, [drafter])
    assert done == 5 * 4 * len(OPTIONS) * len(STOPS)
