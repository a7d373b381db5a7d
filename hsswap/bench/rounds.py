"""``hsswap bench rounds``: speculative rounds ahead of the host, beside one read-back a round.

R1: bursts of four rounds against the same rounds, captured alike and with the same adaptive depth,
whose results the host reads one by one; against rounds that are not captured; and against plain
steps. Tokens a second, accepted drafts, time of the calling thread a token. All arms run in turns,
and every run's tokens are compared with those of plain decoding.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np

from hsswap.bench.common import Interval, Machine
from hsswap.bench.lab import Turns, tell
from hsswap.bench.rounds_arms import WAYS, Engine, HostEngine, Told, Way, arm_of, prompts_of
from hsswap.commands.generate import load_model
from hsswap.commands.interrupts import Interrupts
from hsswap.errors import ArgumentError
from hsswap.models import Llama, LlamaConfig, Tokenizer, default_model_path, open_gguf
from hsswap.models.llama_weights import LayerWeights, LlamaWeights

Row = dict[str, Any]
BATCHES = (1, 4, 16)
SMALL = LlamaConfig(
    layers=3, width=64, q_heads=4, kv_heads=2, head_dim=16, ffn_width=96, rope_base=1e4,
    rope_dims=16, rope_factor=1.0, rms_eps=1e-5, context_tokens=1024, vocab_size=40,
    tied_embeddings=True,
)  # fmt: skip
TEXT = """\
for name in names:
    total += counts[name]
    if counts[name] > limit:
        over.append(name)
for name in over:
    total -= counts[name]
    print(name, counts[name])
"""
"""What prompts are cut from: code, which n-grams like."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Everything ``hsswap bench rounds`` takes."""
    add = parser.add_argument
    add("--json", action="store_true", help="print one JSON object on stdout and nothing else")
    add("--quick", action="store_true", help="a small model and few turns: a check, no figures")
    add("--out", type=Path, metavar="F", help="also write the JSON object to a file")
    add("--device", default="host", metavar="NAME", help="host or cuda:N (host)")
    add("--model", type=Path, metavar="M.gguf", help="a GGUF (SmolLM2-135M-Instruct)")
    add("--batch", default=",".join(map(str, BATCHES)), metavar="N,N", help="sequences (1,4,16)")
    add("--ways", metavar="A,B", help="only these: " + ", ".join(way.name for way in WAYS))
    add("--draft", type=int, default=4, metavar="K", help="drafts a round (4)")
    add("--tokens", type=int, default=48, metavar="N", help="tokens of each sequence a run (48)")
    add("--prompt", type=int, default=128, metavar="N", help="tokens of a prompt (128)")


def main(args: argparse.Namespace, _: Interrupts) -> int:
    """Measure. Returns 0, or 1 where a floor of R1 is missed on a GPU; raises VerifyError for wrong
    tokens.
    """
    batches, ways = _numbers(args.batch), _ways(args.ways)
    for name, value in (("--draft", args.draft), ("--tokens", args.tokens)):
        if value < 1:
            raise ArgumentError(f"{name} is {value}; 1 and more")
    model: Any
    if args.quick and args.device == "host":
        model, text = small_model(), list(range(SMALL.vocab_size)) * 4
    else:
        file = open_gguf(args.model or default_model_path())
        model, text = load_model(file, args.device), Tokenizer.from_gguf(file).encode(TEXT)
    rows: list[Row] = []
    for batch in batches:
        prompts = prompts_of(text, batch, args.prompt)
        measured = _measure(
            args.device, model, prompts, args.tokens, args.draft, ways=ways, quick=args.quick
        )
        rows += asyncio.run(measured)
    result = {
        "bench": "rounds",
        "quick": bool(args.quick),
        "machine": Machine.here().as_dict(),
        "device": args.device,
        "k": args.draft,
        "tokens": args.tokens,
        "rows": rows,
    }
    text_of_all = json.dumps(result, indent=1)
    if args.out:
        args.out.write_text(text_of_all + "\n")
    if args.json:
        print(text_of_all)
    return 0 if all(row["passed"] for row in rows) else 1


async def _measure(
    device: str,
    model: Any,
    prompts: list[list[int]],
    tokens: int,
    k: int,
    *,
    ways: list[Way],
    quick: bool,
) -> list[Row]:
    """All arms for one batch, a row each."""
    told = {way.name: Told() for way in ways}
    async with AsyncExitStack() as opened:
        engine: Engine
        if device == "host":
            engine = opened.enter_context(HostEngine(model, prompts, tokens, k))
        else:
            from hsswap.bench.rounds_torch import TorchEngine

            engine = await opened.enter_async_context(
                TorchEngine.open(model, device, prompts, tokens, k)
            )
        expected = engine.plain() or [[] for _ in prompts]
        arms = {}
        for way in ways:
            stream = await opened.enter_async_context(engine.stream(way))
            arms[way.name] = arm_of(engine, way, stream, expected, told[way.name])
        turns = await Turns.of(arms, quick=quick)
        rounds_s = {way.name: engine.round_s(way) for way in ways}
    return [_row(way.name, len(prompts), turns, told[way.name], rounds_s[way.name]) for way in ways]


def _row(name: str, batch: int, turns: Turns, told: Told, round_s: float | None) -> Row:
    rate = Interval.of([1 / seconds for seconds in turns.seconds[name]])
    row: Row = {
        "arm": name,
        "batch": batch,
        "tokens_per_s": _plain(rate),
        "device_us_per_round": None if round_s is None else 1e6 * round_s,
        "device_idle": None,
        "host_us_per_token": 1e6 * told.host_s / told.tokens,
        "acceptance": told.acceptance.share,
        "tokens_per_round": told.acceptance.tokens_a_round,
    }
    if round_s is not None:
        wall_s = turns.seconds[name][-1] * told.tokens
        row["device_idle"] = 1 - told.rounds * round_s / wall_s
    for other in {"plain", "eager", "read-back"} & set(turns.seconds):
        ratio = turns.of_turns(lambda other=other, **s: s[other] / s[name])
        row[f"against_{other.replace('-', '_')}"] = _plain(ratio)
    against = ", ".join(
        f"{row[key]['median']:.3f}x {key[8:]}" for key in sorted(row) if key.startswith("against_")
    )
    row["passed"] = name != "stream" or round_s is None or _holds(row)
    tell(
        f"batch {batch:2} {name:10} {rate.median:8.2f} tokens/s, "
        f"{told.acceptance.tokens_a_round:.2f} a round, "
        f"{against}"
        + ("" if round_s is None else f", idle {row['device_idle']:.1%} of {1e6 * round_s:.0f} us")
    )
    return row


def _holds(row: Row) -> bool:
    """The floors of R1: never under one read-back a round, twice an eager loop, 2 % idle."""
    return bool(
        row.get("against_read_back", {"low": 1.0})["low"] >= 1.0
        and row.get("against_eager", {"low": 2.0})["low"] >= 2.0
        and row["device_idle"] <= 0.02
    )


def _plain(interval: Interval) -> dict[str, float]:
    return {"median": interval.median, "low": interval.low, "high": interval.high}


def _ways(text: str | None) -> list[Way]:
    names = [way.name for way in WAYS] if text is None else text.split(",")
    known = {way.name: way for way in WAYS}
    if unknown := [name for name in names if name not in known]:
        raise ArgumentError(f"--ways has {', '.join(unknown)}; known: {', '.join(known)}")
    return [known[name] for name in names]


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise ArgumentError(f"--batch is {text!r}; give numbers of sequences: 1,4,16")
    return numbers


def small_model(config: LlamaConfig = SMALL) -> Llama:
    """A Llama with random weights, for a check of the bench itself."""
    c, rng = config, np.random.default_rng(7)

    def matrix(rows: int, columns: int) -> Any:
        return (rng.standard_normal((rows, columns)) / columns**0.5).astype(np.float32)

    ones = np.ones(c.width, np.float32)
    heads = c.q_heads + 2 * c.kv_heads
    layers = tuple(
        LayerWeights(
            ones,
            matrix(heads * c.head_dim, c.width),
            matrix(c.width, c.q_heads * c.head_dim),
            ones,
            matrix(2 * c.ffn_width, c.width),
            matrix(c.width, c.ffn_width),
        )
        for _ in range(c.layers)
    )
    embedding = matrix(c.vocab_size, c.width) * np.float32(8.0)
    return Llama(c, LlamaWeights(embedding, layers, ones, embedding, None))
