"""Rounds of the torch model on a GPU: tokens of plain decoding, captured, with both drafters."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hsswap import HighSpeedSwap, Sequence, SwapConfig
from hsswap.commands.decoding import dims_of
from hsswap.driver import cuda_graph
from hsswap.models import open_gguf
from hsswap.rounds import (
    Burst,
    Drafter,
    NgramDrafter,
    RoundOptions,
    RoundStream,
    SequenceStart,
    StepsEarlyExit,
    StepsTarget,
)
from tests.models.tiny_llama import Tiny, tiny_weights, write_tiny

torch = pytest.importorskip("torch")

from hsswap.models.torch_llama import TorchLlama  # noqa: E402  (imports torch)
from hsswap.models.torch_rounds import TorchRows  # noqa: E402

pytestmark = pytest.mark.gpu

TINY = Tiny(layers=3, head_dim=16, rope_dims=16, context_tokens=2400)
PROMPTS = (tuple((7 * i * i + i // 3) % 10 for i in range(75)), (3, 1, 4, 1, 5))
COUNT = 60


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's file."""
    return write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf", TINY, tiny_weights(TINY))


class Crossing:
    """Attention of a model in a thread through a sequence's calls, on the loop where they wait."""

    def __init__(self, model: TorchLlama, sequence: Sequence) -> None:
        self._arrays, self._sequence = model.arrays, sequence
        self._loop = asyncio.get_running_loop()

    def on_stream(self, torch_stream: Any, call: Any, tokens: list[int]) -> Any:
        """``call(tokens, self)`` on the stream."""
        with torch.cuda.stream(torch_stream):
            return call(tokens, self)

    def attend(self, layer: int, queries: Any, keys: Any, values: Any) -> Any:
        """See the protocol."""
        arrays, stream = self._arrays, self._arrays.stream
        out = arrays.new((*queries.shape[:2], values.shape[2]))

        async def both() -> None:
            await self._sequence.append(layer, keys, values, stream=stream)
            await self._sequence.attend(layer, queries, out, stream=stream)

        asyncio.run_coroutine_threadsafe(both(), self._loop).result()
        return out


def plain(model: TorchLlama, prompt: tuple[int, ...]) -> list[int]:
    """Greedy tokens of the baseline."""
    attention = model.plain_attention(len(prompt) + COUNT)
    tokens = [int(model.prefill(list(prompt), attention).argmax())]
    for position in range(len(prompt), len(prompt) + COUNT):
        tokens.append(model.decode(tokens[-1], position, attention))
    return tokens


@dataclass(frozen=True)
class Case:
    """One run: ``drafter`` by name, and prompts that fit into memory or do not."""

    k: int
    rounds: int
    drafter: str
    captured: bool = True
    prompts: tuple[tuple[int, ...], ...] = PROMPTS
    session: int = 512

    def config(self, model: TorchLlama) -> SwapConfig:
        """Tiers of two tiles and a little more."""
        return SwapConfig(
            dims_of(model.config),
            capacity_tokens=sum(map(len, self.prompts)) + 1200,
            device_slots=2 * 64 + 30,
            host_slots=2 * 64 + 90,
            max_sequences=len(self.prompts),
            tile_tokens=1024,
            device="cuda:0",
            io="memory",
        )


async def run(path: Path, case: Case) -> list[Burst]:
    """Decode in rounds, and compare with plain decoding; the bursts there were."""
    torch_stream = torch.cuda.Stream("cuda:0")
    torch.cuda.set_stream(torch_stream)
    model = TorchLlama.from_gguf(open_gguf(path), "cuda:0")
    wanted = [plain(model, prompt) for prompt in case.prompts]
    bursts: list[Burst] = []
    async with HighSpeedSwap.open(case.config(model)) as swap, AsyncExitStack() as opened:
        sequences = [
            await opened.enter_async_context(swap.sequence()) for _ in range(len(case.prompts))
        ]
        starts = []
        for prompt, sequence, tokens in zip(case.prompts, sequences, wanted, strict=True):
            attention = Crossing(model, sequence)
            prefill = partial(attention.on_stream, torch_stream, model.prefill, list(prompt))
            first = int((await asyncio.to_thread(prefill)).argmax())
            assert first == tokens[0]
            starts.append(SequenceStart(prompt, first, len(prompt) + COUNT))
        stream = swap.device.stream(torch_stream.cuda_stream)
        rows = TorchRows(model, torch_stream)
        target = StepsTarget(
            *(swap.device, stream, sequences, rows),
            k=case.k,
            vocab_size=model.config.vocab_size,
            session_tokens=case.session,
        )
        with StepsEarlyExit(swap.device, target, rows, layers=1) as early:
            drafter: Drafter = early if case.drafter == "early" else NgramDrafter(swap.device)
            async with RoundStream(
                *(swap.device, target, drafter),
                k=case.k,
                rounds=case.rounds,
                batch=len(case.prompts),
                history_tokens=max(map(len, case.prompts)) + COUNT + 1,
                options=RoundOptions(captured=case.captured),
                stream=stream,
            ) as speculating:
                await speculating.start(starts)
                bursts += [burst async for burst in speculating.bursts()]
        await target.close()
        stream.close()
        for s, (prompt, sequence, tokens) in enumerate(
            zip(case.prompts, sequences, wanted, strict=True)
        ):
            assert [t for burst in bursts for t in burst.tokens[s]] == tokens[1:]
            assert sequence.length == len(prompt) + COUNT
    return bursts


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("drafter", ["ngram", "early"])
@pytest.mark.parametrize(("k", "rounds"), [(3, 4), (1, 1), (7, 2)])
async def test_tokens_are_those_of_plain_decoding(
    tiny: Path, k: int, rounds: int, drafter: str, captured: bool
) -> None:
    """Two sequences in one batch, bursts of the rounds asked for."""
    bursts = await run(tiny, Case(k, rounds, drafter, captured))
    assert max(burst.rounds for burst in bursts) == rounds
    assert {burst.why for burst in bursts} == {""}


@pytest.mark.parametrize("drafter", ["ngram", "early"])
@pytest.mark.parametrize("lengths", [(1900,), (1900, 40)])
async def test_blocks_only_on_disk_make_rounds_single(
    tiny: Path, drafter: str, lengths: tuple[int, ...]
) -> None:
    """A sequence that no tier holds: one round at a time, the same tokens."""
    prompts = tuple(tuple((7 * i * i + i // 3) % 10 for i in range(n)) for n in lengths)
    bursts = await run(tiny, Case(3, 4, drafter, prompts=prompts))
    assert {burst.rounds for burst in bursts} == {1}
    assert "host_slots" in bursts[0].why


async def test_graphs_that_are_gone_count_no_more(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are opened again and again, each time with a new graph, on streams that stay."""
    monkeypatch.setattr(cuda_graph, "MOST_CAPTURES", 3)
    await run(tiny, Case(3, 2, "ngram", session=8))
