"""``hsswap bench decode``: a whole decode step of an 8B-shaped model, its cache beyond the GPU's.

D1: top-k attention with a tenth of the cache in device slots and the rest in the host tier, against
dense attention with everything resident, both captured in a CUDA graph. D2: the same against other
ways to use host memory: (a) the same misses, decided by the host each layer; (b) one copy a block
for all k; (c) transformers' offloaded cache. D3: how often the host waits for the device a token.

Weights are random. K, V and Q are synthetic with the statistics of a real model's attention
(:mod:`hsswap.bench.synthetic`), printed beside the results; the model's own projections run and
their results are replaced. All arms run in turns, in one process, on one model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

from hsswap import HighSpeedSwap, LayerGroup, ModelDims, PredictorConfig, SwapConfig, TopK
from hsswap.bench.decode_arms import Arm, Arms, Problem, arms_for
from hsswap.bench.figures import machine
from hsswap.bench.lab import Lab, Turns, tell
from hsswap.bench.synthetic import BLOCK, Shape
from hsswap.commands.interrupts import Interrupts
from hsswap.commands.option_types import at_most, device_name, names_of
from hsswap.commands.output import save, say
from hsswap.commands.places import file_to_write
from hsswap.io.base import Operation, Transfer
from hsswap.io.memory import MemoryIO
from hsswap.models import LlamaConfig
from hsswap.rope import Rope

Row = dict[str, Any]
FLOORS = {32768: 0.8, 131072: 1.2}
"""D1, by tokens."""

AGAINST = {"host-decided": ("D2a", 1.2), "copies": ("D2b", 3.0), "offloaded": ("D2c", 10.0)}
"""D2: number and floor of each arm."""

PREDICTORS = ("codes", "projection")
PROMPT_TOKENS = 1088
"""Of the sequence, with queries, for a predictor that must see some."""

OFFLOADED_TOKENS = 32768
"""Longest for the offloaded cache: torch rounds pinned memory up to powers of two, so that a token
more than 131,072 takes 34 GB of it, and as much again on its way.
"""

TILE_TOKENS = 4096
STEPS = 64
"""Different queries; then they come again, when the unit cache has long dropped their blocks."""

MODEL_8B = LlamaConfig(
    layers=32, width=4096, q_heads=32, kv_heads=8, head_dim=128, ffn_width=14336, rope_base=5e5,
    rope_dims=128, rope_factor=1.0, rms_eps=1e-5, context_tokens=131200, vocab_size=128256,
    tied_embeddings=False,
)  # fmt: skip
MODEL_SMALL = replace(
    MODEL_8B, layers=2, width=64, q_heads=4, kv_heads=2, head_dim=16, ffn_width=96, rope_dims=16,
    context_tokens=2048, vocab_size=50,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Size:
    """Tokens, and blocks that top-k chooses: about 3 %."""

    tokens: int
    k: int
    cache_factor: int = 3


SIZES = (Size(32768, 64), Size(131072, 256))
SMALL = (Size(1024, 4),)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Everything ``hsswap bench decode`` takes."""
    add = parser.add_argument
    add("--json", action="store_true", help="print one JSON object on stdout and nothing else")
    add("--quick", action="store_true", help="a small model and few slices: a check, no figures")
    add("--out", type=file_to_write, metavar="F", help="also write the JSON object to a file")
    add(
        "--device",
        type=device_name,
        default="cuda:0",
        metavar="NAME",
        help="cuda:N or host (cuda:0)",
    )
    add("--tokens", metavar="N,N", help="only these lengths: 32768, 131072")
    add("--arms", metavar="A,B", help="beside dense and top-k only these of D2 (all)")
    add("--predictor", choices=PREDICTORS, default=PREDICTORS[0], help="(%(default)s)")
    add("--layers", type=at_most(1024), metavar="N", help="layers of the model (32)")


def main(args: argparse.Namespace, interrupts: Interrupts) -> int:
    """Measure. Returns 0, or 1 when a floor was missed. Raises HsswapError."""
    model = MODEL_SMALL if args.quick else MODEL_8B
    if args.layers is not None:
        model = replace(model, layers=args.layers)
    sizes: tuple[Size, ...] = SMALL if args.quick else SIZES
    lengths = names_of(args.tokens, [str(size.tokens) for size in sizes], "--tokens")
    sizes = tuple(size for size in sizes if str(size.tokens) in lengths)
    chosen = [] if args.arms == "" else names_of(args.arms, list(AGAINST), "--arms")
    rows: list[Row] = []
    report = _report(args, model, rows)
    with Lab.on(args.device) as lab:
        arms = arms_for(lab, model)
        for size in sizes:
            some = tuple(n for n in chosen if n != "offloaded" or size.tokens <= OFFLOADED_TOKENS)

            async def measure(size: Size = size, some: tuple[str, ...] = some) -> None:
                async for row in _measure(lab, arms, model, size, some, args):
                    rows.append(row)
                    if args.out:  # after each row: the longest may not fit the machine
                        save(json.dumps(report, indent=1), args.out)

            interrupts.run(measure())
    if args.json:
        say(json.dumps(report, indent=1), sys.stdout)
    return 0 if args.quick or all(row["passed"] for row in rows) else 1


def _report(args: argparse.Namespace, model: LlamaConfig, rows: list[Row]) -> dict[str, object]:
    """The JSON object, with rows to come. Of a machine that does nothing else yet."""
    return {
        "bench": "decode",
        "quick": bool(args.quick),
        "device": args.device,
        "machine": machine(),
        "model": asdict(model),
        "rows": rows,
    }


def config_of(
    model: LlamaConfig, size: Size, device: str, predictor: str = PREDICTORS[0]
) -> SwapConfig:
    """Slots for two sequences, one to be captured and its fork: a unit cache a layer each, the ring
    for what is exact, and host slots for every block.
    """
    c = model
    places = Shape(c.q_heads, c.kv_heads, c.head_dim, 0, 0).places
    rope = Rope(10000.0, places, "adjacent")  # of the synthetic keys, not the model's
    group = LayerGroup(c.layers, c.q_heads, c.kv_heads, c.head_dim, rope=rope)
    dims = ModelDims((group,), BLOCK)
    ring = 2 * TILE_TOKENS // BLOCK
    blocks = size.tokens // BLOCK
    cached = TopK(size.k, size.cache_factor).cache_blocks(BLOCK)
    return SwapConfig(
        dims,
        capacity_tokens=2 * size.tokens + 4096,
        device_slots=ring + 2 * dims.layers * (1 + cached),
        host_slots=3 * ring + dims.layers * (blocks + 128),
        max_sequences=2,
        device=device,
        io="memory",
        tile_tokens=TILE_TOKENS,
        predictor=PredictorConfig(kind=predictor),
    )


class Nowhere(MemoryIO):
    """A store that keeps nothing: every block stays in the host tier, and none is read again."""

    def _move(self, transfer: Transfer) -> None:
        assert transfer.operation is Operation.WRITE


async def _measure(
    lab: Lab,
    arms: Arms,
    model: LlamaConfig,
    size: Size,
    chosen: tuple[str, ...],
    args: argparse.Namespace,
) -> AsyncIterator[Row]:
    """All arms at one length: first D1 and D3, then D2."""
    c, quick, start = model, args.quick, time.perf_counter()
    prompt = min(PROMPT_TOKENS, size.tokens - 1) if args.predictor == "codes" else 0
    shape = Shape(c.q_heads, c.kv_heads, c.head_dim, size.tokens - 1, STEPS, prompt)
    top_k = TopK(size.k, size.cache_factor)
    async with AsyncExitStack() as undo:
        config = config_of(model, size, lab.device, args.predictor)
        swap = await undo.enter_async_context(HighSpeedSwap.open(config, io=Nowhere()))
        sequence = await undo.enter_async_context(swap.sequence(top_k=top_k))
        problem = Problem(lab, swap, sequence, shape, size.k)
        tell(f"opened after {time.perf_counter() - start:.1f} s")
        traits = await arms.fill(problem)
        await swap.flush()
        tell(f"filled after {time.perf_counter() - start:.1f} s")
        used = await arms.open(problem, chosen, undo)
        tell(f"all arms ready after {time.perf_counter() - start:.1f} s")
        error = await arms.error(used["dense"], used["top-k"])
        timed = {name: _timed(lab, arm) for name, arm in used.items()}
        turns = await Turns.of({name: timed.pop(name) for name in ("dense", "top-k")}, quick=quick)
        waits = await arms.waits(used["top-k"])
        missed, left_out = arms.missed(problem)
        cached = top_k.cache_blocks(BLOCK) * BLOCK / size.tokens
        tell(
            f"{size.tokens} tokens, k {size.k}, {cached:.1%} of the cache in device slots, "
            f"{missed:.1f} units missed a layer; trace: {traits}; left out {left_out:.3f}, error "
            f"{error:.3f}"
        )
        common = {
            "tokens": size.tokens,
            "k": size.k,
            "predictor": args.predictor,
            "cached_share": cached,
            "trace": asdict(traits),
            "missed_units_a_layer": missed,
            "missed_share": missed / (c.kv_heads * (size.k + top_k.pinned_blocks(BLOCK))),
            "left_out_mass": left_out,
            "error_against_dense": error,
        }
        yield _ratio("D1", "dense", turns, FLOORS.get(size.tokens, 0.0), common)
        tell(f"D3: the host waits {waits} times a token")
        yield {"id": "D3", "tokens": size.tokens, "waits": waits, "passed": waits == 0}
        for name, arm in timed.items():
            turns = await Turns.of({"top-k": _timed(lab, used["top-k"]), name: arm}, quick=quick)
            number, floor = AGAINST[name]
            yield _ratio(number, name, turns, floor, {"tokens": size.tokens})
    tell(f"{size.tokens} tokens took {time.perf_counter() - start:.1f} s")


def _timed(lab: Lab, arm: Arm) -> Callable[[], Awaitable[float]]:
    """Seconds a token of one slice."""

    async def slice_() -> float:
        async def tokens() -> None:
            for _ in range(arm.tokens):
                await arm.token()
            await asyncio.to_thread(lab.synchronize)

        return await lab.seconds(tokens) / arm.tokens

    return slice_


def _ratio(number: str, against: str, turns: Turns, floor: float, common: Row) -> Row:
    """How many times as fast top-k is."""
    ratio = turns.of_turns(lambda **seconds: seconds[against] / seconds["top-k"])
    ours, theirs = turns.median_us("top-k"), turns.median_us(against)
    tell(
        f"{number}: top-k {ours.median:.0f} us a token, {against} {theirs.median:.0f}: "
        f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}], floor {floor}"
    )
    times = {"top-k_us": ours._asdict(), f"{against}_us": theirs._asdict()}
    return {
        "id": number,
        "against": against,
        "ratio": ratio._asdict(),
        "floor": floor,
        "passed": ratio.low >= floor,
        **times,
        **common,
    }
