"""Steps that an engine captures: the same bits, no look back, and the sequence goes on after."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import hsswap
from hsswap import ArgumentError, BlockIOError, OutOfBlocks, OutOfSlots, TopK
from hsswap.captured import CapturedSteps
from hsswap.captured_top_k import CapturedTopK
from hsswap.driver.base import Graph
from hsswap.errors import CaptureError, ClosedError
from hsswap.io.memory import Fault, FaultKind
from tests.branches import Branch, alone, rows_of
from tests.driver import oracle
from tests.swap_cases import MIXED, SMALL, U16, Case, config_for, random_case
from tests.swap_watch import Linked, until, watched, within

CASE = random_case(SMALL, 900, seed=41)
OTHER = random_case(MIXED, 900, seed=42)
NAN = 0x7FC0


class Engine:
    """Static arrays of a step of ``rows`` rows, and the graph over them."""

    def __init__(self, swap: hsswap.HighSpeedSwap, case: Case, rows: int) -> None:
        self.swap, self.case, self.rows = swap, case, rows
        self.stream = swap.device.stream()
        dims = case.dims
        groups = [dims.group(layer) for layer in range(dims.layers)]
        self.keys = [np.zeros((rows, g.kv_heads, g.head_dim), np.uint16) for g in groups]
        self.values = [np.zeros((rows, g.kv_heads, g.value_dim), np.uint16) for g in groups]
        self.queries = [np.zeros((rows, g.q_heads, g.head_dim), np.uint16) for g in groups]
        self.out = [np.zeros((rows, g.q_heads, g.value_dim), np.uint16) for g in groups]

    def enqueue(self, steps: CapturedSteps, advance: int) -> None:
        """All layers of a step."""
        for layer in range(self.case.dims.layers):
            steps.append(layer, self.keys[layer], self.values[layer], stream=self.stream)
            steps.attend(layer, self.queries[layer], self.out[layer], stream=self.stream)
        if advance:
            steps.advance(advance, stream=self.stream)

    def capture(self, steps: CapturedSteps, advance: int) -> Graph:
        """The graph of a step."""
        with self.stream.capture() as graph:
            self.enqueue(steps, advance)
        return graph

    def run(self, graph: Graph, rows: list[int]) -> list[U16]:
        """One step with these rows of the case; the answers of each layer."""
        part = rows_of(self.case, rows)
        for layer in range(self.case.dims.layers):
            self.keys[layer][...] = part.keys[layer]
            self.values[layer][...] = part.values[layer]
            self.queries[layer][...] = part.queries[layer]
            self.out[layer][...] = NAN
        graph.launch(self.stream)
        self.stream.synchronize()
        return [out.copy() for out in self.out]

    def close(self) -> None:
        self.stream.close()


@asynccontextmanager
async def engine_of(swap: hsswap.HighSpeedSwap, case: Case, rows: int) -> AsyncIterator[Engine]:
    """An engine that is closed before the swap is."""
    engine = Engine(swap, case, rows)
    try:
        yield engine
    finally:
        engine.close()


def config_of(case: Case, tokens: int, *, resident: int = 0, spare: int = 20) -> hsswap.SwapConfig:
    """The host tier has room for the blocks of ``tokens`` tokens in each layer, and two tiles."""
    blocks = case.dims.blocks_of(tokens) + spare
    return config_for(
        case,
        sequences=2,
        capacity=4000,
        extra_device=resident,
        extra_host=case.dims.layers * blocks,
    )


@pytest.mark.parametrize(("resident", "linked"), [(0, False), (7, True), (400, False)])
@pytest.mark.parametrize(("case", "start"), [(CASE, 0), (CASE, 300), (OTHER, 288), (CASE, 303)])
async def test_captured_decode(case: Case, start: int, resident: int, linked: bool) -> None:
    """Token by token through several blocks, and on from there, as if nothing had been captured."""
    tokens = 36
    device = Linked() if linked else None
    async with watched(config_of(case, 640, resident=resident), device=device) as swap:
        branch = Branch(swap.sequence(), case)
        if start:
            await branch.append([*range(start)])
            await swap.flush()
        wanted = await alone(case, [*range(start + tokens)])
        async with (
            engine_of(swap, case, 1) as engine,
            branch.sequence.captured(tokens, stream=engine.stream) as steps,
        ):
            with engine.capture(steps, advance=1) as graph:
                for row in range(start, start + tokens):
                    got = engine.run(graph, [row])
                    for layer, out in enumerate(got):
                        assert (out[0] == wanted[layer][row]).all(), f"layer {layer}, row {row}"
                assert steps.length.array().tolist() == [start + tokens]
            steps.finish(start + tokens)
        branch.rows = [*range(start + tokens)]
        await branch.check(40)
        await swap.flush()
        await branch.append([*range(700, 740)])
        await branch.check(50)
        await branch.truncate(start + 20)
        await branch.check(10)


@pytest.mark.parametrize("kept", [0, 9, 16, 17, 40])
@pytest.mark.parametrize(("resident", "start"), [(0, 256), (0, 263), (400, 263)])
async def test_what_is_not_finished_is_forgotten(start: int, resident: int, kept: int) -> None:
    async with watched(config_of(CASE, 640, resident=resident)) as swap:
        branch = Branch(swap.sequence(), CASE)
        await branch.append([*range(start)])
        async with (
            engine_of(swap, CASE, 1) as engine,
            branch.sequence.captured(40, stream=engine.stream) as steps,
        ):
            with engine.capture(steps, advance=1) as graph:
                for row in range(start, start + 40):
                    engine.run(graph, [row])
            if kept:
                steps.finish(start + kept)
        branch.rows = [*range(start + kept)]
        await branch.check()
        await branch.append([*range(800, 830)])
        await branch.check(40)


async def test_rounds_with_rejected_rows() -> None:
    """The engine's kernels move the counter; rows that were rejected are written over."""
    random = np.random.default_rng(5)
    start, rows = 297, 5
    async with watched(config_of(CASE, 640)) as swap:
        branch = Branch(swap.sequence(), CASE)
        await branch.append([*range(start)])
        async with (
            engine_of(swap, CASE, rows) as engine,
            branch.sequence.captured(40, rows=rows, stream=engine.stream) as steps,
        ):
            with engine.capture(steps, advance=0) as graph:
                while len(branch.rows) <= start + 40 - rows:
                    tried = [int(row) for row in random.integers(0, 900, rows)]
                    got = engine.run(graph, tried)
                    wanted = await alone(CASE, branch.rows + tried)
                    for layer, out in enumerate(got):
                        assert (out == wanted[layer][-rows:]).all()
                    accepted = int(random.integers(1, rows + 1))
                    branch.rows = branch.rows + tried[:accepted]
                    steps.length.array()[...] = len(branch.rows)
            steps.finish(len(branch.rows))
        await branch.check(60)


async def test_a_fork_shares_what_is_captured() -> None:
    async with watched(config_of(CASE, 1000)) as swap:
        branch = Branch(swap.sequence(), CASE)
        await branch.append([*range(300)])
        other = branch.fork()
        async with (
            engine_of(swap, CASE, 1) as engine,
            branch.sequence.captured(30, stream=engine.stream) as steps,
            other.sequence.captured(30, stream=engine.stream) as more,
        ):
            with engine.capture(steps, 1) as graph, engine.capture(more, 1) as second:
                for row in range(30):
                    engine.run(graph, [600 + row])
                    engine.run(second, [700 + row])
            steps.finish(330)
            more.finish(320)
        branch.rows += [*range(600, 630)]
        other.rows += [*range(700, 720)]
        for one in (branch, other):
            await one.check(40)


async def test_others_go_on_beside_captured_steps() -> None:
    """What is held does not count as coming back: others evict what is idle, and get a reason."""
    async with watched(config_of(CASE, 600, spare=4)) as swap:
        branch, other = (Branch(swap.sequence(), CASE) for _ in range(2))
        await branch.append([*range(500)])
        async with branch.sequence.captured(16):
            for first in range(0, 800, 100):
                rows = [*range(first, first + 100)]
                await within(partial(other.append, rows))
            await other.check(30)
            with pytest.raises(OutOfSlots, match=r"raise host_slots by|can be held"):
                await within(lambda: other.sequence.captured(16).__aenter__())
        await branch.check()


async def test_what_cannot_be_captured() -> None:
    async with watched(config_of(CASE, 640)) as swap:
        branch = Branch(swap.sequence(), CASE)
        await branch.append([*range(100)])
        sequence = branch.sequence
        with pytest.raises(ArgumentError, match="rows"):
            await sequence.captured(4, rows=17).__aenter__()
        with pytest.raises(OutOfBlocks):
            await sequence.captured(3999).__aenter__()
        await sequence.append(0, CASE.keys[0][:1], CASE.values[0][:1])
        with pytest.raises(ArgumentError, match="100 to 101 tokens"):
            await sequence.captured(4).__aenter__()
        await sequence.truncate(100)
        async with engine_of(swap, CASE, 2) as engine:
            async with sequence.captured(4, stream=engine.stream) as steps:
                for call in (
                    lambda: sequence.append(0, CASE.keys[0][:1], CASE.values[0][:1]),
                    lambda: sequence.truncate(5),
                    lambda: sequence.captured(4).__aenter__(),
                    sequence.close,
                ):
                    with pytest.raises(ArgumentError, match="captured steps"):
                        await call()
                with pytest.raises(ArgumentError, match="opened for 1"):
                    engine.enqueue(steps, 0)
                with pytest.raises(ArgumentError, match="layer is 3"):
                    steps.append(3, engine.keys[0], engine.values[0])
                for length in (99, 105):
                    with pytest.raises(ArgumentError, match="length is"):
                        steps.finish(length)
                assert steps.left_out_mass(0) is None
            for ended in (
                lambda: steps.append(0, engine.keys[0], engine.values[0]),
                lambda: steps.attend(0, engine.queries[0], engine.out[0]),
                lambda: steps.advance(1),
                lambda: steps.finish(100),
                lambda: steps.length,
            ):
                with pytest.raises(ClosedError):
                    ended()
        await branch.check()


async def test_an_end_inside_a_capture_is_refused() -> None:
    """Nothing can be handed over while the stream is captured; the sequence says why it stopped."""
    async with watched(config_of(CASE, 640)) as swap, engine_of(swap, CASE, 1) as engine:
        sequence = swap.sequence()
        await sequence.append(0, CASE.keys[0][:1], CASE.values[0][:1])
        await sequence.truncate(0)
        with pytest.raises(CaptureError), engine.stream.capture():
            async with sequence.captured(4, stream=engine.stream):
                pass


async def test_a_block_that_cannot_be_read() -> None:
    bad = Fault(FaultKind.ERRNO, count=None, only="read")
    async with watched(config_of(CASE, 640), bad) as swap:
        other, sequence = swap.sequence(), swap.sequence()
        await Branch(other, CASE).append([*range(900)])  # keeps what the host tier keeps
        await Branch(sequence, CASE).append([*range(600)])
        await swap.flush()
        with pytest.raises(BlockIOError):
            await sequence.captured(8).__aenter__()


async def test_a_cancelled_opening_holds_nothing() -> None:
    gate = Fault(FaultKind.HOLD, only="read")
    async with watched(config_of(CASE, 640), gate) as swap:
        other, branch = (Branch(swap.sequence(), CASE) for _ in range(2))
        await other.append([*range(900)])
        await branch.append([*range(600)])
        await swap.flush()
        task = asyncio.ensure_future(branch.sequence.captured(8).__aenter__())
        await until(lambda: "reading=0" not in repr(swap.prefetcher))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.gate.opened.set()
        await other.sequence.close()
        async with branch.sequence.captured(8):
            pass
        await branch.check()


async def test_a_swap_that_closes_under_captured_steps() -> None:
    async with watched(config_of(CASE, 640), close_sequences=False) as swap:
        sequence = swap.sequence()
        await Branch(sequence, CASE).append([*range(300)])
        async with sequence.captured(8) as steps:
            await swap.close()
            with pytest.raises(ClosedError):
                steps.advance(1)


TOP_K = TopK(4, cache_factor=2)


def attended(steps: CapturedSteps, layer: int) -> list[list[int]]:
    """The blocks that the last step attended in each KV head."""
    captured = steps._layers[layer]
    assert isinstance(captured, CapturedTopK)
    slots, positions = (captured._tensor(name).array()[0] for name in ("attended", "positions"))
    return [row[held >= -1].tolist() for row, held in zip(positions, slots + 0, strict=True)]


@pytest.mark.parametrize("eager_first", [False, True])
async def test_captured_top_k(eager_first: bool) -> None:
    """Chosen blocks of each head, all that came since, and the mass it left out."""
    start, tokens = 805, 40
    dims = replace(SMALL, block_size=16)
    case = Case(dims, CASE.keys, CASE.values, CASE.queries)
    config = config_of(case, 900, resident=3 * TOP_K.cache_blocks(16) + 3)
    async with watched(replace(config, max_sequences=1)) as swap:
        branch = Branch(swap.sequence(top_k=TOP_K), case)
        await branch.append([*range(start)])
        if eager_first:
            result = await branch.sequence.attend(0, case.queries[0][start - 1 : start])
            await result.done()
        async with (
            engine_of(swap, case, 1) as engine,
            branch.sequence.captured(tokens, stream=engine.stream) as steps,
        ):
            with engine.capture(steps, advance=1) as graph:
                for row in range(start, start + tokens):
                    got = engine.run(graph, [row])
                    for layer, out in enumerate(got):
                        check_step(case, steps, layer, row, out, start // 16)
            steps.finish(start + tokens)
        branch.rows = [*range(start + tokens)]
        await branch.check(30)  # exact, of what was handed over
        row = start + tokens
        await branch.append([row])
        result = await branch.sequence.attend(1, case.queries[1][row : row + 1])
        await result.done()
        assert result.chosen is not None
        assert result.chosen.max() == row // 16 - 1  # codes of the new blocks are there


def check_step(
    case: Case, steps: CapturedSteps, layer: int, row: int, out: U16, ranked: int
) -> None:
    """The answer over exactly the blocks that were attended."""
    group = case.dims.group(layer)
    heads = oracle.Heads(group.group_size, group.logit_scale)
    left_out = steps.left_out_mass(layer)
    assert left_out is not None
    assert ((left_out.array() >= 0) & (left_out.array() < 1)).all()
    for head, blocks in enumerate(attended(steps, layer)):
        chosen = [b for b in blocks if b < ranked]
        assert len(set(chosen)) == TOP_K.pinned_blocks(16) + TOP_K.k
        assert {0, *range(ranked - 8, ranked)} <= set(chosen)
        seen = [b for b in blocks if b * 16 <= row]
        assert set(range(ranked, row // 16 + 1)) <= set(seen)
        tokens = [t for b in seen for t in range(b * 16, min(b * 16 + 16, row + 1))]
        part = slice(head * group.group_size, (head + 1) * group.group_size)
        keys, values = case.keys[layer][tokens], case.values[layer][tokens]
        wanted = oracle.attend(
            case.queries[layer][row : row + 1, part],
            keys[:, head : head + 1],
            values[:, head : head + 1],
            len(tokens),
            heads,
        )
        error = oracle.relative_error(oracle.decode(out[:, part]), wanted.exact)
        assert error <= wanted.tolerance()


async def test_top_k_with_too_few_blocks_is_exact() -> None:
    config = config_of(CASE, 640, resident=3 * TOP_K.cache_blocks(16))
    async with watched(replace(config, max_sequences=1)) as swap:
        sequence = swap.sequence(top_k=TOP_K)
        branch = Branch(sequence, CASE)
        await branch.append([*range(60)])
        wanted = await alone(CASE, [*range(62)])
        async with (
            engine_of(swap, CASE, 1) as engine,
            sequence.captured(2, stream=engine.stream) as steps,
        ):
            assert steps.left_out_mass(0) is None
            with engine.capture(steps, advance=1) as graph:
                for row in (60, 61):
                    for layer, out in enumerate(engine.run(graph, [row])):
                        assert (out[0] == wanted[layer][row]).all()
