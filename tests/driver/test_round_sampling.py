"""Sampling and rejection on every device: the numbers, the choices, and the distributions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from hsswap.driver.round_operations import NO_TOKEN
from hsswap.driver.sampling_operations import Purpose, RejectWork, SampleWork, Sampling
from hsswap.errors import ArgumentError
from tests.driver.rig import Rig
from tests.driver.sampling_oracle import distribution, philox, scores

F32 = NDArray[np.float32]


@dataclass(frozen=True)
class Choice:
    """How one sequence chooses."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: tuple[int, int] = (7, 9)

    def distribution(self, logits: F32) -> NDArray[np.float64]:
        """Of one row."""
        row = logits.astype(np.float64).tolist()
        return distribution(row, self.temperature, self.top_k, self.top_p, self.min_p)


def sampling(rig: Rig, choices: list[Choice]) -> Sampling:
    """On the device."""
    return Sampling(
        rig.tensor(np.array([c.temperature for c in choices], np.float32)),
        rig.tensor(np.array([c.top_k for c in choices], np.uint32)),
        rig.tensor(np.array([c.top_p for c in choices], np.float32)),
        rig.tensor(np.array([c.min_p for c in choices], np.float32)),
        rig.tensor(np.array([c.seed for c in choices], np.uint32)),
    )


def test_philox_is_philox() -> None:
    """Known answers of the Random123 distribution."""
    full = 0xFFFFFFFF
    assert philox([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox([full] * 4, [full] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    digits = [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]
    assert philox(pi, [0xA4093822, 0x299F31D0]) == digits


CHOICES = [
    Choice(),
    Choice(temperature=0.0),
    Choice(temperature=0.3, seed=(0xFFFFFFFF, 1)),
    Choice(top_k=3),
    Choice(top_k=1),
    Choice(top_p=0.6),
    Choice(top_p=1e-9),
    Choice(min_p=0.2),
    Choice(temperature=1.7, top_k=20, top_p=0.8, min_p=0.05, seed=(3, 0x80000000)),
]


@pytest.mark.parametrize("vocab", [1, 5, 130, 1000])
def test_choices_and_distributions(rig: Rig, vocab: int) -> None:
    """Each row's token wins the race of float64, and its weights are the oracle's."""
    rng = np.random.default_rng(vocab)
    rows = 3
    logits = (rng.standard_normal((len(CHOICES), rows, vocab)) * 2).astype(np.float32)
    logits[0, 1] = np.round(logits[0, 1])  # ties, which filters keep or drop together
    logits[3, 1] = np.round(logits[3, 1])
    logits[5, 1] = 0.5
    logits[1, 2] = np.nan
    logits[2, 2, : vocab - 1] = np.nan
    logits[4, 2, vocab // 2] = np.inf
    logits[6, 2] = -np.inf
    position = np.arange(100, 100 + len(CHOICES)).astype(np.int32)
    shape = (len(CHOICES), rows)
    tokens = rig.tensor(np.full(shape, 77, np.uint32))
    probabilities = rig.tensor(np.full(shape, np.nan, np.float32))
    weights = rig.tensor(np.full(logits.shape, np.nan, np.float32))
    work = SampleWork(
        *(rig.tensor(logits), sampling(rig, CHOICES), rig.tensor(position), 2, Purpose.DRAFT),
        *(tokens, probabilities, weights),
    )
    rig.device.round_kernels().sample(rig.stream, work)
    rig.stream.synchronize()
    for s, choice in enumerate(CHOICES):
        for r in range(rows):
            p = choice.distribution(logits[s, r])
            assert weights.array()[s, r] == pytest.approx(p, rel=1e-4, abs=1e-7)
            token = int(tokens.array()[s, r])
            if not p.any():
                assert (token, probabilities.array()[s, r]) == (NO_TOKEN, 0)
                continue
            race = scores(p, 102 + s + r, Purpose.DRAFT, choice.seed)
            assert race[token] >= race.max() - 1e-4
            assert probabilities.array()[s, r] == pytest.approx(p[token], rel=1e-4)


def chi_square(counts: NDArray[np.int64], p: NDArray[np.float64]) -> float:
    """The statistic over its degrees of freedom, in standard deviations above the mean."""
    expected = p * counts.sum()
    assert expected[p > 0].min() > 5
    assert not counts[p == 0].any()
    freedom = int((p > 0).sum()) - 1
    statistic = float(((counts - expected)[p > 0] ** 2 / expected[p > 0]).sum())
    return (statistic - freedom) / float(np.sqrt(2 * freedom))


def test_tokens_have_the_targets_distribution(rig: Rig) -> None:
    """Chi-square over 4,096 positions. The seeds are fixed: it cannot fail by chance."""
    rng = np.random.default_rng(1)
    row = rng.standard_normal(12).astype(np.float32)
    choices = [Choice(temperature=0.8), Choice(temperature=1.5, top_k=8, top_p=0.9, seed=(1, 2))]
    logits = np.broadcast_to(row, (2, 2048, 12)).copy()
    tokens = rig.tensor(np.zeros((2, 2048), np.uint32))
    position = rig.tensor(np.zeros(2, np.int32))
    rig.device.round_kernels().sample(
        rig.stream,
        SampleWork(rig.tensor(logits), sampling(rig, choices), position, 1, Purpose.TARGET, tokens),
    )
    rig.stream.synchronize()
    for s, choice in enumerate(choices):
        counts = np.bincount(tokens.array()[s], minlength=12)
        assert abs(chi_square(counts, choice.distribution(row))) < 4


@pytest.mark.parametrize("certain", [False, True])
def test_accepted_and_rejected_drafts_have_the_targets_distribution(
    rig: Rig, certain: bool
) -> None:
    """Drafts from another distribution (or always one token), then rejection: the target's stays.

    Rows are independent draws here: each has its own position, and drafts in every row.
    """
    rng = np.random.default_rng(2)
    count, vocab = 2048, 10
    row = rng.standard_normal(vocab).astype(np.float32)
    choice = Choice(temperature=0.9, top_p=0.95, seed=(11, 12))
    p = choice.distribution(row)
    q = distribution(rng.standard_normal(vocab).tolist(), 1.0, 0, 1.0, 0.0)
    drafts = np.full(count, 3) if certain else rng.choice(vocab, count, p=q)
    vtok = np.concatenate([[0], drafts]).astype(np.uint32)[None]
    logits = np.broadcast_to(row, (1, count + 1, vocab)).copy()
    preds = rig.tensor(np.full((1, count + 1), 77, np.uint32))
    given = np.broadcast_to(q.astype(np.float32), (1, count, vocab)).copy()
    rig.device.round_kernels().reject(
        rig.stream,
        RejectWork(
            *(rig.tensor(logits), sampling(rig, [choice]), rig.tensor(np.zeros(1, np.int32))),
            *(rig.tensor(vtok), rig.tensor(np.array([[count, 1]], np.uint32)), preds),
            None if certain else rig.tensor(given),
        ),
    )
    rig.stream.synchronize()
    chosen = preds.array()[0]
    counts = np.bincount(chosen[:-1], minlength=vocab)
    assert abs(chi_square(counts, p)) < 4
    stand = float((chosen[:-1] == drafts).mean())
    most = p[3] if certain else np.minimum(p, q).sum()  # the best that any scheme can do
    assert stand == pytest.approx(most, abs=0.03)


def check_rejection(rig: Rig, seed: int) -> None:
    """A random batch, every choice against the oracle."""
    rng = np.random.default_rng(seed)
    k, vocab, batch = int(rng.integers(1, 5)), int(rng.integers(2, 9)), len(CHOICES)
    logits = (rng.standard_normal((batch, k + 1, vocab)) * 2).astype(np.float32)
    logits[rng.random((batch, k + 1)) < 0.05] = np.nan
    q = rng.dirichlet(np.ones(vocab), (batch, k)).astype(np.float32)
    vtok = rng.integers(0, vocab, (batch, k + 1)).astype(np.uint32)
    brk = np.stack([rng.integers(0, k + 1, batch), rng.integers(0, 2, batch)], 1).astype(np.uint32)
    position = rng.integers(0, 1 << 20, batch).astype(np.int32)
    preds = rig.tensor(np.full((batch, k + 1), 77, np.uint32))
    rig.device.round_kernels().reject(
        rig.stream,
        RejectWork(
            *(rig.tensor(logits), sampling(rig, CHOICES), rig.tensor(position)),
            *(rig.tensor(vtok), rig.tensor(brk), preds, rig.tensor(q)),
        ),
    )
    rig.stream.synchronize()
    for s, choice in enumerate(CHOICES):
        used, base = brk[s].tolist()
        for r in range(used + base):
            p, index = choice.distribution(logits[s, r]), int(position[s]) + r + 1
            chosen = int(preds.array()[s, r])
            j = r + 1 - base
            if not p.any():
                assert chosen == NO_TOKEN
                continue
            if j >= used:
                race = scores(p, index, Purpose.TARGET, choice.seed)
                assert race[chosen] >= race.max() - 1e-4
                continue
            draft = int(vtok[s, r + 1])
            word = philox((index, 0, Purpose.ACCEPT, 0), choice.seed)[0]
            margin = p[draft] - (word + 0.5) / 2**32 * q[s, j, draft]
            if margin > 1e-5:
                assert chosen == draft
            elif margin < -1e-5:
                rest = np.maximum(p - q[s, j], 0)
                race = scores(rest, index, Purpose.RESIDUAL, choice.seed)
                assert race[chosen] >= race.max() - 1e-3


@pytest.mark.parametrize("seed", range(12))
def test_rejection(rig: Rig, seed: int) -> None:
    """Every kind of choice, drafts used or not, with and without a pending token."""
    check_rejection(rig, seed)


@pytest.mark.soak
def test_much_rejection(rig: Rig) -> None:
    """The same, many times."""
    for seed in range(12, 500):
        check_rejection(rig, seed)


def test_refused(rig: Rig) -> None:
    """Shapes that do not go together."""
    logits = rig.tensor(np.zeros((2, 3, 4), np.float32))
    how = sampling(rig, [Choice()] * 2)
    position = rig.tensor(np.zeros(2, np.int32))
    tokens, wrong = rig.tensor(np.zeros((2, 3), np.uint32)), rig.tensor(np.zeros((2, 2), np.uint32))
    kernels = rig.device.round_kernels()
    with pytest.raises(ArgumentError, match="tokens"):
        kernels.sample(rig.stream, SampleWork(logits, how, position, 0, Purpose.TARGET, wrong))
    one = sampling(rig, [Choice()])
    with pytest.raises(ArgumentError, match="temperature"):
        kernels.sample(rig.stream, SampleWork(logits, one, position, 0, Purpose.TARGET, tokens))
    with pytest.raises(ArgumentError, match="vtok"):
        kernels.reject(rig.stream, RejectWork(logits, how, position, wrong, wrong, tokens))
