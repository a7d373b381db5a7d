"""A Llama of odd sizes with random weights, and its GGUF file, written by the gguf package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

from hsswap.bf16 import F32

WORDS = ["a", "b", "c", "d", "Ġ", "1", "2", "ab", "abc", "Ġa", "<|end|>", "Ċ"]
MERGES = ["a b", "ab c", "Ġ a"]
CONTROL = 3


@dataclass(frozen=True)
class Tiny:
    """Sizes on purpose unlike each other: three query heads a KV head, part of a head rotated."""

    layers: int = 2
    width: int = 36
    q_heads: int = 6
    kv_heads: int = 2
    head_dim: int = 10
    rope_dims: int = 8
    ffn_width: int = 52
    vocab_size: int = len(WORDS)
    context_tokens: int = 1200
    rope_base: float = 5000.0
    rms_eps: float = 0.05  # large enough to matter
    tied: bool = False


Change = Callable[[gguf.GGUFWriter], None]


def tiny_weights(tiny: Tiny, seed: int = 7) -> dict[str, F32]:
    """Random weights by tensor name, row-major, scaled so that activations stay near 1."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> F32:
        values = rng.standard_normal((rows, columns)) / np.sqrt(columns)
        return np.asarray(values, np.float32)

    def norm() -> F32:
        return np.asarray(1.0 + 0.2 * rng.standard_normal(tiny.width), np.float32)

    q_width, kv_width = tiny.q_heads * tiny.head_dim, tiny.kv_heads * tiny.head_dim
    weights = {"token_embd.weight": matrix(tiny.vocab_size, tiny.width) * np.float32(6.0)}
    for layer in range(tiny.layers):
        weights |= {
            f"blk.{layer}.attn_norm.weight": norm(),
            f"blk.{layer}.attn_q.weight": matrix(q_width, tiny.width) * np.float32(2.0),
            f"blk.{layer}.attn_k.weight": matrix(kv_width, tiny.width) * np.float32(2.0),
            f"blk.{layer}.attn_v.weight": matrix(kv_width, tiny.width),
            f"blk.{layer}.attn_output.weight": matrix(tiny.width, q_width),
            f"blk.{layer}.ffn_norm.weight": norm(),
            f"blk.{layer}.ffn_gate.weight": matrix(tiny.ffn_width, tiny.width),
            f"blk.{layer}.ffn_up.weight": matrix(tiny.ffn_width, tiny.width),
            f"blk.{layer}.ffn_down.weight": matrix(tiny.width, tiny.ffn_width),
        }
    weights["output_norm.weight"] = norm()
    if not tiny.tied:
        weights["output.weight"] = matrix(tiny.vocab_size, tiny.width)
    return weights


def write_tiny(
    path: Path,
    tiny: Tiny,
    weights: Mapping[str, F32],
    *,
    change: Change | None = None,
    arch: str = "llama",
    pre: str = "smollm",
) -> Path:
    """Write the model with a small tokenizer. ``change`` may add to the writer at the end."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(tiny.layers)
    writer.add_context_length(tiny.context_tokens)
    writer.add_embedding_length(tiny.width)
    writer.add_feed_forward_length(tiny.ffn_width)
    writer.add_head_count(tiny.q_heads)
    writer.add_head_count_kv(tiny.kv_heads)
    writer.add_key_length(tiny.head_dim)
    writer.add_value_length(tiny.head_dim)
    writer.add_rope_dimension_count(tiny.rope_dims)
    writer.add_rope_freq_base(tiny.rope_base)
    writer.add_layer_norm_rms_eps(tiny.rms_eps)
    writer.add_vocab_size(tiny.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(WORDS)
    writer.add_token_types([CONTROL if word == "<|end|>" else 1 for word in WORDS])
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(WORDS.index("<|end|>"))
    for name, values in weights.items():
        writer.add_tensor(name, values)
    if change is not None:
        change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
