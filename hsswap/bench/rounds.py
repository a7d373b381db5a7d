"""``hsswap bench rounds``: speculative rounds ahead of the host, beside one read-back a round.

R1: bursts of four rounds against the same rounds, captured alike and with the same adaptive depth,
whose results the host reads one by one; against rounds that are not captured; and against plain
steps, one graph each. Tokens a second, accepted drafts, time of the calling thread a token, idle
time of the device between rounds. All arms run in turns, and every run's tokens are compared.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import numpy as np

from hsswap.bench.figures import Interval, machine
from hsswap.bench.lab import Turns, tell
from hsswap.bench.rounds_arms import (
    PLAIN,
    READ_BACK,
    WAYS,
    Decode,
    Engine,
    Idle,
    ReadBack,
    Told,
    Way,
    arm_of,
    in_bursts,
    prompts_of,
    stream_of,
)
from hsswap.bench.rounds_host import HostEngine
from hsswap.commands.generate import load_model
from hsswap.commands.interrupts import Interrupts
from hsswap.commands.option_types import count, counts, device_name, named, names_of
from hsswap.commands.output import save, say
from hsswap.commands.places import file_to_write
from hsswap.errors import ArgumentError
from hsswap.models import Llama, LlamaConfig, Tokenizer, default_model_path, open_gguf
from hsswap.models.llama_weights import LayerWeights, LlamaWeights
from hsswap.rounds import Acceptance, SequenceStart

Row = dict[str, Any]
BATCHES = (1, 4, 16)
MOST_SEQUENCES = 1024
"""Of a batch: more of them than any GPU decodes at a time."""
SMALL = LlamaConfig(
    layers=3, width=64, q_heads=4, kv_heads=2, head_dim=16, ffn_width=96, rope_base=1e4,
    rope_dims=16, rope_factor=1.0, rms_eps=1e-5, context_tokens=1024, vocab_size=40,
    tied_embeddings=True,
)  # fmt: skip
TEXTS = {
    "code": """\
for name in names:
    total += counts[name]
    if counts[name] > limit:
        over.append(name)
for name in over:
    total -= counts[name]
    print(name, counts[name])
""",
    "prose": """\
The river had frozen early that winter, and the ferry lay on its side in the reeds like an animal
asleep. Nobody in the village could remember such a cold November. Anna walked along the dike with
a basket of bread under her arm, counting the posts that still stood, and thought about the letter
which had come from the city the day before. Her brother wanted to sell the mill. He wrote that the
machines were old, that flour from abroad was cheaper, and that she should come and live with him.
She had read the page three times, first with anger, then with a kind of pity, and at last without
any feeling at all. Behind her a dog barked; smoke rose straight up from the chimneys. If the ice
held until evening, she decided, she would cross it on foot and give him her answer herself.
""",
}
"""What prompts are cut from: n-grams like code that repeats itself, and find little in prose."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Everything ``hsswap bench rounds`` takes."""
    add = parser.add_argument
    add("--json", action="store_true", help="print one JSON object on stdout and nothing else")
    add("--quick", action="store_true", help="a small model and few turns: a check, no figures")
    add("--out", type=file_to_write, metavar="F", help="also write the JSON object to a file")
    add("--device", type=device_name, default="host", metavar="NAME", help="host or cuda:N (host)")
    add("--model", type=named, metavar="M.gguf", help="a GGUF (SmolLM2-135M-Instruct)")
    add("--batch", type=counts, default=list(BATCHES), metavar="N,N", help="sequences (1,4,16)")
    add("--texts", default=",".join(TEXTS), metavar="A,B", help="prompts (code,prose)")
    add("--ways", metavar="A,B", help="only these: " + ", ".join(way.name for way in WAYS))
    add("--draft", type=count, default=4, metavar="K", help="drafts a round (4)")
    add("--tokens", type=count, default=48, metavar="N", help="tokens of each sequence a run (48)")
    add("--prompt", type=count, default=128, metavar="N", help="tokens of a prompt (128)")


def main(args: argparse.Namespace, interrupts: Interrupts) -> int:
    """Measure. Returns 0, or 1 where a floor of R1 is missed on a GPU; raises VerifyError for wrong
    tokens.
    """
    names = names_of(args.texts, list(TEXTS), "--texts")
    chosen = names_of(args.ways, [way.name for way in WAYS], "--ways")
    ways = [way for way in WAYS if way.name in chosen]
    if max(args.batch) > MOST_SEQUENCES:
        raise ArgumentError(f"--batch has {max(args.batch)}; {MOST_SEQUENCES} sequences at most")
    model: Any
    texts: dict[str, list[int]]
    if args.quick and args.device == "host":
        if args.model is not None:
            raise ArgumentError("--quick on the host takes a small model; leave --model out")
        model = small_model()
        texts = {name: list(range(SMALL.vocab_size)) * 4 for name in names}
    else:
        file = open_gguf(args.model or default_model_path())
        model, tokenizer = load_model(file, args.device), Tokenizer.from_gguf(file)
        texts = {name: tokenizer.encode(TEXTS[name]) for name in names}
    longest, context = args.prompt + args.tokens + args.draft, model.config.context_tokens
    if longest > context:
        raise ArgumentError(
            f"--prompt, --tokens and --draft come to {longest} and the model's context is {context}"
        )
    rows: list[Row] = []
    report = _report(args, rows)
    for batch in args.batch:
        for name, text in texts.items():
            prompts = prompts_of(text, batch, args.prompt)
            measured = _measure(
                args.device, model, prompts, args.tokens, args.draft, ways=ways, quick=args.quick
            )
            rows += [{"text": name, **row} for row in interrupts.run(measured)]
            if args.out:  # as it grows: a long run may be cut
                save(json.dumps(report, indent=1), args.out)
    if args.json:
        say(json.dumps(report, indent=1), sys.stdout)
    return 0 if all(row["passed"] for row in rows) else 1


def _report(args: argparse.Namespace, rows: list[Row]) -> dict[str, Any]:
    """The JSON object, with rows to come. Of a machine that does nothing else yet."""
    return {
        "bench": "rounds",
        "quick": bool(args.quick),
        "machine": machine(),
        "device": args.device,
        "k": args.draft,
        "tokens": args.tokens,
        "prompt": args.prompt,
        "rows": rows,
    }


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
        first = await _decode_of(engine, READ_BACK, opened)
        expected, _ = await first(engine.starts(READ_BACK))
        arms = {}
        for way in ways:
            decode = await _decode_of(engine, way, opened)
            arms[way.name] = arm_of(engine, way, decode, expected, told[way.name])
        turns = await Turns.of(arms, quick=quick)
        idle = {}
        for way in ways:
            with engine.watched(way) as watched:
                await arms[way.name]()
                idle[way.name] = watched()
    return [_row(way.name, len(prompts), turns, told[way.name], idle[way.name]) for way in ways]


async def _decode_of(engine: Engine, way: Way, opened: AsyncExitStack) -> Decode:
    """How a way decodes."""
    if way is PLAIN:

        async def plain(_: list[SequenceStart]) -> tuple[list[list[int]], Acceptance]:
            made = await engine.plain()
            return made, Acceptance(sum(map(len, made)), 0, 0)

        return plain
    setting = engine.setting(way)
    if way.reads_back:
        return opened.enter_context(ReadBack(setting, way.options)).run
    return partial(in_bursts, await opened.enter_async_context(stream_of(setting, way)))


def _row(name: str, batch: int, turns: Turns, told: Told, idle: Idle | None) -> Row:
    rate = Interval.of([1 / seconds for seconds in turns.seconds[name]])
    row: Row = {
        "arm": name,
        "batch": batch,
        "tokens_per_s": rate._asdict(),
        "device_us_per_round": None if idle is None else idle.round_us,
        "device_idle": None if idle is None else idle.share,
        "host_us_per_token": 1e6 * told.host_s / told.tokens,
        "acceptance": told.acceptance.share,
        "tokens_per_round": told.acceptance.tokens_a_round,
    }
    for other in {"plain", "eager", "read-back"} & set(turns.seconds):
        ratio = turns.of_turns(lambda other=other, **s: s[other] / s[name])
        row[f"against_{other.replace('-', '_')}"] = ratio._asdict()
    against = ", ".join(
        f"{row[key]['median']:.3f}x {key[8:]}" for key in sorted(row) if key.startswith("against_")
    )
    row["passed"] = name != "stream" or idle is None or _holds(row)
    tell(
        f"batch {batch:2} {name:10} {rate.median:8.2f} tokens/s, "
        f"{told.acceptance.tokens_a_round:.2f} a round, "
        f"{against}"
        + ("" if idle is None else f", idle {idle.share:.2%}, a round {idle.round_us:.0f} us")
    )
    return row


def _holds(row: Row) -> bool:
    """The floors of R1: never under one read-back a round, twice an eager loop, 2 % idle."""
    return bool(
        row.get("against_read_back", {"low": 1.0})["low"] >= 1.0
        and row.get("against_eager", {"low": 2.0})["low"] >= 2.0
        and row["device_idle"] <= 0.02
    )


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
