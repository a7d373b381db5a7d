"""The examples run, and give what the model gives alone."""

from __future__ import annotations

import asyncio
import importlib.util
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

from hsswap.models import Llama, PlainAttention, Tokenizer, open_gguf
from tests.running import PROJECT, TINY, TinyRun

COUNT = 12


@pytest.fixture(scope="module")
def example() -> ModuleType:
    path = PROJECT / "examples" / "many_requests.py"
    spec = importlib.util.spec_from_file_location("many_requests", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyRun.make(tmp_path_factory.mktemp("tiny")).model


def plain_text(model_path: Path, prompt: str) -> str:
    """What the model says with everything in memory."""
    file = open_gguf(model_path)
    model, tokenizer = Llama.from_gguf(file), Tokenizer.from_gguf(file)
    attention = PlainAttention(TINY.layers, TINY.kv_heads, TINY.head_dim)
    ids = tokenizer.encode(prompt)
    tokens = [int(model.prefill(ids, attention).argmax())]
    while len(tokens) < COUNT:
        tokens.append(model.decode(tokens[-1], len(ids) + len(tokens) - 1, attention))
    return tokenizer.decode(tokens)


async def test_requests_decode_at_once_and_one_is_given_up(
    example: ModuleType, model_path: Path
) -> None:
    prompts = ["abc d" * 70, "1 cd2" * 70, "d1 ab" * 70, "12" * 175]
    pieces: list[int] = []
    told: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: told.append(context))
    ends = await example.run(
        model_path, prompts, COUNT, lambda number, _: pieces.append(number), patience=3
    )
    assert isinstance(ends[0], asyncio.CancelledError)
    for prompt, text in zip(prompts[1:], ends[1:], strict=True):
        assert text == plain_text(model_path, prompt)
    assert pieces.count(0) == 3
    assert [pieces.count(number) for number in (1, 2, 3)] == [COUNT] * 3
    # Interleaved: the one who speaks changes far more often than if they came one by one.
    assert sum(one != other for one, other in pairwise(pieces)) > 2 * len(prompts)
    assert not told
