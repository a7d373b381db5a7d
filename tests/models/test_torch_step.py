"""Decode steps on the device: the tokens of plain decoding, on every device there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hsswap import HighSpeedSwap, SwapConfig
from hsswap.commands.decoding import dims_of
from hsswap.models import open_gguf
from tests.models.tiny_llama import Tiny, tiny_weights, write_tiny

torch = pytest.importorskip("torch")

from hsswap.models.torch_llama import TorchLlama  # noqa: E402  (imports torch)
from hsswap.models.torch_step import DecodeSteps, StepAttention  # noqa: E402

TINY = Tiny(layers=3, head_dim=16, rope_dims=16)
PROMPT = [(7 * i * i + i // 3) % 10 for i in range(75)]


class Appending:
    """Attention of a model through a sequence's awaitable calls, which are run to their end."""

    def __init__(self, model: TorchLlama, sequence: Any) -> None:
        self._arrays, self._sequence = model.arrays, sequence

    def attend(self, layer: int, queries: Any, keys: Any, values: Any) -> Any:
        arrays, sequence, stream = self._arrays, self._sequence, self._arrays.stream
        assert sequence.try_append(
            layer, arrays.for_swap(keys), arrays.for_swap(values), stream=stream
        )
        out = arrays.new((*queries.shape[:2], values.shape[2]))
        result = sequence.try_attend(
            layer, arrays.for_swap(queries), arrays.for_swap(out), stream=stream
        )
        assert result is not None
        result.synchronize()
        return out


def opened(path: Path, where: str) -> tuple[TorchLlama, SwapConfig]:
    """The tiny model, on a stream of its own, and a swap for it."""
    write_tiny(path, TINY, tiny_weights(TINY))
    if where != "cpu":
        torch.cuda.set_stream(torch.cuda.Stream(where))
    model = TorchLlama.from_gguf(open_gguf(path), where)
    config = SwapConfig(
        dims_of(model.config),
        capacity_tokens=256,
        device_slots=2 * 64 + 30,
        host_slots=2 * 64 + 60,
        tile_tokens=1024,
        device="host" if where == "cpu" else where,
        io="memory",
    )
    return model, config


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
async def test_steps_choose_what_plain_decoding_chooses(tmp_path: Path, where: str) -> None:
    model, config = opened(tmp_path / "tiny.gguf", where)
    plain = model.plain_attention(200)
    token = int(model.prefill(PROMPT, plain).argmax())
    wanted = [token]
    for position in range(len(PROMPT), len(PROMPT) + 40):
        wanted.append(model.decode(wanted[-1], position, plain))
    async with HighSpeedSwap.open(config) as swap, swap.sequence() as sequence:
        attention = Appending(model, sequence)
        assert int(model.prefill(PROMPT, attention).argmax()) == token
        stream = swap.device.stream() if where == "cpu" else None
        given = model.arrays.stream if stream is None else stream
        async with sequence.captured(40, stream=given) as steps:
            loop = DecodeSteps(model, steps, token, stream=stream)
            for _ in range(40):
                loop.launch()
            assert loop.tokens() == wanted[1:]
            steps.finish(len(PROMPT) + 40)
        assert sequence.length == len(PROMPT) + 40
        following = model.decode(wanted[-1], len(PROMPT) + 40, attention)
        assert following == model.decode(wanted[-1], len(PROMPT) + 40, plain)
        if stream is not None:
            stream.close()


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
async def test_rows_verified_at_once_and_a_drafter_of_one_layer(tmp_path: Path, where: str) -> None:
    """K + 1 rows in one pass give each row's own choice; drafts use the first layer alone."""
    model, config = opened(tmp_path / "tiny.gguf", where)
    plain = model.plain_attention(200)
    model.prefill(PROMPT, plain)
    rows = [3, 1, 4, 1]
    wanted = model.forward(rows, len(PROMPT), plain, all_logits=True).argmax(-1)
    async with HighSpeedSwap.open(config) as swap, swap.sequence() as sequence:
        model.prefill(PROMPT, Appending(model, sequence))
        stream = swap.device.stream() if where == "cpu" else None
        given = model.arrays.stream if stream is None else stream
        async with sequence.captured(20, rows=4, stream=given) as steps:
            attention = StepAttention(model, steps, stream=stream)
            ids = torch.tensor(rows, device=where)
            positions = torch.arange(len(PROMPT), len(PROMPT) + 4, device=where)
            for _ in range(3):  # drafts in the first layer, then counted back
                model.hidden(ids[:1], positions[:1], attention, layers=1)
                steps.advance(1, stream=given)
            steps.advance(-3, stream=given)
            chosen = torch.full((4,), -1, device=where)
            model.choose(model.hidden(ids, positions, attention), chosen)
            assert chosen.tolist() == wanted.tolist()
            steps.finish(len(PROMPT))
        if stream is not None:
            stream.close()
