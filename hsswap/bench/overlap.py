"""``hsswap bench overlap``: do reads hide behind compute (O1), what does the public call cost (O2),
and does the event loop stay free meanwhile (L1).

O1 is (read alone + compute alone - wall) / the smaller of the two, for a prefill chunk whose blocks
come from the host tier, and for decode with a layer's matrix products between attends, where a part
of the blocks comes from the store. *Alone* is the same calls with the other half muted: the
device's gathers, or its attention. The calls' own time, with both muted, is taken off all three:
it is in each of them, and would count as overlap where it rules.

L1 is how late the loop comes to a timer of the kernel that is due each millisecond, while tokens
are decoded with blocks from the store, and while the same calls read alone, as fast as they can.

O2 is the time of a public attend with everything resident, called back to back, over the device
time of the kernels that it launches (on a GPU replayed from a graph).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hsswap import HighSpeedSwap, ModelDims, Sequence, SwapConfig
from hsswap.bench.figures import machine
from hsswap.bench.lab import Lab, Muted, Turns, fill, muted
from hsswap.bench.lag import LoopLag
from hsswap.bench.overlap_rows import Row, call_row, lag_row, overlap_row
from hsswap.commands.interrupts import Interrupts
from hsswap.commands.option_types import device_name, names_of
from hsswap.commands.output import save, say
from hsswap.commands.places import file_to_write, folder_to_make

BLOCK = 16
MEASURES = ("prefill", "decode", "call", "captured")
LAG_S = 2.0
"""So long the loop is watched in each arm."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured: an 8B model's layer, or one that a CI machine runs in a second.
    ``decode_lacking``: blocks a layer that have no host slot.
    """

    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    width: int = 4096
    ffn_width: int = 14336
    prefill_tokens: int = 32768
    prefill_rows: int = 2048
    tile_tokens: int = 4096
    decode_tokens: int = 32768
    decode_tile_tokens: int = 1024
    decode_layers: int = 8
    decode_lacking: int = 40
    call_tokens: int = 32768
    calls: int = 64

    def dims(self, layers: int) -> ModelDims:
        """The cache of so many layers."""
        return ModelDims.uniform(
            layers=layers, q_heads=self.q_heads, kv_heads=self.kv_heads, head_dim=self.head_dim
        )


SMALL = Sizes(4, 2, 16, 64, 128, 1024, 64, 256, 1024, 256, 3, 40, 1024, 4)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Everything ``hsswap bench overlap`` takes."""
    add = parser.add_argument
    add("--json", action="store_true", help="print one JSON object on stdout and nothing else")
    add("--quick", action="store_true", help="small shapes and few slices: a check, no figures")
    add("--out", type=file_to_write, metavar="F", help="also write the JSON object to a file")
    add(
        "--device",
        type=device_name,
        default="cuda:0",
        metavar="NAME",
        help="cuda:N or host (cuda:0)",
    )
    add("--dir", type=folder_to_make, metavar="D", help="where decode's blocks are (the temporary "
        "folder)")  # fmt: skip
    add("--only", metavar="A,B", help=f"only these: {', '.join(MEASURES)}")


def main(args: argparse.Namespace, interrupts: Interrupts) -> int:
    """Measure. Returns 0, or 1 when a floor was missed. Raises HsswapError."""
    wanted = names_of(args.only, MEASURES, "--only")
    sizes = SMALL if args.quick else Sizes()
    rows: list[Row] = []
    report = _report(args, sizes, rows)
    with Lab.on(args.device) as lab:
        bench = _Bench(lab, sizes, args.quick, args.dir)
        for name in MEASURES:
            if name in wanted:
                rows += interrupts.run(getattr(bench, name)())
                if args.out:  # after each: who is told to end has what was measured
                    save(json.dumps(report, indent=1), args.out)
    if args.json:
        say(json.dumps(report, indent=1), sys.stdout)
    return 0 if args.quick or all(row["passed"] for row in rows) else 1


def _report(args: argparse.Namespace, sizes: Sizes, rows: list[Row]) -> dict[str, object]:
    """The JSON object, with rows to come. Of a machine that does nothing else yet."""
    return {
        "bench": "overlap",
        "quick": bool(args.quick),
        "device": args.device,
        "machine": machine(),
        "sizes": asdict(sizes),
        "rows": rows,
    }


@dataclass(frozen=True, slots=True)
class _Bench:
    lab: Lab
    sizes: Sizes
    quick: bool
    directory: Path | None

    def config(self, layers: int, tokens: int, **slots: int) -> SwapConfig:
        """Slots as given, and the least of the others."""
        dims, tile = self.sizes.dims(layers), self.sizes.tile_tokens
        ring = 2 * tile // BLOCK
        blocks = layers * (tokens // BLOCK + 1)
        return SwapConfig(
            dims,
            tokens + BLOCK,
            device_slots=slots.get("device_slots", ring + layers),
            # A scan keeps twelve tiles out of the cache at most (tiers.HostTier).
            host_slots=slots.get("host_slots", 6 * ring + blocks),
            tile_tokens=tile,
            device=self.lab.device,
            io="memory",
        )

    async def prefill(self) -> list[Row]:
        """O1: the last rows of a prompt over all of it, from the host tier."""
        s, lab = self.sizes, self.lab
        config = self.config(1, s.prefill_tokens)
        async with HighSpeedSwap.open(config) as swap, swap.sequence() as sequence:
            await fill(lab, swap, sequence, s.prefill_tokens)
            shape = (s.prefill_rows, s.q_heads, s.head_dim)
            queries, out = lab.normal(shape), lab.arrays.for_swap(lab.arrays.new(shape))

            async def attend() -> None:
                call = sequence.attend(0, queries, out, stream=lab.stream)
                await (await call).done()

            def without(*names: str) -> Callable[[], Awaitable[float]]:
                async def arm() -> float:
                    with muted(swap, *names):
                        return await lab.seconds(attend)

                return arm

            arms = {
                "wall": without(),
                "read": without("attend"),
                "compute": without("gather"),
                "calls": without("attend", "gather"),
            }
            turns = await Turns.of(arms, quick=self.quick)
        nbytes = config.dims.block_bytes(config.dims.groups[0]) * (s.prefill_tokens // BLOCK)
        name = f"prefill of {s.prefill_rows} rows over {s.prefill_tokens} tokens in host slots"
        return [overlap_row(name, turns, nbytes)]

    async def decode(self) -> list[Row]:
        """O1: a token with a layer's products between attends, some of its blocks on disk."""
        s, lab = self.sizes, self.lab
        layers, tokens = s.decode_layers, s.decode_tokens
        blocks = layers * (tokens // BLOCK)
        tile = s.decode_tile_tokens
        slots = {"host_slots": blocks + 12 * tile // BLOCK}
        everything = replace(self.config(layers, tokens, **slots), tile_tokens=tile)
        part = replace(
            everything,
            # And half a thousand slots are for what streams through (tiers.HostTier): 16 blocks a
            # layer more are read, 56, which takes about as long as its compute.
            host_slots=blocks - s.decode_lacking * layers,
            io="auto",
            directory=None if self.directory is None else self.directory / "overlap",
        )
        between = lab.between_layers(s.width, s.ffn_width, layers)
        async with (
            HighSpeedSwap.open(part) as swap,
            swap.sequence() as sequence,
            HighSpeedSwap.open(everything) as all_swap,
            all_swap.sequence() as all_sequence,
        ):
            await fill(lab, swap, sequence, tokens)
            await fill(lab, all_swap, all_sequence, tokens)
            queries = lab.normal((1, s.q_heads, s.head_dim))
            out = lab.arrays.for_swap(lab.arrays.new((1, s.q_heads, s.head_dim)))

            async def token(on: Sequence, *, products: bool) -> None:
                for layer in range(layers):
                    result = await on.attend(layer, queries, out, stream=lab.stream)
                    if products:
                        between(layer)
                await result.done()
                await asyncio.to_thread(lab.synchronize)

            async def wall() -> float:
                return await lab.seconds(lambda: token(sequence, products=True))

            async def read() -> float:
                with muted(swap, "attend"):
                    return await lab.seconds(lambda: token(sequence, products=False))

            async def compute() -> float:
                return await lab.seconds(lambda: token(all_sequence, products=True))

            async def calls() -> float:
                with muted(all_swap, "attend"):
                    return await lab.seconds(lambda: token(all_sequence, products=False))

            before = swap.statistics().bytes_read
            arms = {"wall": wall, "read": read, "compute": compute, "calls": calls}
            turns = await Turns.of(arms, quick=self.quick)
            readers = 2 * len(turns.seconds["wall"]) + 2  # wall and read, and once to warm up
            read_bytes = (swap.statistics().bytes_read - before) // readers
            path = swap.statistics().path
            lags = {name: await self._lags(arms[name]) for name in ("wall", "read")}
        amount = f"{read_bytes >> 10} KiB a token from {path}"
        name = f"decode, {layers} layers over {tokens} tokens, {amount}"
        return [overlap_row(name, turns, read_bytes), lag_row(name, lags)]

    async def _lags(self, token: Callable[[], Awaitable[float]]) -> list[float]:
        """How late the loop is while tokens are made, one after the other."""
        end = time.perf_counter() + (0.1 if self.quick else LAG_S)
        with LoopLag() as watch:
            while time.perf_counter() < end:
                await token()
        return watch.lags

    async def call(self) -> list[Row]:
        """O2: the public call with everything resident."""
        async with self._resident() as (swap, sequence, queries, out):
            stream = self.lab.stream  # an engine has its stream's handle at hand

            def enqueue() -> Any:
                result = sequence.try_attend(0, queries, out, stream=stream)
                assert result is not None  # everything is resident
                return result

            async def public() -> float:
                async def many() -> None:
                    for _ in range(self.sizes.calls):
                        result = enqueue()
                    await result.done()

                return await self.lab.seconds(many) / self.sizes.calls

            with muted(swap) as recorder:
                await enqueue().done()
            arms = {"bare": self._bare(swap, recorder), "public": public}
            turns = await Turns.of(arms, quick=self.quick)
        return [call_row(f"{self._call_name}, eager", turns, 1.5)]

    async def captured(self) -> list[Row]:
        """O2: the same in captured steps."""
        async with self._resident() as (swap, sequence, queries, out), AsyncExitStack() as undo:
            with muted(swap) as recorder:
                result = await sequence.attend(0, queries, out, stream=self.lab.stream)
                await result.done()
            bare = self._bare(swap, recorder)
            public = await self._captured(swap, sequence, (queries, out), undo)
            turns = await Turns.of({"bare": bare, "public": public}, quick=self.quick)
        return [call_row(f"{self._call_name}, captured", turns, 1.1)]

    @property
    def _call_name(self) -> str:
        return f"attend of 1 row over {self.sizes.call_tokens} tokens"

    @asynccontextmanager
    async def _resident(self) -> AsyncIterator[tuple[HighSpeedSwap, Sequence, Any, Any]]:
        """A sequence with all its blocks in device slots, a query and an output."""
        s, lab = self.sizes, self.lab
        ring = 2 * s.tile_tokens // BLOCK
        slots = ring + s.call_tokens // BLOCK + 8
        config = self.config(1, s.call_tokens, device_slots=slots, host_slots=2 * ring)
        async with HighSpeedSwap.open(config) as swap, swap.sequence() as sequence:
            await fill(lab, swap, sequence, s.call_tokens - 1)  # and the row of a captured step
            queries = lab.normal((1, s.q_heads, s.head_dim))
            yield swap, sequence, queries, lab.arrays.for_swap(lab.arrays.new(queries.shape))

    async def _captured(
        self,
        swap: HighSpeedSwap,
        sequence: Sequence,
        arrays: tuple[Any, Any],
        undo: AsyncExitStack,
    ) -> Callable[[], Awaitable[float]]:
        """Time of an attend of captured steps, launched as a graph (on the host: run)."""
        lab, s = self.lab, self.sizes
        queries, out = arrays
        stream: Any = lab.stream
        if not lab.on_gpu:
            stream = undo.enter_context(swap.device.stream())
        steps = await undo.enter_async_context(sequence.captured(1, stream=stream))
        row = (1, s.kv_heads, s.head_dim)
        steps.append(0, lab.normal(row), lab.normal(row), stream=stream)
        if lab.on_gpu:
            from hsswap.bench.launches import Graph

            def enqueue() -> None:
                steps.attend(0, queries, out, stream=stream)

            graph = Graph([enqueue], lab.torch_stream)

            async def replayed() -> float:
                return graph.run_us(s.calls) / 1e6

            return replayed

        async def run() -> float:
            async def work() -> None:
                steps.attend(0, queries, out, stream=stream)
                await stream.record().wait()

            return await lab.seconds(work)

        return run

    def _bare(self, swap: HighSpeedSwap, recorder: Muted) -> Callable[[], Awaitable[float]]:
        """Time of the kernels of one call, as the swap asked for them."""
        attend = recorder.last["attend"]
        if not self.lab.on_gpu:
            stream = swap.stream_of(None)

            async def host() -> float:
                async def work() -> None:
                    swap.device.attend(stream, attend)
                    await stream.record().wait()

                return await self.lab.seconds(work)

            return host
        from hsswap.bench.launches import Graph, StaticLauncher
        from hsswap.driver.cuda_attention import enqueue_attend

        launcher = StaticLauncher(swap.device)  # type: ignore[arg-type]
        ours = swap.stream_of(self.lab.stream)
        graph = Graph(
            [lambda: enqueue_attend(launcher, ours, attend, attend.end)], self.lab.torch_stream
        )

        async def replayed() -> float:
            return graph.run_us(self.sizes.calls) / 1e6

        return replayed
