"""The model in torch: against the float64 one, and through the swap on every device there is."""

from __future__ import annotations

from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsswap.commands.generate import run_job
from hsswap.commands.interrupts import Interrupts
from hsswap.errors import ArgumentError
from hsswap.models import LlamaConfig, open_gguf
from tests.models.test_llama import TOKENS, reference_logits
from tests.models.tiny_llama import Tiny, tiny_weights, write_tiny
from tests.running import TinyRun

torch = pytest.importorskip("torch")

from hsswap.models.torch_llama import (  # noqa: E402  (imports torch)
    STEP_ROWS,
    PlainTorchAttention,
    TorchLlama,
    random_weights,
)

SHAPES = {"odd": Tiny(), "tied": Tiny(layers=1, head_dim=16, rope_dims=16, tied=True)}
# As the NumPy model's: where BF16 rounds to two sides, one element differs by 2**-8 of itself.
TOLERANCE = 5e-3


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def where(request: pytest.FixtureRequest) -> Iterator[str]:
    """A device of torch, with a stream of its own."""
    if request.param == "cpu":
        yield "cpu"
        return
    with torch.cuda.stream(torch.cuda.Stream(request.param)):
        yield request.param


def tiny_model(folder: Path, tiny: Tiny, where: str) -> TorchLlama:
    path = write_tiny(folder / "tiny.gguf", tiny, tiny_weights(tiny))
    return TorchLlama.from_gguf(open_gguf(path), where)


def error(found: object, wanted: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> float:
    off = np.asarray(found.cpu(), np.float64) - wanted  # type: ignore[attr-defined]
    return float(np.linalg.norm(off) / np.linalg.norm(wanted))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chunk", [30, 7, 1])
def test_logits_are_those_of_the_reference(
    tmp_path: Path, where: str, shape: str, chunk: int
) -> None:
    tiny = SHAPES[shape]
    model = tiny_model(tmp_path, tiny, where)
    wanted = reference_logits(tiny, tiny_weights(tiny), TOKENS, np.ones(tiny.rope_dims // 2))
    plain = model.plain_attention(len(TOKENS))
    parts = [
        model.forward(TOKENS[first : first + chunk], first, plain, all_logits=True)
        for first in range(0, len(TOKENS), chunk)
    ]
    assert parts[0].dtype == torch.float32
    assert error(torch.cat(parts), wanted) < TOLERANCE
    again = model.prefill(TOKENS, model.plain_attention(len(TOKENS)), chunk_rows=11)
    assert error(again, wanted[-1]) < TOLERANCE


def test_fewer_layers_are_the_body_of_a_drafter(tmp_path: Path, where: str) -> None:
    model = tiny_model(tmp_path, SHAPES["odd"], where)
    short = TorchLlama(
        model.config,
        type(model.weights)(
            model.weights.embedding,
            model.weights.layers[:1],
            model.weights.final_norm,
            model.weights.output,
        ),
    )
    ids = torch.tensor(TOKENS, device=where)
    positions = torch.arange(len(TOKENS), device=where)
    early = model.hidden(ids, positions, model.plain_attention(30), layers=1)
    wanted = short.hidden(ids, positions, short.plain_attention(30))
    assert torch.equal(early, wanted)
    whole = model.hidden(ids, positions, model.plain_attention(30))
    assert not torch.equal(early, whole)
    chosen = torch.full((len(TOKENS),), -1, device=where)
    model.choose(whole, chosen)
    assert torch.equal(chosen, model.logits(whole).argmax(-1))
    last = model.hidden(ids, positions, model.plain_attention(30), last_only=True)
    torch.testing.assert_close(last, whole[-1:], rtol=1e-4, atol=1e-4)


class Echo:
    """Attention that gives each row its own queries back: no row sees another."""

    def attend(self, layer: int, queries: Any, keys: Any, values: Any) -> Any:
        return queries


@pytest.mark.parametrize("rows", [1, 2, 5, 15, 16, 20, 80])
def test_rows_alone_have_the_bits_of_rows_among_others(where: str, rows: int) -> None:
    """With ``least_rows``, wherever the row stands; the first layers alone too. More than 16 are a
    verify of several sequences.
    """
    config = LlamaConfig(
        layers=2, width=576, q_heads=9, kv_heads=3, head_dim=64, ffn_width=1536, rope_base=1e4,
        rope_dims=64, rope_factor=1.0, rms_eps=1e-5, context_tokens=96, vocab_size=5000,
        tied_embeddings=True,
    )  # fmt: skip
    weights = random_weights(config, where, torch.float32)
    model = TorchLlama(config, weights, least_rows=max(STEP_ROWS, rows))
    ids = torch.arange(rows, device=where) * 311 % config.vocab_size
    positions = torch.arange(rows, device=where) + 7
    together = model.logits(model.hidden(ids, positions, Echo()))
    assert together.shape == (rows, config.vocab_size)
    early = model.hidden(ids, positions, Echo(), layers=1)
    for row in range(rows):
        one = slice(row, row + 1)
        alone = model.hidden(ids[one], positions[one], Echo())
        assert torch.equal(model.logits(alone), together[one])
        assert torch.equal(model.hidden(ids[one], positions[one], Echo(), layers=1), early[one])
    usual = TorchLlama(config, model.weights)
    torch.testing.assert_close(
        usual.logits(usual.hidden(ids, positions, Echo())), together, rtol=2e-2, atol=2e-2
    )


@pytest.mark.parametrize("mode", ["exact", "topk"])
def test_a_verified_run_through_the_swap(tmp_path: Path, where: str, mode: str) -> None:
    tiny = TinyRun.make(tmp_path)
    device = "host" if where == "cpu" else where
    more: tuple[str, ...] = (
        "--tokens",
        "20",
        "--verify",
        "--dir",
        str(tmp_path / "store"),
        "--device",
        device,
    )
    if mode == "exact" and device != "host":  # a tile is a span, which is larger there
        more += ("--slots", "132", "--host-slots", "128")
    job = tiny.job("--mode", mode, *more)
    model = TorchLlama.from_gguf(job.file, where)
    with Interrupts() as interrupts:
        report, failures = run_job(job, model, interrupts, progress_to=StringIO())
    assert failures == []
    assert report.verified is not None
    assert report.verified.calls == 3 * 20
    assert 0 < report.verified.max_error <= report.verified.bound_at_max
    if mode == "exact":
        assert report.tokens_agree == 20


def test_random_weights_keep_activations_near_one(where: str) -> None:
    config = LlamaConfig(
        layers=3, width=64, q_heads=4, kv_heads=2, head_dim=16, ffn_width=96, rope_base=1e4,
        rope_dims=16, rope_factor=1.0, rms_eps=1e-5, context_tokens=64, vocab_size=50,
        tied_embeddings=False,
    )  # fmt: skip
    model = TorchLlama(config, random_weights(config, where))
    logits = model.prefill(list(range(40)), model.plain_attention(40))
    assert 0.3 < float(logits.std()) < 3.0
    same = TorchLlama(config, random_weights(config, where))
    assert torch.equal(same.prefill(list(range(40)), same.plain_attention(40)), logits)


def test_what_cannot_be_run_is_refused(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, SHAPES["odd"], "cpu")
    plain = model.plain_attention(4)
    refused: list[Any] = [[], [12], [-1], [[1]], [0.5], [0] * 1201]
    for tokens in refused:
        with pytest.raises(ArgumentError):
            model.forward(tokens, 0, plain)
    with pytest.raises(ArgumentError, match="chunk_rows"):
        model.prefill([1], plain, chunk_rows=0)
    with pytest.raises(ArgumentError, match="5 tokens do not fit"):
        model.forward([1] * 5, 0, plain)
    assert isinstance(plain, PlainTorchAttention)
