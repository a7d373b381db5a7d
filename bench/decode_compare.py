"""Decode the same prompt four ways, in turn, in one process, and compare the tokens a second.

* ``plain``: the model with its whole KV cache in one array (``hsswap.models.PlainAttention``);
* ``in memory``: the same model through hsswap, with a device slot for every block;
* ``eighth``: device and host slots together an eighth of the cache, the rest on disk;
* ``eighth, no look-ahead``: the same, the next layer's blocks not read ahead.

All four are filled with the prompt first, then each decodes a slice of a few tokens in turn, every
second turn in the reverse order, so that whatever else the machine does meets all alike. A ratio to
``in memory`` and to ``plain`` is taken within one turn; of all turns the median counts, with the
interval that holds it with 95 % (order statistics).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hsswap.bench.figures import Interval, machine
from hsswap.bench.predictor_contexts import reference_text
from hsswap.commands.decoding import SwapAttention, dims_of, must_read_blocks
from hsswap.commands.planning import best_tile
from hsswap.config import SwapConfig
from hsswap.metrics import SwapStatistics
from hsswap.models import (
    Attention,
    Llama,
    PlainAttention,
    Tokenizer,
    default_model_path,
    open_gguf,
)
from hsswap.sync import BlockingSwap, blocking

EIGHTH = "eighth"
IN_MEMORY = "in memory"
PLAIN = "plain"


@dataclass
class Arm:
    """One way to run: its attention, and what was measured."""

    name: str
    attention: Attention
    swap: BlockingSwap | None = None
    tokens: list[int] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    prefill_s: float = 0.0
    before: SwapStatistics | None = None
    must_read_bytes: int = 0

    def prefill(self, model: Llama, prompt: list[int]) -> None:
        """Fill the cache, and wait until everything is on disk."""
        start = time.perf_counter()
        self.tokens.append(int(model.prefill(prompt, self.attention).argmax()))
        self.prefill_s = time.perf_counter() - start
        if self.swap is not None:
            self.swap.flush()
            self.before = self.swap.statistics()

    def decode(self, model: Llama, prompt_tokens: int, count: int) -> None:
        """One slice of ``count`` tokens."""
        start = time.perf_counter()
        for _ in range(count):
            position = prompt_tokens + len(self.tokens) - 1
            self.tokens.append(model.decode(self.tokens[-1], position, self.attention))
            if self.swap is not None:
                config = self.swap.config
                block_bytes = config.dims.block_bytes(config.dims.groups[0])
                self.must_read_bytes += must_read_blocks(config, position) * block_bytes
        self.rates.append(count / (time.perf_counter() - start))

    def ratios(self, other: Arm) -> list[float]:
        """Our rate over the other's, for each turn."""
        return [ours / theirs for ours, theirs in zip(self.rates, other.rates, strict=True)]

    def result(self, in_memory: Arm, plain: Arm) -> dict[str, Any]:
        """What is reported of this arm; bytes and waits are those of decoding, a token."""
        of_memory = Interval.of(self.ratios(in_memory))
        of_plain = Interval.of(self.ratios(plain))
        found: dict[str, Any] = {
            "tokens_per_s": statistics.median(self.rates),
            "of_memory": of_memory.median,
            "of_memory_95": of_memory[1:],
            "of_plain": of_plain.median,
            "of_plain_95": of_plain[1:],
            "prefill_s": self.prefill_s,
            "tokens": len(self.tokens),
            "tokens_as_plain": common_prefix(self.tokens, plain.tokens),
        }
        if self.swap is not None and self.before is not None:
            config, after = self.swap.config, self.swap.statistics()
            count = len(self.tokens) - 1
            found |= {
                "device_slots": config.device_slots,
                "host_slots": config.host_slots,
                "tile_tokens": config.tile_tokens,
                "bytes_read_a_token": (after.bytes_read - self.before.bytes_read) / count,
                "must_read_a_token": self.must_read_bytes / count,
                "read_wait_ms_a_token": 1e3 * (after.read_wait_s - self.before.read_wait_s) / count,
                "path": after.path,
            }
        return found


def common_prefix(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many tokens are equal before the first that differs."""
    pairs = enumerate(zip(ours, theirs, strict=True))
    return next((place for place, (a, b) in pairs if a != b), len(ours))


@contextmanager
def swap_arm(name: str, config: SwapConfig) -> Iterator[Arm]:
    """An arm that runs through a swap of its own."""
    with blocking(config) as swap, swap.sequence() as sequence:
        yield Arm(name, SwapAttention(sequence), swap)


def arms_of(model: Llama, tokens: int, directory: Path | None, stack: ExitStack) -> list[Arm]:
    """The four arms, opened on ``stack``."""
    dims = dims_of(model.config)
    blocks = dims.layers * dims.blocks_of(tokens)
    ring = 2 * dims.span_blocks
    share = blocks // 16
    c = model.config
    plain = PlainAttention(c.layers, c.kv_heads, c.head_dim, capacity_tokens=tokens)
    arms = [Arm(PLAIN, plain)]
    for name, device_slots, host_slots, look_ahead in (
        (IN_MEMORY, blocks + ring + dims.layers, max(ring, share), True),
        (EIGHTH, max(ring + dims.layers, share), max(ring, share), True),
        (f"{EIGHTH}, no look-ahead", max(ring + dims.layers, share), max(ring, share), False),
    ):
        config = SwapConfig(
            dims,
            tokens,
            device_slots,
            host_slots,
            directory=None if directory is None else directory / f"arm-{len(arms)}",
            io="auto",
            tile_tokens=best_tile(dims, device_slots, host_slots),
            look_ahead=look_ahead,
        )
        arms.append(stack.enter_context(swap_arm(name, config)))
    return arms


def table(results: dict[str, dict[str, Any]]) -> str:
    """One line an arm."""
    lines = [
        f"{'':<24}{'tokens/s':>9}{'of in memory (95 %)':>22}{'of plain (95 %)':>22}"
        f"{'MB read/token':>15}{'wait ms':>9}"
    ]
    for name, found in results.items():
        ratios = ""
        for key in ("of_memory", "of_plain"):
            low, high = found[f"{key}_95"]
            ratio = f"{found[key]:.3f} ({low:.3f}-{high:.3f})"
            ratios += f"{ratio:>22}"
        read = found.get("bytes_read_a_token", 0.0) / 1e6
        wait = found.get("read_wait_ms_a_token", 0.0)
        lines.append(f"{name:<24}{found['tokens_per_s']:>9.2f}{ratios}{read:>15.1f}{wait:>9.1f}")
    return "\n".join(lines)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("--characters", type=int, default=9300, help="characters of the prompt (9300)")
    add("--slices", type=int, default=20, help="turns of each arm (20)")
    add("--slice-tokens", type=int, default=4, help="tokens of a turn (4)")
    add("--dir", type=Path, help="where the stores are (the system's temporary folder)")
    add("--model", type=Path, help="a GGUF of the Llama architecture (SmolLM2-135M)")
    add("--out", type=Path, help="also write the JSON line to this file")
    options = parser.parse_args(arguments)
    if min(options.slices, options.slice_tokens, options.characters) < 1:
        parser.error("--characters, --slices and --slice-tokens must be 1 or more")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run all arms, print the table and one JSON line.

    Returns 1 if the arms of hsswap differ in a token. From plain attention, whose sums run in
    another order, they may differ where two tokens are nearly as likely; the place is reported.
    """
    options = parse(arguments)
    file = open_gguf(options.model or default_model_path())
    model = Llama.from_gguf(file)
    prompt = Tokenizer.from_gguf(file).encode(reference_text()[: options.characters])
    tokens = len(prompt) + options.slices * options.slice_tokens + 1
    with ExitStack() as stack:
        arms = arms_of(model, tokens, options.dir, stack)
        for arm in arms:
            arm.prefill(model, prompt)
            print(f"{arm.name}: prefill {arm.prefill_s:.2f} s", file=sys.stderr, flush=True)
        for turn in range(options.slices):
            for arm in arms if turn % 2 == 0 else reversed(arms):
                arm.decode(model, len(prompt), options.slice_tokens)
        plain, in_memory = arms[:2]
        results = {arm.name: arm.result(in_memory, plain) for arm in arms}
        same = all(arm.tokens == arms[1].tokens for arm in arms[1:])
    here = machine()
    record = {
        "bench": "decode_compare",
        "date": here.pop("date"),
        "commit": here.pop("commit"),
        "machine": {**here, "numpy": np.__version__},
        "model": file.path.stem,
        "prompt_tokens": len(prompt),
        "slices": options.slices,
        "slice_tokens": options.slice_tokens,
        "arms": results,
        "arms_of_hsswap_agree": same,
    }
    print(table(results))
    line = json.dumps(record)
    print(line)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(line + "\n")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
