"""What a decode step of a layer costs the caller's thread, by how many blocks the sequence has.

Thread time and Python calls of one append and one attend of a row, where all blocks are in device
slots, where all are in the host tier, and in top-k mode. The device's own work, which grows, is in
other threads; what would read all blocks there is muted, since on the host device it empties the
caches of the processor that the thread runs on. In top-k mode it is muted once the steps have
warmed up: from then on each step has the choice that was made last.

    python bench/step_cost.py --blocks 1000,10000,100000 --out bench/results/step_cost.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hsswap import HighSpeedSwap, ModelDims, PredictorConfig, Sequence, SwapConfig, TopK
from hsswap.bench.decode import Nowhere
from hsswap.bench.figures import Interval, machine
from hsswap.bench.lab import muted

DIMS = ModelDims.uniform(layers=2, q_heads=2, kv_heads=2, head_dim=8, block_size=1)
K = 64
ROWS = 8192
KINDS = ("device", "host", "top-k")
READ_ALL = ("attend", "score", "select")
"""Operations of the device whose time grows with the blocks."""


def config_of(kind: str, blocks: int) -> SwapConfig:
    """Slots for everything, in one tier or the other."""
    few = 4096
    every = DIMS.layers * (blocks + few)
    return SwapConfig(
        DIMS,
        capacity_tokens=blocks + few,
        device_slots=few + (2 * every if kind == "device" else DIMS.layers * 4 * K),
        host_slots=every + 16 * few,
        io="memory",
        tile_tokens=1024,
        predictor=PredictorConfig("projection", rank=1),
    )


async def filled(swap: HighSpeedSwap, kind: str, blocks: int) -> Sequence:
    """A sequence of so many blocks, all of them written to the store."""
    sequence = swap.sequence(top_k=TopK(K) if kind == "top-k" else None)
    zeros = np.zeros((ROWS, 2, 8), np.uint16)
    for layer in range(DIMS.layers):
        for start in range(0, blocks, ROWS):
            rows = zeros[: min(ROWS, blocks - start)]
            await sequence.append(layer, rows, rows)
            await swap.flush()
    return sequence


async def step(sequence: Sequence, row: Any, out: Any) -> None:
    """One decode step: both layers."""
    for layer in range(DIMS.layers):
        if not sequence.try_append(layer, row, row):
            await sequence.append(layer, row, row)
        result = sequence.try_attend(layer, row, out)
        if result is None:
            result = await sequence.attend(layer, row, out)
        await result.done()


class Calls:
    """Counts calls of Python and of C functions in this thread."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        self.count += event in ("call", "c_call")


@dataclass
class Arm:
    """A sequence of one length, and what its steps cost."""

    blocks: int
    sequence: Sequence
    swap: HighSpeedSwap
    seconds: list[float] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)

    async def turn(self, row: Any, out: Any, *, count: bool) -> None:
        """One step, timed or counted."""
        if count:
            calls = Calls()
            sys.setprofile(calls)
            await step(self.sequence, row, out)
            sys.setprofile(None)
            self.calls.append(calls.count)
            return
        start = time.thread_time()
        await step(self.sequence, row, out)
        self.seconds.append(time.thread_time() - start)


async def measure(kind: str, lengths: list[int], turns: int) -> list[dict[str, Any]]:
    """A layer's step at each length, in alternating turns."""
    async with AsyncExitStack() as stack:
        arms: list[Arm] = []
        for blocks in lengths:
            opened = HighSpeedSwap.open(config_of(kind, blocks), io=Nowhere())
            swap = await stack.enter_async_context(opened)
            arms.append(Arm(blocks, await filled(swap, kind, blocks), swap))
        row, out = np.zeros((1, 2, 8), np.uint16), np.zeros((1, 2, 8), np.uint16)
        for turn in range(-80, turns):
            if turn == -40:
                for arm in arms:
                    stack.enter_context(muted(arm.swap, *READ_ALL))
            for arm in arms[:: 1 if turn % 2 else -1]:
                await arm.turn(row, out, count=turn % 4 == 0)
            if turn < 0:
                for arm in arms:
                    arm.seconds.clear()
                    arm.calls.clear()
        first = arms[0].seconds
        return [
            {
                "kind": kind,
                "blocks": arm.blocks,
                "us_a_layer": 1e6 * statistics.median(arm.seconds) / DIMS.layers,
                "calls_a_layer": statistics.median(arm.calls) / DIMS.layers,
                "over_the_first": Interval.of(
                    [a / b for a, b in zip(arm.seconds, first, strict=True)]
                )._asdict(),
                "misses": arm.swap.statistics().misses,
            }
            for arm in arms
        ]


def main(tell: Callable[..., None] = print) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    add = parser.add_argument
    lengths, kinds = "1000,10000,100000", ",".join(KINDS)
    add("--blocks", default=lengths, metavar="N,N", help=f"of a sequence ({lengths})")
    add("--kinds", default=kinds, metavar="A,B", help=f"where the blocks are ({kinds})")
    add("--turns", type=int, default=400, help="steps of each length (400)")
    add("--out", type=Path, metavar="F", help="also write the rows to a JSON file")
    args = parser.parse_args()
    rows = []
    for kind in args.kinds.split(","):
        for row in asyncio.run(measure(kind, list(map(int, args.blocks.split(","))), args.turns)):
            ratio = row["over_the_first"]
            tell(
                f"{kind}, {row['blocks']} blocks: {row['us_a_layer']:.0f} us, "
                f"{row['calls_a_layer']:.0f} calls a layer, {ratio['median']:.2f} "
                f"[{ratio['low']:.2f}, {ratio['high']:.2f}] of the first, {row['misses']} misses"
            )
            rows.append(row)
    if args.out:
        result = {"machine": machine(), "rows": rows}
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
