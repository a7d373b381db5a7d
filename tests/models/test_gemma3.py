"""Gemma 3 against a float64 version written apart, its tokenizer, and its dims in the swap."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from hsswap.bf16 import F32
from hsswap.commands.decoding import SwapAttention, dims_of
from hsswap.config import SwapConfig
from hsswap.errors import ModelError
from hsswap.models import Llama, Tokenizer, open_gguf
from hsswap.models.pieces import PieceEncoder
from hsswap.sync import blocking
from tests.models.test_llama import TOKENS, TOLERANCE, distance, round_bf16
from tests.models.tiny_llama import WORDS, Tiny, tiny_weights, write_tiny

F64 = NDArray[np.float64]
TINY = Tiny(layers=7, head_dim=16, rope_dims=16, tied=True)
WINDOW = 6
"""Layer 5 of 7 sees everything."""


def gemma_weights(tiny: Tiny) -> dict[str, F32]:
    rng = np.random.default_rng(11)
    weights = tiny_weights(tiny)
    for layer in range(tiny.layers):
        for name, dim in (
            ("attn_q_norm", tiny.head_dim),
            ("attn_k_norm", tiny.head_dim),
            ("post_attention_norm", tiny.width),
            ("post_ffw_norm", tiny.width),
        ):
            values = 1 + 0.3 * rng.standard_normal(dim)
            weights[f"blk.{layer}.{name}.weight"] = values.astype(np.float32)
    return weights


def write_gemma(path: Path, tiny: Tiny = TINY, window: int = WINDOW) -> Path:
    def add(writer: gguf.GGUFWriter) -> None:
        if window:
            writer.add_sliding_window(window)

    return write_tiny(path, tiny, gemma_weights(tiny), change=add, arch="gemma3")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Llama:
    path = write_gemma(tmp_path_factory.mktemp("gemma") / "g.gguf")
    return Llama.from_gguf(open_gguf(path))


def rotate_halves(x: F64, position: int, base: float) -> F64:
    """Pairs (i, i + d / 2), one at a time."""
    half, out = len(x) // 2, x.copy()
    for i in range(half):
        angle = position * base ** (-2 * i / len(x))
        a, b = x[i], x[i + half]
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[i + half] = a * math.sin(angle) + b * math.cos(angle)
    return out


def gelu(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def reference_logits(tiny: Tiny, weights: dict[str, F32], tokens: list[int]) -> F64:
    """Float64 logits ``[tokens, vocab]``, one token, one head, one layer at a time."""
    w = {name: values.astype(np.float64) for name, values in weights.items()}

    def norm(x: F64, name: str) -> F64:
        normed: F64 = x / np.sqrt(np.mean(x**2) + tiny.rms_eps) * w[name + ".weight"]
        return normed

    cache: dict[tuple[int, int], list[tuple[F64, F64]]] = {}
    logits = []
    for position, token in enumerate(tokens):
        x = w["token_embd.weight"][token] * math.sqrt(tiny.width)
        for layer in range(tiny.layers):
            at, everything = f"blk.{layer}.", layer == 5
            base = tiny.rope_base if everything else 10000.0
            h = norm(x, at + "attn_norm")
            q, k, v = (
                (w[f"{at}attn_{name}.weight"] @ h).reshape(-1, tiny.head_dim) for name in "qkv"
            )
            for head in range(tiny.kv_heads):
                key = rotate_halves(norm(k[head], at + "attn_k_norm"), position, base)
                cache.setdefault((layer, head), []).append((round_bf16(key), round_bf16(v[head])))
            outs = []
            for head in range(tiny.q_heads):
                seen = cache[layer, head // (tiny.q_heads // tiny.kv_heads)]
                seen = seen if everything else seen[-WINDOW:]
                query = rotate_halves(norm(q[head], at + "attn_q_norm"), position, base)
                scores = np.array([round_bf16(query) @ key for key, _ in seen]) / 4
                share = np.exp(scores - scores.max())
                share /= share.sum()
                outs.append(round_bf16(share @ np.array([value for _, value in seen])))
            added = w[at + "attn_output.weight"] @ np.concatenate(outs)
            x = x + norm(added, at + "post_attention_norm")
            h = norm(x, at + "ffn_norm")
            gate = np.array([gelu(g) for g in w[at + "ffn_gate.weight"] @ h])
            added = w[at + "ffn_down.weight"] @ (gate * (w[at + "ffn_up.weight"] @ h))
            x = x + norm(added, at + "post_ffw_norm")
        logits.append(w["token_embd.weight"] @ norm(x, "output_norm"))
    return np.array(logits)


@pytest.mark.parametrize("chunk", [1, 7, 30])
def test_against_float64(model: Llama, chunk: int) -> None:
    wanted = reference_logits(TINY, gemma_weights(TINY), TOKENS)
    attention = model.plain_attention(4)
    parts = [
        model.forward(TOKENS[first : first + chunk], first, attention, all_logits=True)
        for first in range(0, len(TOKENS), chunk)
    ]
    assert distance(np.concatenate(parts), wanted) < TOLERANCE


def test_early_queries_are_the_layers_own(model: Llama) -> None:
    seen: list[np.ndarray] = []
    hidden: list[F32] = []

    class Watched:
        def attend(self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
            seen.append(q.copy())
            return np.zeros_like(q)

    model.forward(TOKENS, 0, Watched(), on_layer=lambda layer, x: hidden.append(x.copy()))
    for layer in (0, 5):
        assert (model.layer_queries(layer, hidden[layer], 0) == seen[layer]).all()


def test_through_a_swap(model: Llama) -> None:
    """Layers with a window and without are groups of their own; the same tokens come out."""
    dims = dims_of(model.config)
    assert [(group.layers, group.window) for group in dims.groups] == [
        (5, WINDOW), (1, None), (1, WINDOW),
    ]  # fmt: skip
    bases = [group.rope.base for group in dims.groups if group.rope is not None]
    assert bases == [10000.0, TINY.rope_base, 10000.0]
    tokens = (TOKENS * 12)[:350]
    config = SwapConfig.plan(
        dims, tokens=len(tokens) + 16, device_bytes=2_000_000, host_bytes=4_000_000
    )
    with blocking(config) as swap, swap.sequence() as sequence:
        ours = model.prefill(tokens, SwapAttention(sequence, arrays=model.arrays))
    plain = model.prefill(tokens, model.plain_attention(400))
    assert distance(ours, plain) < TOLERANCE


@pytest.mark.parametrize(
    ("tiny", "window", "words"),
    [
        (TINY, 0, "sliding_window = 0"),
        (replace(TINY, layers=62, width=4, ffn_width=4, vocab_size=12), 6, "block_count = 62"),
        (replace(TINY, rope_dims=8), 6, "8 RoPE dims"),
    ],
)
def test_what_is_not_supported_is_named(
    tmp_path: Path, tiny: Tiny, window: int, words: str
) -> None:
    file = open_gguf(write_gemma(tmp_path / "g.gguf", tiny, window))
    with pytest.raises(ModelError, match=words):
        Llama.from_gguf(file)


PIECES = [
    "<unk>",
    "<s>",
    "<0x61>",
    "<0xC3>",
    "<0xA9>",
    "▁",
    "b",
    "c",
    "▁b",
    "bc",
    "▁bc",
    "cb",
    "\n\n",
]
SCORES = [0.0, 0.0, 0.0, 0.0, 0.0, -9.0, -8.0, -7.0, -3.0, -2.0, -5.0, -1.0, -1000.0]
KINDS = [2, 3, 6, 6, 6, 1, 1, 1, 1, 1, 1, 1, 4]


def slowly_merged(text: str) -> list[int]:
    """The best pair of all, again and again."""
    ids = {piece: i for i, piece in enumerate(PIECES) if KINDS[i] in (1, 4)}
    parts = list(text.replace(" ", "▁"))
    while True:
        pairs = [
            (SCORES[ids[a + b]], -i)
            for i, (a, b) in enumerate(itertools.pairwise(parts))
            if a + b in ids
        ]
        if not pairs:
            break
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    spelled = {0x61: 2, 0xC3: 3, 0xA9: 4}
    return [
        i
        for p in parts
        for i in ([ids[p]] if p in ids else [spelled.get(b, 0) for b in p.encode()])
    ]


@pytest.mark.parametrize("seed", range(20))
def test_pieces_are_merged_by_score(seed: int) -> None:
    random = np.random.default_rng(seed)
    text = "".join(random.choice(list("bc aé\n"), 60))
    assert PieceEncoder(PIECES, SCORES, KINDS).encode(text) == slowly_merged(text)


def test_a_tokenizer_of_pieces_comes_back_to_the_text(tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter, prefix: bool = False) -> None:
        writer.add_sliding_window(WINDOW)
        writer.add_tokenizer_model("llama")
        writer.add_token_list(PIECES)
        writer.add_token_types(KINDS)
        writer.add_token_scores(SCORES)
        writer.add_add_space_prefix(prefix)
        writer.add_bos_token_id(1)
        writer.add_add_bos_token(True)

    tokenizer = Tokenizer.from_gguf(open_gguf(pieces_file(tmp_path / "p.gguf", add)))
    text = "bc cb\n\né a bbb"
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_id == 1
    assert 12 in ids
    assert tokenizer.decode(ids) == text
    with pytest.raises(ModelError, match="a space before every text"):
        Tokenizer.from_gguf(
            open_gguf(pieces_file(tmp_path / "q.gguf", lambda writer: add(writer, True)))
        )


def pieces_file(path: Path, change: object) -> Path:
    writer = gguf.GGUFWriter(path, "gemma3")
    assert callable(change)
    change(writer)
    writer.add_eos_token_id(0)
    writer.add_tensor("x", np.zeros(1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


assert len(PIECES) == len(SCORES) == len(KINDS)
assert len(WORDS) == TINY.vocab_size
