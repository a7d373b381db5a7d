"""The small kernels of speculative rounds: drafts, argmax, counters, copies; refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from hsswap.driver import cuda_rounds, host_rounds
from hsswap.driver.round_operations import (
    NO_TOKEN,
    ArgmaxWork,
    AssembleWork,
    CopyWork,
    IotaWork,
    MapWork,
    NgramWork,
    PackWork,
    RoundFlag,
    RoundRules,
    SetWork,
    TokenRingWork,
)
from hsswap.driver.rounds_base import RoundKernels
from hsswap.driver.tensor import tensor_in
from hsswap.errors import ArgumentError, ClosedError
from tests.driver import round_oracle as oracle
from tests.driver.rig import Rig

ONE = int(np.float32(1.0).view(np.uint32))


@pytest.mark.parametrize("functions", [host_rounds, cuda_rounds])
def test_a_device_has_every_kernel(functions: ModuleType) -> None:
    names = [name for name in vars(RoundKernels) if not name.startswith("_")]
    assert len(names) == 17
    assert [name for name in names if not callable(getattr(functions, name, None))] == []


def words(*values: Any) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """An array of words."""
    return np.array(values, np.uint32)


def test_pack_and_map(rig: Rig) -> None:
    """A draft goes into its slot; the map is bounds-checked, and leaves 'no token' alone."""
    kernels = rig.device.round_kernels()
    token = rig.tensor(words(2, 0, 3, NO_TOKEN))
    probability = rig.tensor(np.array([0.5, 1.0, 0.25, 0.0], np.float32))
    drafts = rig.tensor(np.full((4, 6), 7, np.uint32))
    flags = rig.tensor(np.zeros(4, np.uint32))
    kernels.pack_tok_p(rig.stream, PackWork(token, probability, drafts, 1))
    table = rig.tensor(words(100, 200, 300))
    kernels.tok_map_u32(rig.stream, MapWork(token, table, flags))
    rig.stream.synchronize()
    expected = np.full((4, 6), 7, np.uint32)
    expected[:, 2] = [2, 0, 3, NO_TOKEN]
    expected[:, 3] = np.array([0.5, 1.0, 0.25, 0.0], np.float32).view(np.uint32)
    assert np.array_equal(drafts.array(), expected)
    assert token.array().tolist() == [300, 100, NO_TOKEN, NO_TOKEN]
    assert flags.array().tolist() == [0, 0, RoundFlag.BAD_DRAFT, 0]


@pytest.mark.parametrize("vocab", [1, 2, 31, 1000, 49152])
def test_argmax_and_its_probability(rig: Rig, vocab: int) -> None:
    """Against float64; ties to the lowest index, NaN never wins, infinities are no accident."""
    rng = np.random.default_rng(vocab)
    logits = (rng.standard_normal((3, 4, vocab)) * 3).astype(np.float32)
    logits[0, 0, rng.integers(0, vocab, 2)] = 50.0  # a tie, where vocab > 1
    logits[0, 1] = -np.inf
    logits[0, 1, -1] = np.nan if vocab > 1 else -np.inf
    logits[1, 0] = np.nan
    logits[1, 1, vocab // 2] = np.nan
    logits[2, 0, vocab // 3] = np.inf
    logits[2, 1] = 0.5
    if vocab > 1:
        logits[1, 1, 0] = -1e30
    tokens = rig.tensor(np.full((3, 4), 7, np.uint32))
    probabilities = rig.tensor(np.full((3, 4), np.nan, np.float32))
    flags = rig.tensor(words(0, 0, 4))
    rig.device.round_kernels().argmax(
        rig.stream, ArgmaxWork(rig.tensor(logits), tokens, probabilities, flags)
    )
    rig.stream.synchronize()
    bad = [[(s, r) == (1, 0) or bool(np.isnan(logits[s, r]).all()) for r in range(4)]
           for s in range(3)]  # fmt: skip
    for s in range(3):
        for r in range(4):
            row = logits[s, r].astype(np.float64)
            token = int(tokens.array()[s, r])
            if bad[s][r]:
                assert token == NO_TOKEN
                assert probabilities.array()[s, r] == 0
                continue
            assert token == min(np.flatnonzero(row == np.nanmax(row)))
            peak = float(np.nanmax(row))
            expected = 1 / np.nansum(np.exp(row - peak)) if np.isfinite(peak) else 0.0
            assert probabilities.array()[s, r] == pytest.approx(expected, rel=1e-5)
    halted = [RoundFlag.BAD_TOKEN if any(row) else 0 for row in bad]
    assert flags.array().tolist() == [halted[0], halted[1], 4 | halted[2]]


def test_counters_copies_and_setters(rig: Rig) -> None:
    """Iota from a counter, copies with a number added (words wrap), one word of every row."""
    kernels = rig.device.round_kernels()
    counter = rig.tensor(np.array([5, -2, 1 << 30], np.int32))
    iota = rig.tensor(np.full((3, 4), 9, np.int32))
    copied = rig.tensor(np.zeros(3, np.int32))
    wrapped = rig.tensor(np.zeros((2, 2), np.uint32))
    kernels.pos_iota_i32(rig.stream, IotaWork(counter, iota, 2))
    kernels.copy_add(rig.stream, CopyWork(counter, copied, -7))
    kernels.copy_add(rig.stream, CopyWork(rig.tensor(words([1, NO_TOKEN], [0, 8])), wrapped, 1))
    kernels.set_word(rig.stream, SetWork(iota, 3, -4))
    kernels.set_word(rig.stream, SetWork(wrapped, 0, NO_TOKEN))
    rig.stream.synchronize()
    start = np.array([5, -2, 1 << 30])[:, None] + 2 + np.arange(4)
    start[:, 3] = -4
    assert np.array_equal(iota.array(), start)
    assert copied.array().tolist() == [-2, -9, (1 << 30) - 7]
    assert wrapped.array().tolist() == [[NO_TOKEN, 0], [NO_TOKEN, 9]]


def test_ring_of_plain_decode_wraps(rig: Rig) -> None:
    """Each step's token at its place, from an entry position of each sequence, never negative."""
    kernels = rig.device.round_kernels()
    ring = rig.tensor(np.full((2, 3), 99, np.uint32))
    token = rig.tensor(words(0, 0))
    position = rig.tensor(np.array([10, 4], np.int32))
    entry = rig.tensor(np.array([10, 6], np.int32))
    for _ in range(5):
        kernels.plain_tok_ring(rig.stream, TokenRingWork(token, position, entry, ring))
        kernels.copy_add(rig.stream, CopyWork(position, position, 1))
        kernels.copy_add(rig.stream, CopyWork(token, token, 1))
    rig.stream.synchronize()
    # Steps 0 to 4 of the first at 0, 1, 2, 0, 1; of the second, two behind its entry, from 1 on.
    assert ring.array().tolist() == [[3, 4, 2], [2, 3, 4]]


def check_ngrams(rig: Rig, seed: int) -> None:
    """One random batch of histories."""
    rng = np.random.default_rng(seed)
    count, k, room = int(rng.integers(1, 4)), int(rng.integers(1, 6)), int(rng.integers(1, 40))
    shortest = int(rng.integers(1, 4))
    longest = shortest + int(rng.integers(0, 3))
    history = rng.integers(0, int(rng.integers(1, 5)), (count, room)).astype(np.uint32)
    pend = np.where(rng.random(count) < 0.7, 1, NO_TOKEN).astype(np.uint32)
    pos = rng.integers(0, room + 1, count).astype(np.int32)
    drafts = rig.tensor(np.full((count, 2 * k), 7, np.uint32))
    rig.device.round_kernels().ngram_draft(
        rig.stream,
        NgramWork(
            *(rig.tensor(history), rig.tensor(pos), rig.tensor(pend), drafts, shortest, longest)
        ),
    )
    rig.stream.synchronize()
    for s in range(count):
        known = history[s, : pos[s] + (pend[s] != NO_TOKEN)].tolist()
        found = oracle.find(known, k, shortest, longest)
        assert drafts.array()[s, ::2].tolist() == (found or [NO_TOKEN] * k)
        assert drafts.array()[s, 1::2].tolist() == [ONE if found else 0] * k


@pytest.mark.parametrize("seed", range(40))
def test_ngrams(rig: Rig, seed: int) -> None:
    """The last earlier place of the last tokens, the longest first; loops go on."""
    check_ngrams(rig, seed)


def test_ngrams_of_a_long_history(rig: Rig) -> None:
    """Thousands of tokens, the only earlier place far back."""
    history = np.arange(5000, dtype=np.uint32)[None]
    history[0, -2:] = [70, 71]
    drafts = rig.tensor(np.zeros((1, 6), np.uint32))
    position, pend = rig.tensor(np.array([4999], np.int32)), rig.tensor(words(71))
    work = NgramWork(rig.tensor(history), position, pend, drafts, 2, 3)
    rig.device.round_kernels().ngram_draft(rig.stream, work)
    rig.stream.synchronize()
    assert drafts.array().tolist() == [[72, ONE, 73, ONE, 74, ONE]]


def assemble_work(rig: Rig) -> AssembleWork:
    """Two sequences, K = 3."""
    zeros = np.zeros((2, 8), np.uint32)
    return AssembleWork(
        rig.tensor(zeros[:, :6]),
        rig.tensor(zeros[:, 0]),
        rig.tensor(zeros[:, :4]),
        rig.tensor(zeros[:, :2]),
        RoundRules(rig.tensor(zeros[:, 0]), rig.tensor(zeros[:, :1]), 10),
        rig.tensor(np.zeros(2, np.int32)),
    )


WRONG: list[tuple[str, Callable[[Rig, AssembleWork], AssembleWork]]] = [
    ("K of 0", lambda rig, w: replace(w, drafts=rig.tensor(np.zeros((2, 0), np.uint32)))),
    ("odd words", lambda rig, w: replace(w, drafts=rig.tensor(np.zeros((2, 5), np.uint32)))),
    ("rows", lambda rig, w: replace(w, vtok=rig.tensor(np.zeros((2, 3), np.uint32)))),
    ("dtype", lambda rig, w: replace(w, pend=rig.tensor(np.zeros(2, np.int32)))),
    ("sequences", lambda rig, w: replace(w, brk=rig.tensor(np.zeros((3, 2), np.uint32)))),
    ("p_min", lambda rig, w: replace(w, p_min=1.5)),
    ("vocabulary", lambda rig, w: replace(w, rules=replace(w.rules, vocab_size=0))),
    ("strides", lambda rig, w: replace(w, vtok=replace(w.vtok, strides=(4, 8)))),
    ("depth", lambda rig, w: replace(w, depth=rig.tensor(np.zeros((2, 2), np.uint32)))),
]


@pytest.mark.parametrize(("what", "change"), WRONG, ids=[what for what, _ in WRONG])
def test_refusals(rig: Rig, what: str, change: Callable[[Rig, AssembleWork], AssembleWork]) -> None:
    """What cannot work is refused before anything is enqueued, and the stream goes on."""
    kernels, work = rig.device.round_kernels(), assemble_work(rig)
    with pytest.raises(ArgumentError):
        kernels.spec_assemble_verify(rig.stream, change(rig, work))
    kernels.spec_assemble_verify(rig.stream, work)
    rig.stream.synchronize()


def test_closed_memory_is_refused(rig: Rig) -> None:
    """A buffer that was closed is no target."""
    with rig.device.allocate_host(64) as buffer:
        target = tensor_in(buffer, "u32", (2, 2))
    with pytest.raises(ClosedError):
        rig.device.round_kernels().set_word(rig.stream, SetWork(target, 0, 1))
