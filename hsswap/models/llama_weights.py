"""The weights of a Llama, from the tensors of a GGUF file, whose layout ``[out, in]`` they keep."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hsswap.bf16 import F32
from hsswap.models.config import LlamaConfig
from hsswap.models.gguf_file import GgufFile, check_tensors, read_tensors

_HEAD_NORMS = ("attn_q_norm", "attn_k_norm")
_GEMMA3_NORMS = {
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "post_attn_norm": "post_attention_norm",
    "post_ffn_norm": "post_ffw_norm",
}


@dataclass(frozen=True)
class LayerWeights:
    """One layer, float32. Rows of ``qkv``: all q heads, all k heads, all v heads; of ``gate_up``:
    gate, then up.
    """

    attn_norm: F32  # [width]
    qkv: F32  # [(q_heads + 2 kv_heads) * head_dim, width]
    out: F32  # [width, q_heads * head_dim]
    ffn_norm: F32  # [width]
    gate_up: F32  # [2 * ffn_width, width]
    down: F32  # [width, ffn_width]
    # Of Gemma 3 alone.
    q_norm: F32 | None = None  # [head_dim]
    k_norm: F32 | None = None  # [head_dim]
    post_attn_norm: F32 | None = None  # [width]
    post_ffn_norm: F32 | None = None  # [width]


@dataclass(frozen=True)
class LlamaWeights:
    """All weights, float32. ``output`` is the same array as ``embedding`` where they are tied."""

    embedding: F32  # [vocab_size, width]
    layers: tuple[LayerWeights, ...]
    final_norm: F32  # [width]
    output: F32  # [vocab_size, width]
    rope_factors: F32 | None  # [rope_dims / 2]: each divides the frequency of its pair


def load_weights(file: GgufFile, config: LlamaConfig) -> LlamaWeights:
    """Dequantise all tensors of ``file`` to float32: 4 bytes a parameter.

    Raises ``ModelError`` if a tensor is missing, superfluous, of the wrong shape, of a type that
    cannot be dequantised, or cut off.
    """
    check_tensors(file, _tensor_shapes(file, config))
    targets: dict[str, F32] = {}

    def new(name: str, *shape: int) -> F32:
        return targets.setdefault(name, np.empty(shape, np.float32))

    def fused(width: int, rows_of: dict[str, int]) -> F32:
        whole = np.empty((sum(rows_of.values()), width), np.float32)
        first = 0
        for name, rows in rows_of.items():
            targets[name] = whole[first : first + rows]
            first += rows
        return whole

    c = config
    q_width, kv_width = c.q_heads * c.head_dim, c.kv_heads * c.head_dim
    embedding = new("token_embd.weight", c.vocab_size, c.width)
    layers = []
    for layer in range(c.layers):
        at = f"blk.{layer}."
        qkv = {"attn_q.weight": q_width, "attn_k.weight": kv_width, "attn_v.weight": kv_width}
        gate_up = {"ffn_gate.weight": c.ffn_width, "ffn_up.weight": c.ffn_width}
        more: dict[str, F32] = {}
        if c.is_gemma3:
            more = {
                field: new(f"{at}{name}.weight", c.head_dim if name in _HEAD_NORMS else c.width)
                for field, name in _GEMMA3_NORMS.items()
            }
        layers.append(
            LayerWeights(
                attn_norm=new(at + "attn_norm.weight", c.width),
                qkv=fused(c.width, {at + name: rows for name, rows in qkv.items()}),
                out=new(at + "attn_output.weight", c.width, q_width),
                ffn_norm=new(at + "ffn_norm.weight", c.width),
                gate_up=fused(c.width, {at + name: rows for name, rows in gate_up.items()}),
                down=new(at + "ffn_down.weight", c.width, c.ffn_width),
                **more,
            )
        )
    scaled = "rope_freqs.weight" in file.tensors
    weights = LlamaWeights(
        embedding=embedding,
        layers=tuple(layers),
        final_norm=new("output_norm.weight", c.width),
        output=embedding if c.tied_embeddings else new("output.weight", c.vocab_size, c.width),
        rope_factors=new("rope_freqs.weight", c.rope_dims // 2) if scaled else None,
    )
    read_tensors(file, targets)
    if c.is_gemma3:
        for own in weights.layers:
            _make_pairs_adjacent(own, c)
    return weights


def _make_pairs_adjacent(own: LayerWeights, c: LlamaConfig) -> None:
    """Of files whose RoPE turns dims (i, i + d / 2): reorder q's and k's dims, which changes no
    product of the two, so that pairs are neighbours as in Llama's files.
    """
    order = np.arange(c.head_dim).reshape(2, -1).T.ravel()
    heads = own.qkv[: (c.q_heads + c.kv_heads) * c.head_dim].reshape(-1, c.head_dim, c.width)
    heads[...] = heads[:, order]
    for norm in (own.q_norm, own.k_norm):
        assert norm is not None
        norm[...] = norm[order]


def read_rope_factors(file: GgufFile) -> F32 | None:
    """What divides the frequency of each pair ``[rope_dims / 2]``, None for a model without.

    Raises ``ModelError`` for a damaged file.
    """
    if "rope_freqs.weight" not in file.tensors:
        return None
    factors = np.empty(file.tensors["rope_freqs.weight"].shape, np.float32)
    read_tensors(file, {"rope_freqs.weight": factors})
    return factors


def _tensor_shapes(file: GgufFile, c: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor the model must have, and no other, with its row-major shape."""
    q_width, kv_width = c.q_heads * c.head_dim, c.kv_heads * c.head_dim
    of_layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (c.width,),
        "attn_q": (q_width, c.width),
        "attn_k": (kv_width, c.width),
        "attn_v": (kv_width, c.width),
        "attn_output": (c.width, q_width),
        "ffn_norm": (c.width,),
        "ffn_gate": (c.ffn_width, c.width),
        "ffn_up": (c.ffn_width, c.width),
        "ffn_down": (c.width, c.ffn_width),
    }
    if c.is_gemma3:
        for name in _GEMMA3_NORMS.values():
            of_layer[name] = (c.head_dim,) if name in _HEAD_NORMS else (c.width,)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (c.vocab_size, c.width),
        "output_norm.weight": (c.width,),
    }
    if not c.tied_embeddings:
        shapes["output.weight"] = (c.vocab_size, c.width)
    if "rope_freqs.weight" in file.tensors:
        shapes["rope_freqs.weight"] = (c.rope_dims // 2,)
    # A false layer count must not cost time or memory: the first missing layer ends it.
    for layer in range(min(c.layers, len(file.tensors))):
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    return shapes
