"""The kernels of speculative rounds, one by one, against plain Python, on every device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hsswap.driver.round_operations import (
    NO_TOKEN,
    UNWRITTEN,
    AcceptWork,
    AdaptWork,
    AssembleWork,
    CommitWork,
    RollbackWork,
    RoundEndWork,
    RoundFlag,
    RoundRules,
    SeedWork,
)
from hsswap.driver.rounds_base import RoundKernels
from hsswap.driver.tensor import Tensor
from tests.driver import round_oracle as oracle
from tests.driver.rig import Rig

POISON = 0xDEAD
WIDTH = 5


def u32(values: object) -> NDArray[np.uint32]:
    """An array of words."""
    return np.asarray(values, np.uint32)


@dataclass
class Round:
    """The tensors of a batch and the records over them, before a round."""

    assemble: AssembleWork
    end: RoundEndWork
    counters: Tensor

    def words(self, tensor: Tensor) -> list[Any]:
        """A tensor as numbers."""
        numbers: list[Any] = tensor.array().tolist()
        return numbers


def make(
    rig: Rig,
    sequences: list[oracle.Sequence],
    drafts: list[list[tuple[int, float]]],
    preds: list[list[int]],
    last_pred: list[int],
    *,
    ring_words: int = 9,
    table: list[int] | None = None,
    capacity: list[int] | None = None,
    **options: Any,
) -> Round:
    """Everything a round needs on the device; what a kernel is to write is poisoned."""
    count, k = len(sequences), sequences[0].k
    stops = max((len(s.stops) for s in sequences), default=0) + 1
    ring = np.full((count, ring_words), POISON, np.uint32)
    stop_tokens = np.full((count, stops), NO_TOKEN, np.uint32)
    packed = np.zeros((count, 2 * k), np.uint32)
    for s, sequence in enumerate(sequences):
        ring[s, : 1 + len(sequence.ring)] = [len(sequence.ring), *sequence.ring]
        stop_tokens[s, : len(sequence.stops)] = list(sequence.stops)
        for j, (token, probability) in enumerate(drafts[s]):
            packed[s, 2 * j : 2 * j + 2] = token, np.float32(probability).view(np.uint32)
    tensor = rig.tensor
    flags = tensor(u32([s.flags for s in sequences]))
    rules = RoundRules(flags, tensor(stop_tokens), sequences[0].vocab)
    pend = tensor(u32([s.pend for s in sequences]))
    vtok = tensor(np.full((count, k + 1), POISON, np.uint32))
    brk = tensor(np.full((count, 2), POISON, np.uint32))
    acc = tensor(np.full((count, 2), POISON, np.uint32))
    pos_start = tensor(np.array([s.pos for s in sequences], np.int32))
    hidden = np.arange(count * (k + 1) * WIDTH, dtype=np.float32).reshape(count, k + 1, WIDTH)
    counters = tensor(np.full((count, 3), -7, np.int32))
    pointers = counters.address + np.arange(count * 3, dtype=np.int64).reshape(count, 3) * 4
    pointers[:, 1] = 0
    ring_tensor = tensor(ring)
    history = tensor(np.full((count, 8), POISON, np.uint32))
    return Round(
        AssembleWork(
            tensor(packed),
            pend,
            vtok,
            brk,
            rules,
            pos_start,
            token_map=None if table is None else tensor(u32(table)),
            capacity=None if capacity is None else tensor(np.array(capacity, np.int32)),
            **options,
        ),
        RoundEndWork(
            AcceptWork(
                *(tensor(u32(preds)), vtok, tensor(u32(last_pred)), brk, acc, rules, ring_tensor),
                tally=tensor(np.zeros((count, 3), np.uint32)),
            ),
            RollbackWork(tensor(pointers), pos_start, acc, brk),
            CommitWork(vtok, acc, brk, ring_tensor, pend, flags, pos_start, history),
            SeedWork(
                tensor(hidden),
                tensor(np.full((count, WIDTH), -1, np.float32)),
                *(acc, brk, tensor(np.full((count, WIDTH), np.nan, np.float32))),
            ),
            AdaptWork(acc, tensor(np.full((count, 1), POISON, np.uint32)), 2, k),
        ),
        counters,
    )


def run_apart(kernels: RoundKernels, rig: Rig, work: RoundEndWork) -> None:
    """The end of a round by its five kernels."""
    kernels.spec_accept_greedy_dc(rig.stream, work.accept)
    assert work.seed is not None
    assert work.adapt is not None
    kernels.spec_seed_gather(rig.stream, work.seed)
    kernels.spec_rollback_stream(rig.stream, work.rollback)
    kernels.spec_ring_commit(rig.stream, work.commit)
    kernels.spec_adapt_k(rig.stream, work.adapt)


def run(rig: Rig, works: Round, *, fused: bool) -> None:
    """Both halves of a round, and wait."""
    kernels = rig.device.round_kernels()
    kernels.spec_assemble_verify(rig.stream, works.assemble)
    if fused:
        kernels.spec_round_end(rig.stream, works.end)
    else:
        run_apart(kernels, rig, works.end)
    rig.stream.synchronize()


CASES: list[tuple[Any, ...]] = [
    # drafts, probabilities, p_min, p_min_first, table, pend, last_pred, preds: vtok, brk, acc, ring
    ([10, 11, 12], [0.9] * 3, 0, False, None, 5, 0, [10, 11, 12, 13],
     [5, 10, 11, 12], [3, 1], [3, 13], [70, 71, 10, 11, 12, 13]),
    ([10, 11, 12], [0.9] * 3, 0, False, None, 5, 0, [10, 44, 12, 13],
     [5, 10, 11, 12], [3, 1], [1, 44], [70, 71, 10, 44]),
    ([10, 11, 12], [0.9, 0.1, 0.9], 0.5, False, None, 5, 0, [10, 11, 12, 13],
     [5, 10, 0, 0], [1, 1], [1, 11], [70, 71, 10, 11]),
    ([10, 11, 12], [0.1, 0.9, 0.9], 0.5, False, None, 5, 0, [10, 11, 12, 13],
     [5, 10, 11, 12], [3, 1], [3, 13], [70, 71, 10, 11, 12, 13]),
    ([10, 11, 12], [0.1, 0.9, 0.9], 0.5, True, None, 5, 0, [10, 11, 12, 13],
     [5, 0, 0, 0], [0, 1], [0, 10], [70, 71, 10]),
    ([0, 1, 2], [0.9] * 3, 0, False, [100, 200, 300], 5, 0, [100, 200, 9, 9],
     [5, 100, 200, 300], [3, 1], [2, 9], [70, 71, 100, 200, 9]),
    ([10, 11, 12], [0.9] * 3, 0, False, None, NO_TOKEN, 10, [11, 12, 13, 0],
     [10, 11, 12, 0], [3, 0], [3, 13], [70, 71, 10, 11, 12, 13]),
    ([10, 11, 12], [0.9] * 3, 0, False, None, NO_TOKEN, 77, [11, 12, 13, 0],
     [10, 11, 12, 0], [3, 0], [0, 77], [70, 71, 77]),
]  # fmt: skip


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_known_rounds(rig: Rig, case: tuple[Any, ...], fused: bool) -> None:
    """K = 3, two tokens in the ring: rounds worked out by hand."""
    drafts, p, p_min, first, table, pend, last_pred, preds, vtok, brk, acc, ring = case
    sequence = oracle.Sequence(3, 1000, pend=pend, pos=40, ring=[70, 71])
    works = make(
        rig,
        [sequence],
        [list(zip(drafts, p, strict=True))],
        [preds],
        [last_pred],
        table=table,
        p_min=p_min,
        p_min_first=first,
    )
    run(rig, works, fused=fused)
    assert works.words(works.assemble.vtok) == [vtok]
    assert works.words(works.assemble.brk) == [brk]
    assert works.words(works.end.accept.acc) == [acc]
    assert works.words(works.end.commit.ring)[0][: 1 + len(ring)] == [len(ring), *ring]
    assert works.words(works.assemble.pend) == [ring[-1]]
    length = 40 + brk[1] + acc[0]
    assert works.words(works.counters) == [[length, -7, length]]
    assert works.words(works.assemble.rules.flags) == [0]


def random_batch(
    rng: np.random.Generator,
) -> tuple[list[oracle.Sequence], list[list[tuple[int, float]]], list[list[int]], list[int]]:
    """Sequences in every state, with drafts and choices that often agree and sometimes are bad."""
    k, vocab = int(rng.integers(1, 7)), 6
    room = int(rng.integers(1, 12))
    odd = [NO_TOKEN, vocab, 1 << 31]
    sequences, drafts, preds, last = [], [], [], []
    for _ in range(int(rng.integers(1, 5))):
        tokens = rng.integers(0, vocab, k + 2).tolist()
        count = int(rng.integers(0, room + 1))
        sequences.append(
            oracle.Sequence(
                k,
                vocab,
                pend=[int(rng.integers(vocab)), NO_TOKEN, 9][rng.choice(3, p=[0.7, 0.25, 0.05])],
                pos=int(rng.integers(0, 9)),
                flags=int(rng.choice([0, 0, 0, 0, 4, 16])),
                ring=rng.integers(0, vocab, count).tolist(),
                room=room,
                stops=frozenset(rng.choice(vocab, int(rng.integers(0, 3))).tolist()),
            )
        )
        base = sequences[-1].base
        chosen = [t if rng.random() < 0.8 else int(rng.integers(vocab)) for t in tokens]
        if rng.random() < 0.2:
            chosen[int(rng.integers(k + 2))] = odd[int(rng.integers(3))]
        drafted = tokens[:k]
        if rng.random() < 0.2:
            drafted[int(rng.integers(k))] = [*odd, UNWRITTEN][int(rng.integers(4))]
        drafts.append([(t, float(rng.choice([0.2, 0.5, 0.9, np.nan]))) for t in drafted])
        preds.append(chosen[1 - base : k + 2 - base])
        last.append(chosen[0])
    return sequences, drafts, preds, last


def check_random_round(rig: Rig, seed: int) -> None:
    """One round of a random batch, all of whose outputs are compared."""
    rng = np.random.default_rng(seed)
    sequences, drafts, preds, last = random_batch(rng)
    k = sequences[0].k
    p_min, first = float(rng.choice([0.0, 0.5])), bool(rng.integers(2))
    capacity = [s.pos + int(rng.choice([-1, 0, 1, 2, k, k + 1, 99])) for s in sequences]
    depth = rng.integers(0, k + 2, (len(sequences), 1)) if rng.random() < 0.5 else None
    works = make(
        rig,
        sequences,
        drafts,
        preds,
        last,
        ring_words=1 + sequences[0].room,
        p_min=p_min,
        p_min_first=first,
        capacity=capacity,
        depth=None if depth is None else rig.tensor(u32(depth)),
    )
    hidden = works.end.seed.hidden.array().copy() if works.end.seed else np.empty(0)
    run(rig, works, fused=bool(rng.integers(2)))
    for s, sequence in enumerate(sequences):
        pos = sequence.pos
        sequence.assemble(
            drafts[s],
            p_min=p_min,
            first=first,
            depth=None if depth is None else int(depth[s, 0]),
            capacity=capacity[s],
        )
        base, used = sequence.base, sequence.used
        acc = sequence.accept(preds[s], last[s])
        sequence.commit(acc)
        kept = 0 if acc[1] == NO_TOKEN else base + acc[0]
        end = works.end
        assert works.words(works.assemble.vtok)[s] == sequence.rows
        assert works.words(works.assemble.brk)[s] == [used, base]
        assert works.words(works.assemble.rules.flags)[s] == sequence.flags
        assert works.words(works.assemble.pend)[s] == sequence.pend
        assert works.words(works.assemble.drafts)[s] == [UNWRITTEN, 0] * k
        assert works.words(end.accept.acc)[s] == list(acc)
        filled = 1 + len(sequence.ring)
        ring = works.words(end.commit.ring)[s]
        assert ring[:filled] == [len(sequence.ring), *sequence.ring]
        assert set(ring[filled:]) <= {POISON}
        assert works.words(works.counters)[s] == [sequence.pos, -7, sequence.pos]
        assert sequence.pos == pos + kept
        assert end.seed is not None
        assert end.adapt is not None
        seeded = hidden[s, kept - 1].tolist() if kept else [-1.0] * WIDTH
        assert works.words(end.seed.h_seed)[s] == seeded
        assert works.words(end.adapt.depth)[s] == [min(max(acc[0] + 1, 2), k)]
        assert end.accept.tally is not None
        counted = [0, 0, 0] if acc[1] == NO_TOKEN else [1, used, acc[0]]
        assert works.words(end.accept.tally)[s] == counted
        emitted = [] if acc[1] == NO_TOKEN else sequence.ring[-1 - acc[0] :]
        history = [POISON] * 8
        places = slice(pos + base, pos + base + len(emitted))
        history[places] = emitted[: len(history[places])]
        assert end.commit.history is not None
        assert works.words(end.commit.history)[s] == history


@pytest.mark.parametrize("seed", range(60))
def test_random_rounds(rig: Rig, seed: int) -> None:
    """Batches in every state: halted, full, near capacity, with bad tokens and bad drafts."""
    check_random_round(rig, seed)


@pytest.mark.soak
def test_many_random_rounds(rig: Rig) -> None:
    """The same, thousands of times."""
    for seed in range(60, 4000):
        check_random_round(rig, seed)


def test_ring_commit_alone_saturates(rig: Rig) -> None:
    """Without an accept that knew the ring: what fits is kept, and the flag says so."""
    sequences = [oracle.Sequence(3, 99, pend=5, pos=2, ring=[1] * 6)]
    works = make(rig, sequences, [[(7, 1.0)] * 3], [[7, 7, 7, 8]], [0])
    kernels = rig.device.round_kernels()
    kernels.spec_assemble_verify(rig.stream, works.assemble)
    kernels.spec_accept_greedy_dc(rig.stream, replace(works.end.accept, ring=None))
    for _ in range(2):
        kernels.spec_ring_commit(rig.stream, works.end.commit)
        rig.stream.synchronize()
        assert works.words(works.end.commit.ring) == [[8, 1, 1, 1, 1, 1, 1, 7, 7]]
        assert works.words(works.assemble.pend) == [7]
        assert works.words(works.assemble.rules.flags) == [RoundFlag.OVERFLOW]
