"""A top-k step that the device decides alone: score, select, fetch and attend by what it holds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from hsswap.config import LayerGroup
from hsswap.driver.choice_operations import FetchWork
from hsswap.driver.operations import (
    AttendWork,
    AttentionState,
    FinalizeWork,
    ProjectionCodes,
    ScoreWork,
    SelectWork,
    UnitCache,
)
from hsswap.driver.tensor import Tensor
from hsswap.errors import ArgumentError
from tests.driver import oracle
from tests.driver.rig import I32, NAN_CODE, Rig, random_codes


class TopK:
    """A sequence of ``blocks`` full blocks and one being filled, with codes and a unit cache."""

    def __init__(self, rig: Rig, blocks: int, k: int, room: int, dim: int = 64) -> None:
        """``room``: blocks that the tables can hold."""
        rng = np.random.default_rng(blocks)
        self.group = group = LayerGroup(1, 8, 2, dim)
        heads, size, tensor = 2, 16, rig.tensor
        self.rig, self.blocks, self.k = rig, blocks, k
        self.keys = random_codes(rng, (blocks * size + 7, heads, dim))
        self.values = random_codes(rng, (blocks * size + 7, heads, dim))
        places = 2 * k
        self.pool = rig.units(group, size, heads * (places + 1), 0x7F)
        self.host = rig.blocks(group, size, room + 1)
        unit = self.pool.unit_bytes
        order = rng.permutation(room + 1)[:room].astype(np.int32)
        memory = self.host.memory.array()
        for b in range(blocks):
            for h in range(heads):
                rows = slice(b * size, (b + 1) * size)
                both = np.concatenate((self.keys[rows, h].ravel(), self.values[rows, h].ravel()))
                memory[order[b], h * unit : (h + 1) * unit] = both.view(np.uint8)
        self.tail = np.array([[heads * places], [heads * places + 1]], np.int32)
        rest = self.pool.memory.array().view(np.uint16)
        for h in range(heads):
            for start, source in ((0, self.keys), (size * dim, self.values)):
                flat = source[blocks * size :, h].ravel()
                rest[self.tail[h, 0], start : start + len(flat)] = flat
        self.host_slots = np.where(np.arange(room) < blocks, order, -1).astype(np.int32)
        index = np.where(np.arange(room) < blocks, np.arange(room), -1).astype(np.int32)
        codes = tensor(random_codes(rng, (room, heads, size, 8)))
        self.codes = ProjectionCodes(codes, tensor(random_codes(rng, (dim, 8))), group)
        self.slots = np.arange(heads * places, dtype=np.int32).reshape(heads, places)
        count = k + 1
        mass = np.zeros((1, heads, count + 1), np.float32)
        self.mass = tensor(mass)
        self.queries = tensor(np.zeros((1, 1, 8, dim), np.uint16))
        chosen = tensor(np.full((heads, count), -1, np.int32))
        self.cache = UnitCache(
            tensor(self.slots),
            *(tensor(np.zeros((heads, places), t)) for t in (np.int32, np.float32, np.int32)),
        )
        last_mass = Tensor(
            self.mass.address, (heads, count), (4 * count + 4, 4), "f32", False, self.mass
        )
        self.score = ScoreWork(
            self.codes,
            Tensor(self.queries.address, (8, dim), (2 * dim, 2), "bf16", False, self.queries),
            tensor(index),
            tensor(np.zeros((heads, room), np.float32)),
        )
        self.select = SelectWork(
            scores=self.score.scores,
            shares=self.score.scores,
            k=k,
            pinned=tensor(np.array([0], np.int32)),
            cache=self.cache,
            step=tensor(np.zeros(heads, np.int32)),
            decay=0.9,
            last_chosen=chosen,
            last_mass=last_mass,
            chosen=chosen,
            chosen_slots=tensor(np.zeros((heads, count), np.int32)),
            missing=tensor(np.zeros((heads, count), np.uint8)),
            left_out=tensor(np.zeros(heads, np.float32)),
        )
        self.fetch = FetchWork(
            units=self.pool,
            blocks=self.host,
            chosen=chosen,
            chosen_slots=self.select.chosen_slots,
            missing=self.select.missing,
            cache=self.cache,
            host_slots=tensor(self.host_slots),
            tail_slots=tensor(self.tail),
            tail_positions=tensor(np.array([blocks], np.int32)),
            slots=tensor(np.zeros((heads, count + 1), np.int32)),
            positions=tensor(np.zeros((heads, count + 1), np.int32)),
            absent=tensor(np.zeros((heads, count), np.int32)),
            absent_count=tensor(np.zeros(heads, np.int32)),
        )
        zeros = np.zeros((1, 1, 8, dim), np.float32)
        state = AttentionState(tensor(zeros[..., 0]), tensor(zeros[..., 0]), tensor(zeros))
        self.out = tensor(np.full((1, 1, 8, dim), NAN_CODE, np.uint16))
        block_lse = tensor(np.zeros((1, 1, 8, count + 1), np.float32))
        self.attend = AttendWork(
            queries=self.queries,
            lengths=tensor(np.array([len(self.keys)], np.int32)),
            units=self.pool,
            slots=self.fetch.slots.as_batch(),
            first_block=0,
            positions=self.fetch.positions.as_batch(),
            span_blocks=64,
            state=state,
            begin=True,
            block_lse=block_lse,
        )
        self.finalize = FinalizeWork(state, self.out, block_lse=block_lse, block_mass=self.mass)

    def enqueue(self, *, fused: bool) -> None:
        """One step, with no decision of the host."""
        device, stream = self.rig.device, self.rig.stream
        device.score(stream, self.score)
        device.select(stream, self.select)
        if fused:
            work = replace(self.attend, fetch=self.fetch, blocks=self.host, end=self.finalize)
            device.attend(stream, work)
            return
        device.fetch(stream, self.fetch)
        device.attend(stream, self.attend)
        device.finalize(stream, self.finalize)

    def wanted(self, queries: NDArray[np.uint16], attended: list[list[int]]) -> NDArray[np.float64]:
        """Attention of the blocks of each head, and of the rows behind the last full one."""
        out = np.zeros((8, self.group.head_dim))
        heads = oracle.Heads(4, self.group.logit_scale)
        for h, blocks in enumerate(attended):
            rows = [r for b in blocks for r in range(16 * b, 16 * b + 16)]
            rows += range(16 * self.blocks, len(self.keys))
            part = slice(4 * h, 4 * h + 4)
            keys, values = self.keys[rows, h : h + 1], self.values[rows, h : h + 1]
            reference = oracle.attend(queries[0, :, part], keys, values, len(rows), heads)
            out[part] = reference.exact[0]
        return out


def plain_choice(step: TopK) -> list[list[int]]:
    """Pinned and best blocks of each head by the scores that the step left."""
    chosen = []
    for row in step.score.scores.array()[:, : step.blocks].tolist():
        best = sorted(range(1, step.blocks), key=lambda b: (-row[b], b))
        chosen.append(sorted([0, *best[: step.k]]))
    return chosen


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("blocks", "k", "dim", "turns"),
    [
        (30, 6, 64, 25),
        (90, 40, 128, 10),
        (500, 330, 128, 5),
        (900, 700, 128, 5),
        (1300, 1100, 64, 5),
    ],
)
def test_a_captured_top_k_step(
    rig: Rig, blocks: int, k: int, dim: int, turns: int, fused: bool
) -> None:
    """Replayed with changing queries and tables; the cache turns over, and some blocks are lost.

    Lists of several lengths: attention shares them out in ways of its own, and fetches in each.
    """
    step = TopK(rig, blocks, k, blocks + 7, dim)
    rng = np.random.default_rng(3)
    with rig.stream.capture() as graph:
        step.enqueue(fused=fused)
    table = step.fetch.host_slots.array()
    lost_before: list[set[int]] = [set(), set()]
    came: list[set[int]] = [set(), set()]
    misses = 0
    with graph:
        for turn in range(turns):
            queries = random_codes(rng, (1, 1, 8, dim), scale=2.0)
            step.queries.array()[...] = queries
            table[...] = step.host_slots
            if turn % 5 == 3:
                table[rng.permutation(blocks)[: blocks * 2 // 5]] = -1
            graph.launch(rig.stream)
            rig.stream.synchronize()
            chosen = plain_choice(step)
            assert step.select.chosen.array().tolist() == chosen
            assert (step.score.scores.array()[:, blocks:] == -np.inf).all()
            missing = step.select.missing.array() != 0
            misses += int(missing.sum())
            attended = []
            for h in range(2):
                pairs = list(zip(chosen[h], missing[h].tolist(), strict=True))
                absent = [b for b, m in pairs if m and table[b] < 0]
                assert step.fetch.absent_count.array()[h] == len(absent)
                attended.append([b for b in chosen[h] if b not in absent])
                for b, m in pairs:
                    # What was lost is missing the next time: no unit is trusted that never came.
                    assert not (b in lost_before[h] and not m)
                    assert m or b in came[h]
                came[h] |= set(attended[h])
                lost_before[h] = (lost_before[h] - set(attended[h])) | set(absent)
            wanted = step.wanted(queries, attended)
            error = oracle.relative_error(oracle.decode(step.out.array()[0, 0]), wanted)
            assert error <= oracle.FACTOR * oracle.FLOOR * 2
            share = step.mass.array()[0].sum(1)
            np.testing.assert_allclose(share, 1, rtol=1e-5)
    assert (step.select.step.array() == turns).all()  # type: ignore[union-attr]
    assert 2 * (k + 1) < misses < turns * 2 * (k + 1)


def test_attention_refuses_a_fetch_of_other_lists_or_pools(rig: Rig) -> None:
    step = TopK(rig, 20, 5, 26)
    work = replace(step.attend, fetch=step.fetch, blocks=step.host)
    other = rig.tensor(np.zeros(step.fetch.slots.shape, np.int32))
    wrong: list[tuple[str, AttendWork]] = [
        ("slots is not what fetch lists", replace(work, slots=other.as_batch())),
        ("positions is not what fetch lists", replace(work, positions=other.as_batch())),
        ("positions is not", replace(work, positions=None)),
        ("between other pools", replace(work, blocks=None)),
        ("between other pools", replace(work, units=rig.units(step.group, 16, 99))),
        ("absent has dtype f32", replace(work, fetch=replace(step.fetch, absent=step.mass.row(0)))),
    ]
    for message, bad in wrong:
        with pytest.raises(ArgumentError, match=message):
            rig.device.attend(rig.stream, bad)


def test_what_the_device_holds_ranks_and_chooses_the_same(rig: Rig) -> None:
    """Scores, choices, victims and masses, as with lists of the host."""
    held, given = TopK(rig, 20, 5, 26), TopK(rig, 20, 5, 26)
    rng = np.random.default_rng(4)
    heads = 2
    for turn in range(12):
        queries = random_codes(rng, (1, 1, 8, 64))
        pinned = np.sort(rng.permutation(20)[:2]).astype(np.int32)
        scores = rig.tensor(np.zeros((heads, 20), np.float32))
        mass = rng.random((heads, 7)).astype(np.float32)
        device, stream = rig.device, rig.stream
        for step in (held, given):
            step.queries.array()[...] = queries
        device.score(stream, held.score)
        index = np.arange(20, dtype=np.int32)
        device.score(stream, replace(given.score, code_index=index, scores=scores))
        results: list[list[I32]] = []
        for step in (held, given):
            lists = [np.zeros((heads, 7), np.int32), np.zeros((heads, 7), np.int32)]
            wide = pinned if step is given else np.append(pinned, np.int32(-1)).astype(np.int32)
            work = replace(
                step.select,
                scores=scores if step is given else held.score.scores,
                shares=scores if step is given else held.score.scores,
                k=5 if step is given else 4,
                pinned=wide if step is given else rig.tensor(wide),
                step=turn if step is given else held.select.step,
                last_mass=rig.tensor(mass),
                last_chosen=rig.tensor(np.broadcast_to(np.arange(7, dtype=np.int32), (heads, 7))),
                chosen=rig.tensor(lists[0]),
                chosen_slots=rig.tensor(lists[1]),
                missing=rig.tensor(np.zeros((heads, 7), np.uint8)),
            )
            device.select(stream, work)
            stream.synchronize()
            read = (work.chosen, work.chosen_slots, work.missing, work.left_out)
            kept = (step.cache.owner, step.cache.mass, step.cache.used)
            results.append([t.array().copy() for t in (*read, *kept)])
        for one, other in zip(*results, strict=True):
            np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(held.score.scores.array()[:, :20], scores.array())
