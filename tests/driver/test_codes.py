"""Encode and score of the predictor ``codes`` on each device, against float64 and plain loops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hsswap import bf16, codec
from hsswap.codec import PAGE_BLOCKS, HeadCodec
from hsswap.config import LayerGroup
from hsswap.driver.codes_operations import (
    UNKNOWN_SCORE,
    Attended,
    EncodeCodesWork,
    LayerCodes,
    Resident,
    ScoreCodesWork,
    ScoreMemory,
    row_bytes_of,
    table_bytes,
)
from hsswap.driver.operations import UnitCache
from hsswap.errors import ArgumentError
from hsswap.halves import widen
from tests import e4m3_oracle
from tests.driver import oracle
from tests.driver.rig import Rig, random_codes

F64 = np.float64
Array = NDArray[np.float64]


def put_keys(
    group: LayerGroup, units: NDArray[np.uint8], at: Any, keys: NDArray[Any]
) -> NDArray[F64]:
    """Write keys ``[..., T, dk]`` into units ``[..., unit_bytes]`` at an index; what they are."""
    size = keys.shape[-2]
    raw = keys.view(np.uint8)
    if group.kv_dtype == "e4m3":
        raw, scales = e4m3_oracle.quantised(oracle.decode(keys))
        start = size * (group.head_dim + group.value_dim)
        units[at, ..., start : start + 4 * size] = scales.view(np.uint8)
    flat = raw.reshape(*raw.shape[:-2], -1)
    units[at, ..., : flat.shape[-1]] = flat
    return e4m3_oracle.numbers(raw, scales) if group.kv_dtype == "e4m3" else oracle.decode(keys)


class Case:
    """Blocks of random keys in host slots, their codes, and units of resident blocks."""

    def __init__(
        self, rig: Rig, group: LayerGroup, size: int, blocks: int, planes: list[int], seed: int = 0
    ) -> None:
        self.rig, self.group, self.size = rig, group, size
        self.rng = np.random.default_rng(seed)
        heads, dim = group.kv_heads, group.head_dim
        self.codecs = tuple(self._codec(dim, n) for n in planes)
        self.pool = rig.blocks(group, size, blocks + 3, fill=0xFF)
        self.slots = self.rng.permutation(blocks + 3)[:blocks].astype(np.int32)
        keys = random_codes(self.rng, (blocks, heads, size, dim), dtype=group.dtype)
        unit = self.pool.unit_bytes
        memory = self.pool.memory.array()[:, : heads * unit].reshape(-1, heads, unit)
        self.keys = put_keys(group, memory, self.slots, keys)
        self.index = self.rng.permutation(2 * PAGE_BLOCKS)[:blocks].astype(np.int32)
        shape = (PAGE_BLOCKS, row_bytes_of(self.codecs, size))
        pages = tuple(rig.tensor(np.full(shape, 0xA5, np.uint8)) for _ in range(2))
        self.codes = LayerCodes(
            self.codecs, rig.tensor(table_bytes(self.codecs)), pages, group, size
        )
        self.units = rig.units(group, size, heads * 4, fill=0xFF)

    def _codec(self, dim: int, planes: int) -> HeadCodec:
        bits = self.rng.integers(0, 7, dim)
        while bits.sum() != 16 * planes:  # nearest sum that is whole planes
            at = self.rng.integers(dim)
            bits[at] = np.clip(bits[at] + np.sign(16 * planes - bits.sum()), 0, 6)
        bits = np.sort(bits[bits > 0])[::-1]
        m = len(bits)
        encode = self.rng.standard_normal((dim, m)) * 2.0 ** (bits - 2) / dim**0.5
        return HeadCodec(
            encode.astype(np.float32),
            (2.0**bits / 2).astype(np.float32),
            (self.rng.standard_normal((dim, m)) / 2.0**bits).astype(np.float32),
            self.rng.standard_normal(dim).astype(np.float32),
            bits.astype(np.uint8),
        )

    def encode(self) -> None:
        """All blocks."""
        work = EncodeCodesWork(self.codes, self.pool, self.slots, self.index)
        self.rig.device.encode(self.rig.stream, work)
        self.rig.stream.synchronize()

    def stored(self, head: int) -> NDArray[np.uint16]:
        """A head's codes ``[B, n, T]``, read by the documented layout."""
        rows = np.concatenate([page.array() for page in self.codes.pages])[self.index]
        first = sum(c.planes for c in self.codecs[:head]) * self.size
        words = rows.view(np.uint16)[:, first : first + self.codecs[head].planes * self.size]
        return np.ascontiguousarray(words).reshape(len(rows), -1, self.size)

    def work(self, blocks: int | None = None) -> ScoreCodesWork:
        """A score of the first blocks without residents or memory; outputs are poisoned."""
        count = len(self.index) if blocks is None else blocks
        q, heads = self.group.q_heads, self.group.kv_heads
        poison = np.full((q, count + 5), np.nan, np.float32)
        none = np.empty(0, np.int32)
        return ScoreCodesWork(
            codes=self.codes,
            queries=self.rig.tensor(
                random_codes(self.rng, (q, self.group.head_dim), dtype=self.group.dtype)
            ),
            code_index=self.index[:count],
            resident=Resident(self.units, None, none, np.zeros(heads, np.int32), 0),
            memory=ScoreMemory(self.rig.tensor(poison), self.rig.tensor(poison)),
            first=True,
            last=None,
            scores=self.rig.tensor(np.full((heads, count), np.nan, np.float32)),
            uncorrected=self.rig.tensor(np.full((heads, count), np.nan, np.float32)),
        )

    def score(self, work: ScoreCodesWork) -> Array:
        """Run it; the scores."""
        self.rig.device.score(self.rig.stream, work)
        self.rig.stream.synchronize()
        scores: Array = work.scores.array().astype(F64)
        return scores

    def tolerance(self, queries: NDArray[np.uint16]) -> float:
        """How far the log-mass of a block may be from float64's: 6 standard deviations.

        A logit is a sum of weights times levels, and a weight a dot of the query with one column.
        Float32 rounds each of k sums by 2^-24 of what has been summed so far, which is as large as
        the terms added in squares (signs are random here); k errors of either sign are the square
        root of k times one of them. A dot has dk sums, a logit a sum a bit at worst. Weights in
        fixed point are 2^-30 of the largest, and a byte has 255 levels. Base-2 exponentials and
        logarithms err by 2^-22, and the change of base is one more rounding.
        """
        group, rounding = self.group.group_size, 2.0**-24
        worst = 0.0
        for head, own in enumerate(self.codecs):
            q = widen(queries[head * group : (head + 1) * group], self.group.dtype).astype(F64)
            top, bits = 2.0**own.bits - 1, 16 * own.planes
            dots = (q**2) @ own.query.astype(F64) ** 2  # of the terms of each dot, squares
            beside = (q**2) @ own.centre.astype(F64) ** 2
            of_dots = self.group.head_dim * (dots @ top**2 + beside)
            weights = q @ own.query
            of_sums = (bits + 2) * (weights**2 @ top**2 + (q @ own.centre) ** 2)
            # Half a unit times up to 255, evenly spread: 2.3 roundings of the largest weight.
            of_bytes = bits / 8 * (2.3 * (np.abs(weights) * 2.0 ** (own.bits - 1.0)).max(-1)) ** 2
            variance = rounding**2 * (of_dots + of_sums + of_bytes)
            worst = max(worst, float(np.sqrt(variance.max())))
        return 6 * worst + 4 * 2.0**-22

    def log_mass(self, queries: NDArray[np.uint16]) -> Array:
        """Float64 ``[Q, B]`` from the codes that are stored."""
        per_head = []
        group = self.group.group_size
        for head, own in enumerate(self.codecs):
            levels = codec.unpack(own, self.stored(head)).astype(F64)
            q = widen(queries[head * group : (head + 1) * group], self.group.dtype).astype(F64)
            logits = (
                np.einsum("btm,gm->gbt", levels, q @ own.query) + (q @ own.centre)[:, None, None]
            )
            per_head.append(lse_of(logits))
        return np.concatenate(per_head)


def lse_of(logits: Array) -> Array:
    """Logsumexp over the last axis."""
    best = logits.max(-1, keepdims=True)
    total: Array = np.log(np.exp(logits - best).sum(-1)) + best[..., 0]
    return total


def log_share(mass: Array, beside: Array, group: int) -> Array:
    """Log of each block's share, mean over a group of queries."""
    total = lse_of(np.concatenate((mass, beside), axis=1))
    share = np.exp(mass - total[:, None])
    logs: Array = np.log(share.reshape(-1, group, mass.shape[1]).mean(1))
    return logs


OF_16_BITS = [
    (LayerGroup(1, 3, 1, 64), 16, [4]),
    (LayerGroup(1, 8, 2, 128), 16, [9, 3]),
    (LayerGroup(1, 6, 3, 24, value_dim=8, aux_bytes=6), 8, [1, 2, 5]),
    (LayerGroup(1, 2, 2, 8), 1, [1, 3]),
    (LayerGroup(1, 10, 2, 256, soft_cap=5.0), 64, [20, 1]),
    (LayerGroup(1, 4, 2, 40, dtype="f16"), 16, [2, 3]),
]
GROUPS = [
    *OF_16_BITS,
    (LayerGroup(1, 8, 2, 128, kv_dtype="e4m3"), 16, [5, 3]),
    (LayerGroup(1, 6, 3, 24, value_dim=8, kv_dtype="e4m3", dtype="f16"), 8, [1, 2, 5]),
]


@pytest.mark.parametrize(("group", "size", "planes"), GROUPS)
def test_codes_are_those_of_the_keys(
    rig: Rig, group: LayerGroup, size: int, planes: list[int]
) -> None:
    case = Case(rig, group, size, 41, planes)
    case.encode()
    for head, own in enumerate(case.codecs):
        keys = case.keys[:, head]
        exact = keys @ own.encode.astype(F64) + own.bias
        levels = codec.unpack(own, case.stored(head))
        top = 2.0**own.bits - 1
        sure = np.abs(exact - np.round(exact)) > 1e-5 * np.maximum(1, np.abs(exact))
        assert sure.mean() > 0.99
        assert (levels == np.clip(np.floor(exact), 0, top))[sure].all()


def test_other_rows_keep_what_they_held(rig: Rig) -> None:
    case = Case(rig, LayerGroup(1, 2, 2, 16), 16, 5, [2, 1])
    case.encode()
    rows = np.concatenate([page.array() for page in case.codes.pages])
    others = np.delete(rows, case.index, axis=0)
    assert (others == 0xA5).all()


@pytest.mark.parametrize(("group", "size", "planes"), OF_16_BITS)  # what keys were is no matter
@pytest.mark.parametrize("blocks", [1, 37])
def test_scores_are_logs_of_shares(
    rig: Rig, group: LayerGroup, size: int, planes: list[int], blocks: int
) -> None:
    case = Case(rig, group, size, 37, planes)
    case.encode()
    work = case.work(blocks)
    scores = case.score(work)
    mass = case.log_mass(work.queries.array())[:, :blocks]
    wanted = log_share(mass, np.full((group.q_heads, 1), -np.inf), group.group_size)
    tolerance = case.tolerance(work.queries.array())
    predicted = work.memory.predicted.array()
    assert np.abs(predicted[:, :blocks] - mass).max() < tolerance
    assert np.isnan(predicted[:, blocks:]).all()
    assert np.abs(scores - wanted).max() < 2 * tolerance  # a mass less the sum of all


def test_more_blocks_than_a_gpu_takes_at_a_time(rig: Rig) -> None:
    case = Case(rig, LayerGroup(1, 8, 8, 16), 16, 40, [1, 2] * 4)
    case.encode()
    blocks = 9001
    which = case.rng.integers(0, 40, blocks)
    work = case.work()
    work = replace(
        work,
        code_index=case.index[which],
        memory=ScoreMemory(*(rig.tensor(np.full((8, blocks), np.nan, np.float32)) for _ in "ab")),
        scores=rig.tensor(np.full((8, blocks), np.nan, np.float32)),
        uncorrected=rig.tensor(np.full((8, blocks), np.nan, np.float32)),
    )
    scores = case.score(work)
    queries = work.queries.array()
    mass = case.log_mass(queries)[:, which]
    tolerance = case.tolerance(queries)
    assert np.abs(work.memory.predicted.array() - mass).max() < tolerance
    wanted = log_share(mass, np.full((8, 1), -np.inf), 1)
    # Beside what a mass errs by, a float32 sum of so many shares.
    assert np.abs(scores - wanted).max() < 2 * tolerance + 2.0**-20


def test_permuting_blocks_permutes_scores(rig: Rig) -> None:
    case = Case(rig, LayerGroup(1, 4, 2, 32), 16, 50, [3, 4])
    case.encode()
    work = case.work()
    scores = case.score(work)
    order = case.rng.permutation(50)
    again = replace(case.work(), queries=work.queries, code_index=case.index[order])
    assert np.allclose(case.score(again), scores[:, order], atol=1e-5)


@pytest.mark.parametrize("kv_dtype", ["bf16", "e4m3"])
def test_residents_count_with_their_exact_logits(rig: Rig, kv_dtype: str) -> None:
    group = LayerGroup(1, 4, 2, 32, kv_dtype=kv_dtype)
    case = Case(rig, group, 16, 20, [3, 2])
    case.encode()
    rows, keys = random_codes(case.rng, (3, 2, 16, 32)), np.empty((3, 2, 16, 32))
    content = case.units.memory.array()
    slots = np.array([[5, 0, 3], [1, 7, 2]], np.int32)
    for head in range(2):
        for place in range(3):
            keys[place, head] = put_keys(group, content, slots[head, place], rows[place, head])
    # The last is being filled: NaN behind its 9 tokens.
    item = 1 if kv_dtype == "e4m3" else 2
    content[slots[:, 2], 9 * 32 * item : 16 * 32 * item] = 0xFF
    # Head 1 does not hold block 13, which then counts by its codes.
    owner = np.array([[13, -1, 0, 4], [-1, 0, 6, 19]], np.int32)
    places = np.array([[slots[0, 1], 4, slots[0, 0], 6], [4, slots[1, 0], 4, 4]], np.int32)
    unused = rig.tensor(np.zeros((2, 4), np.float32))
    cache = UnitCache(rig.tensor(places), rig.tensor(owner), unused, unused)
    pinned = np.array([0, 13], np.int32)
    resident = Resident(case.units, cache, pinned, slots[:, 2].copy(), 9)
    work = replace(case.work(), resident=resident)
    scores = case.score(work)
    queries = work.queries.array()
    mass = case.log_mass(queries)
    q = bf16.to_float32(queries).astype(F64).reshape(2, 2, 32)
    logits = np.einsum("hgd,phtd->hgpt", q, keys) * 32**-0.5
    logits[:, :, 2, 9:] = -np.inf
    exact = lse_of(logits).reshape(4, 3)
    mass[:, 0] = exact[:, 0]
    mass[:2, 13] = exact[:2, 1]
    wanted = log_share(mass, exact[:, 2:], 2)
    assert np.abs(scores - wanted).max() < 1e-4
    assert np.abs(work.uncorrected.array() - scores).max() < 1e-6 * np.abs(scores).max()


def test_lists_that_the_device_holds(rig: Rig) -> None:
    case = Case(rig, LayerGroup(1, 4, 2, 32), 16, 20, [3, 2])
    case.encode()
    case.units.memory.array()[...] = 0x3F  # BF16 0.7 or so
    index = case.index.copy()
    index[4] = -1
    unused = rig.tensor(np.zeros((2, 3), np.float32))
    owner = rig.tensor(np.array([[7, 2, -1], [7, -1, 2]], np.int32))
    places = rig.tensor(np.arange(6, dtype=np.int32).reshape(2, 3))
    cache = UnitCache(places, owner, unused, unused)
    pinned = np.array([2, 7], np.int32)
    resident = Resident(case.units, cache, pinned, np.zeros(2, np.int32), 0)
    given = replace(case.work(), code_index=index, resident=resident)
    held = replace(
        case.work(),
        queries=given.queries,
        code_index=rig.tensor(index),
        resident=replace(resident, pinned=rig.tensor(np.array([2, -1, 7], np.int32))),
    )
    assert (case.score(given) == case.score(held)).all()


def test_what_the_last_step_found_corrects_and_new_blocks_start_anew(rig: Rig) -> None:
    group = LayerGroup(1, 4, 2, 32)
    case = Case(rig, group, 16, 30, [3, 2])
    case.encode()
    first = case.work(28)
    case.score(first)
    chosen = np.array([[2, 9, -1], [27, 5, 11]], np.int32)
    lse = (case.rng.standard_normal((4, 3)) * 3).astype(np.float32)
    last = Attended(rig.tensor(chosen), rig.tensor(lse))
    second = replace(case.work(30), memory=first.memory, first=False, last=last)
    before = case.log_mass(first.queries.array())
    mass = case.log_mass(second.queries.array())
    correction = np.zeros((4, 30))
    for q in range(4):
        for entry, block in enumerate(chosen[q // 2].tolist()):
            if block >= 0:
                correction[q, block] = codec.TRUST * (lse[q, entry] - before[q, block])
    nothing = np.full((4, 1), -np.inf)
    assert np.abs(case.score(second) - log_share(mass + correction, nothing, 2)).max() < 1e-4
    plain = second.uncorrected.array() - log_share(mass, nothing, 2)
    assert np.abs(plain).max() < 1e-4
    third = replace(case.work(30), memory=first.memory, first=False)
    mass = case.log_mass(third.queries.array())
    wanted = log_share(mass + codec.FADE * correction, nothing, 2)
    assert np.abs(case.score(third) - wanted).max() < 1e-4
    fourth = replace(case.work(30), memory=first.memory)  # as if new
    mass = case.log_mass(fourth.queries.array())
    assert np.abs(case.score(fourth) - log_share(mass, nothing, 2)).max() < 1e-4


def test_blocks_without_codes_rank_by_the_last_step_then_by_age(rig: Rig) -> None:
    group = LayerGroup(1, 4, 2, 32)
    case = Case(rig, group, 16, 12, [3, 2])
    case.encode()
    index = case.index.copy()
    index[[1, 4, 7, 8]] = -1
    chosen = np.array([[4], [7]], np.int32)
    lse = np.full((4, 1), 50.0, np.float32)
    last = Attended(rig.tensor(chosen), rig.tensor(lse))
    first = replace(case.work(), code_index=index)
    case.score(first)
    scores = case.score(
        replace(case.work(), code_index=index, memory=first.memory, first=False, last=last)
    )
    for head, attended in ((0, 4), (1, 7)):
        unknown = [b for b in (1, 4, 7, 8) if b != attended]
        assert scores[head].argmax() == attended
        assert scores[head, attended] > -1e-3
        assert (scores[head, unknown] == UNKNOWN_SCORE - (11 - np.array(unknown))).all()
        coded = np.delete(scores[head], [1, 4, 7, 8])
        assert (coded > UNKNOWN_SCORE).all()


def test_wrong_arguments_are_refused(rig: Rig) -> None:
    case = Case(rig, LayerGroup(1, 4, 2, 32), 16, 12, [3, 2])
    good = case.work()
    rows = len(case.index)
    assert case.codes.tables is not None
    shifted = replace(case.codes.tables, address=case.codes.tables.address + 8)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"code_index": np.full(rows, 2 * PAGE_BLOCKS, np.int32)}, "code_index holds"),
        ({"scores": rig.tensor(np.zeros((2, 3), np.float32))}, "scores has shape"),
        ({"codes": replace(case.codes, codecs=case.codecs[:1])}, "codecs must be 2"),
        ({"codes": replace(case.codes, tables=shifted)}, "is no multiple of 16"),
        ({"resident": replace(good.resident, active_tokens=17)}, "active_tokens is 17"),
        ({"memory": replace(good.memory, predicted=good.scores)}, "memory has room|has shape"),
    ]
    for change, message in refused:
        with pytest.raises(ArgumentError, match=message):
            rig.device.score(rig.stream, replace(good, **change))
    with pytest.raises(ArgumentError, match="host_slots holds"):
        rig.device.encode(
            rig.stream, EncodeCodesWork(case.codes, case.pool, case.index, case.index)
        )
