"""Sampled streams: the same tokens for a seed whatever drafts, K and M, and the right ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from hsswap.driver.base import Closeable, Device, Stream
from hsswap.driver.host import HostDevice
from hsswap.driver.sampling_operations import Purpose
from hsswap.driver.tensor import Tensor, tensor_in
from hsswap.errors import ArgumentError
from hsswap.rounds import (
    Choice,
    Choosing,
    Drafter,
    NgramDrafter,
    RoundOptions,
    RoundStream,
    SequenceStart,
    StreamBufs,
)
from tests.driver.sampling_oracle import distribution, scores
from tests.rounds.models import TableTarget, enqueue, logits_after
from tests.rounds.opened import VOCAB, opened

CHOICES = [
    Choice(temperature=1.2, seed=5),
    Choice(temperature=2.0, top_k=4, top_p=0.9, seed=(1 << 40) + 3),
    Choice(),
]
PROMPTS = [[1, 2], [3], [4, 5, 6]]
COUNT = 40


def sampled(prompt: Sequence[int], count: int, choice: Choice) -> list[int]:
    """Plain sampling, a token at a time, by the oracle."""
    tokens = list(prompt)
    key = (choice.seed & 0xFFFFFFFF, choice.seed >> 32)
    for _ in range(count):
        row = logits_after(tokens, VOCAB).astype(float).tolist()
        p = distribution(row, choice.temperature, choice.top_k, choice.top_p, choice.min_p)
        tokens.append(int(np.argmax(scores(p, len(tokens), Purpose.TARGET, key))))
    return tokens[len(prompt) :]


async def stream_of(drafter: str | Drafter, k: int, rounds: int) -> list[list[int]]:
    """The tokens of every sequence behind its first."""
    firsts = [sampled(p, 1, c)[0] for p, c in zip(PROMPTS, CHOICES, strict=True)]
    options = RoundOptions(choosing=Choosing.SAMPLE)
    made: list[list[int]] = [[f] for f in firsts]
    async with opened(PROMPTS, drafter, k=k, rounds=rounds, room=60, options=options) as (
        stream,
        _,
    ):
        await stream.start(
            [
                SequenceStart(p, f, len(p) + COUNT, choice=c)
                for p, f, c in zip(PROMPTS, firsts, CHOICES, strict=True)
            ]
        )
        async for burst in stream.bursts():
            for mine, tokens in zip(made, burst.tokens, strict=True):
                mine += tokens
    return made


async def test_a_seed_gives_its_tokens() -> None:
    """Those of plain sampling, for any K, M and drafter; a sequence at temperature 0 is greedy."""
    expected = [sampled(p, COUNT + 1, c) for p, c in zip(PROMPTS, CHOICES, strict=True)]
    for drafter, k, rounds in (("perfect", 4, 3), ("random", 1, 1), ("ngram", 8, 2)):
        assert await stream_of(drafter, k, rounds) == expected


class DrawingDrafter(Drafter, Closeable):
    """Draws from a fixed distribution, with numbers of its own."""

    def __init__(self, device: Device, k: int, vocab: int) -> None:
        rng = np.random.default_rng(3)
        self.q = rng.dirichlet(np.ones(vocab)).astype(np.float32)
        self._rng = rng
        self._buffer = device.allocate_host(4 * k * vocab)
        self._all = tensor_in(self._buffer, "f32", (1, k, vocab))
        self._all.array()[...] = self.q

    def draft(self, stream: Stream, bufs: StreamBufs) -> None:
        """See :class:`Drafter`."""

        def draw() -> None:
            words = bufs.drafts.array()
            q = self.q.astype(float)
            words[0, ::2] = self._rng.choice(len(q), bufs.k, p=q / q.sum())
            words[0, 1::2] = np.float32(1).view(np.uint32)

        enqueue(stream, "draw", draw)

    def distribution(self) -> Tensor:
        """See :class:`Drafter`."""
        return self._all

    def close(self) -> None:
        """Free the memory."""
        self._buffer.close()


@pytest.mark.parametrize("draws", [False, True])
async def test_rejection_keeps_the_distribution(draws: bool) -> None:
    """Chi-square over a stream whose target always says the same. The seeds are fixed."""
    count, k, choice = 900, 3, Choice(temperature=1.5, top_p=0.97, seed=21)
    options = RoundOptions(choosing=Choosing.REJECT)
    row = logits_after([1, 2, 3], VOCAB)
    p = distribution(row.astype(float).tolist(), 1.5, 0, 0.97, 0.0)
    with HostDevice() as device, DrawingDrafter(device, k, VOCAB) as drawing:
        drafter = drawing if draws else NgramDrafter(device)
        with TableTarget(device, k, [[1]], vocab=VOCAB, room=count + 1) as target:
            target.always = row
            async with RoundStream(
                *(device, target, drafter),
                k=k,
                rounds=8,
                history_tokens=count + 2,
                options=options,
            ) as stream:
                await stream.start([SequenceStart([1], 2, count + 1, choice=choice)])
                tokens = [token async for token in stream.tokens()]
                drafted, accepted = stream.acceptance.drafted, stream.acceptance.accepted
    counts = np.bincount(tokens, minlength=VOCAB)
    expected = p * count
    assert expected[p > 0].min() > 5
    assert not counts[p == 0].any()
    freedom = int((p > 0).sum()) - 1
    statistic = float(((counts - expected)[p > 0] ** 2 / expected[p > 0]).sum())
    assert statistic < freedom + 4 * np.sqrt(2 * freedom)
    if draws:  # a draft stands with the overlap of the two, behind another that stood
        overlap = float(np.minimum(p, drawing.q).sum())
        most = overlap + overlap**2 + overlap**3
        assert accepted / drafted == pytest.approx(most / 3, abs=0.06)


def test_choices_that_mean_nothing() -> None:
    """Refused when they are made."""
    for wrong in (
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"min_p": 1.5},
        {"seed": 1 << 64},
    ):
        with pytest.raises(ArgumentError):
            Choice(**wrong)
