"""An engine that captures a step of a sequence: static arrays, a stream and the graph over them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np

import hsswap
from hsswap.captured import CapturedSteps
from hsswap.driver.base import Graph
from tests.branches import rows_of
from tests.swap_cases import U16, Case, config_for

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


@asynccontextmanager
async def decoding(
    swap: hsswap.HighSpeedSwap, sequence: hsswap.Sequence, case: Case, tokens: int
) -> AsyncIterator[tuple[CapturedSteps, Callable[[int], list[U16]]]]:
    """Captured steps of one row, for so many tokens, and a call that runs one: with a row of the
    case, to the answers of each layer.
    """
    async with (
        engine_of(swap, case, 1) as engine,
        sequence.captured(tokens, stream=engine.stream) as steps,
    ):
        with engine.capture(steps, advance=1) as graph:
            yield steps, lambda row: engine.run(graph, [row])


def check_row(answers: list[U16], wanted: list[U16], row: int) -> None:
    """A step's answers are the bits of that row."""
    for layer, out in enumerate(answers):
        assert (out[0] == wanted[layer][row]).all(), f"layer {layer}, row {row}"


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
