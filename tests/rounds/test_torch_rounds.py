"""Rounds of the torch model on a GPU: tokens of plain decoding, captured, with both drafters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hsswap import HighSpeedSwap, SwapConfig
from hsswap.commands.decoding import dims_of
from hsswap.models import open_gguf
from hsswap.rounds import (
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

TINY = Tiny(layers=3, head_dim=16, rope_dims=16)
PROMPTS = [[(7 * i * i + i // 3) % 10 for i in range(75)], [3, 1, 4, 1, 5]]
COUNT = 60


class Appending:
    """Attention of a model through a sequence's calls that never wait."""

    def __init__(self, model: TorchLlama, sequence: Any) -> None:
        self._arrays, self._sequence = model.arrays, sequence

    def attend(self, layer: int, queries: Any, keys: Any, values: Any) -> Any:
        """See the protocol."""
        arrays, stream = self._arrays, self._arrays.stream
        assert self._sequence.try_append(layer, keys, values, stream=stream)
        out = arrays.new((*queries.shape[:2], values.shape[2]))
        assert self._sequence.try_attend(layer, queries, out, stream=stream) is not None
        return out


def plain(model: TorchLlama, prompt: list[int]) -> list[int]:
    """Greedy tokens of the baseline."""
    attention = model.plain_attention(200)
    tokens = [int(model.prefill(prompt, attention).argmax())]
    for position in range(len(prompt), len(prompt) + COUNT):
        tokens.append(model.decode(tokens[-1], position, attention))
    return tokens


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("drafter_name", ["ngram", "early-exit"])
@pytest.mark.parametrize(("k", "rounds"), [(3, 4), (1, 1), (7, 2)])
async def test_tokens_are_those_of_plain_decoding(
    tmp_path: Path, k: int, rounds: int, drafter_name: str, captured: bool
) -> None:
    """Two sequences in one batch; afterwards a plain step goes on."""
    path = write_tiny(tmp_path / "tiny.gguf", TINY, tiny_weights(TINY))
    torch_stream = torch.cuda.Stream("cuda:0")
    torch.cuda.set_stream(torch_stream)
    model = TorchLlama.from_gguf(open_gguf(path), "cuda:0")
    wanted = [plain(model, prompt) for prompt in PROMPTS]
    config = SwapConfig(
        dims_of(model.config),
        capacity_tokens=1200,
        device_slots=2 * 64 + 30,
        host_slots=2 * 64 + 90,
        max_sequences=2,
        tile_tokens=1024,
        device="cuda:0",
        io="memory",
    )
    async with HighSpeedSwap.open(config) as swap, swap.sequence() as one, swap.sequence() as two:
        attentions = [Appending(model, sequence) for sequence in (one, two)]
        starts = []
        for prompt, attention, tokens in zip(PROMPTS, attentions, wanted, strict=True):
            first = int(model.prefill(prompt, attention).argmax())
            assert first == tokens[0]
            starts.append(SequenceStart(prompt, first, len(prompt) + COUNT))
        made: list[list[int]] = [[], []]
        stream = swap.device.stream(torch_stream.cuda_stream)
        rows = TorchRows(model, torch_stream)
        vocab = model.config.vocab_size
        target = StepsTarget(swap.device, stream, [one, two], rows, k=k, vocab_size=vocab)
        with StepsEarlyExit(swap.device, target, rows, layers=1) as early:
            drafter: Drafter = early if drafter_name == "early-exit" else NgramDrafter(swap.device)
            async with RoundStream(
                *(swap.device, target, drafter),
                k=k,
                rounds=rounds,
                batch=2,
                history_tokens=200,
                options=RoundOptions(captured=captured),
                stream=stream,
            ) as speculating:
                await speculating.start(starts)
                async for burst in speculating.bursts():
                    for mine, tokens in zip(made, burst.tokens, strict=True):
                        mine += tokens
                print(drafter_name, k, rounds, speculating.acceptance)
        await target.close()
        stream.close()
        assert made == [tokens[1:] for tokens in wanted]
        for sequence, prompt, attention, tokens in zip(
            (one, two), PROMPTS, attentions, wanted, strict=True
        ):
            assert sequence.length == len(prompt) + COUNT
            logits = model.forward(tokens[-1:], sequence.length, attention)
            assert torch.isfinite(logits).all()
