"""The Llama forward pass in NumPy float32, and Gemma 3's. It holds no KV cache: attention is
somebody else's.

One layer, for the rows of a chunk:

    h     = rms_norm(x) * attn_norm                       [rows, width]
    q,k,v = h qkv^T, q and k rotated, rounded to BF16     [rows, heads, head_dim]
    x    += attend(layer, q, k, v) out^T
    h     = rms_norm(x) * ffn_norm
    x    += (silu(h gate^T) * (h up^T)) down^T

Gemma 3 (arXiv 2503.19786): x begins as the embedding times the root of the width; q and k have
norms before they are rotated; what is added to x has a norm behind it; GELU in place of SiLU; most
layers see a window of tokens.

Weights keep GGUF's layout ``[out, in]``, C-contiguous, fused where they share an input. For one row
NumPy then calls sgemv, which reads each weight once: SmolLM2-135M's 538 MB in 12 ms on two cores
that sum a plain array at 38 GB/s and multiply one large matrix at 47 GB/s. The transposed layout
took 13 ms, and is no faster for chunks.

llama.cpp's converter permutes the rows of q and k so that RoPE rotates adjacent pairs
(2i, 2i+1), where Hugging Face's own files rotate (i, i + head_dim / 2); the files are read as they
are. A pair is one complex number here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hsswap.bf16 import F32, U16, from_float32, to_float32
from hsswap.errors import ArgumentError
from hsswap.models.arrays import HostArrays
from hsswap.models.config import LlamaConfig, read_config
from hsswap.models.gguf_file import GgufFile
from hsswap.models.llama_weights import LayerWeights, LlamaWeights, load_weights
from hsswap.models.plain import PlainAttention

TokenIds = Sequence[int] | NDArray[np.integer[Any]]

# Rows of one prefill chunk. Matrix products reach 234 GFLOP/s on two cores at 256 rows (223 at 64,
# 244 at 512), and a chunk's scores against 8,192 tokens stay at 25 MB a KV head of SmolLM2.
CHUNK_ROWS_DEFAULT = 256

_ROPE_ROWS_MIN = 1024


class Attention(Protocol):
    """What the model needs of a KV cache; hsswap provides it."""

    def attend(self, layer: int, queries: U16, keys: U16, values: U16) -> U16:
        """Append ``keys`` and ``values`` to the layer's cache; attention of ``queries`` over it.

        ``queries`` is ``[rows, q_heads, head_dim]``, ``keys`` and ``values`` are
        ``[rows, kv_heads, head_dim]``: BF16 codes, C-contiguous, RoPE applied. They are the
        caller's own and stay valid only during the call.

        Returns ``[rows, q_heads, head_dim]`` BF16 codes. Row ``i`` sees every token appended before
        and the rows ``0 .. i`` of this call (of a layer with a window, the last of them), with
        logits scaled by ``head_dim ** -0.5``; query head
        ``h`` uses KV head ``h // (q_heads // kv_heads)``. Layers are called in order 0, 1, 2, ...
        for each chunk.
        """
        ...


class Llama:
    """A Llama model. It keeps no state of a sequence; one object may serve many, on one thread.

    Attributes: ``config``, ``weights``, ``arrays``.
    """

    def __init__(self, config: LlamaConfig, weights: LlamaWeights) -> None:
        self.arrays = HostArrays()
        self.config = config
        self.weights = weights
        none = np.empty((0, config.rope_dims // 2), np.complex64)
        kinds = {config.rope_of(layer) for layer in range(config.layers)}
        self._rope = dict.fromkeys(kinds, none)

    @classmethod
    def from_gguf(cls, file: GgufFile) -> Llama:
        """Read configuration and weights of ``file``. Raises ``ModelError`` as those do."""
        config = read_config(file)
        return cls(config, load_weights(file, config))

    def forward(
        self,
        tokens: TokenIds,
        position: int,
        attention: Attention,
        *,
        all_logits: bool = False,
        rows_apart: bool = False,
        layers: int | None = None,
        on_layer: Callable[[int, F32], None] | None = None,
    ) -> F32:
        """Run ``tokens``, the first of which stands at ``position``, through all layers.

        ``attention`` must hold exactly ``position`` tokens in every layer, and holds
        ``position + len(tokens)`` afterwards. Returns float32 logits of the last token
        ``[vocab_size]``, or of all ``[len(tokens), vocab_size]``.

        Matrix products of several rows round otherwise than those of one. With ``rows_apart`` each
        row has its own, and comes out as from a call with it alone, bit for bit, for the price of
        reading all weights for each. ``layers``: through the first ones only, and from there to the
        logits, which is a draft of the whole (early exit).

        ``on_layer`` is called before each layer with its number and its input, ``[rows, width]``.

        Raises ``ArgumentError``, before anything changes, if there are no tokens, if one is not in
        the vocabulary, or if they reach past ``config.context_tokens``. What ``attention`` raises
        passes through; the sequence is then in an unknown state.
        """
        parts = [slice(r, r + 1) for r in range(len(tokens))] if rows_apart else [slice(None)]
        hidden = self._layers(
            tokens,
            position,
            attention,
            parts,
            layers=self.config.layers if layers is None else layers,
            on_layer=on_layer,
            last_only=not (all_logits or rows_apart),
        )
        logits = np.concatenate([self._logits(hidden[part]) for part in parts])
        return logits if all_logits else logits[-1]

    def prefill(
        self,
        tokens: TokenIds,
        attention: Attention,
        *,
        position: int = 0,
        chunk_rows: int = CHUNK_ROWS_DEFAULT,
        progress: Callable[[int, int], None] | None = None,
    ) -> F32:
        """Run a prompt in chunks of at most ``chunk_rows``.

        Returns the float32 logits after it, ``[vocab_size]``. ``progress`` is called after each
        chunk with the tokens done and the tokens in all. Raises ``ArgumentError`` as ``forward``
        does, for the whole prompt and before anything changes.
        """
        if chunk_rows <= 0:
            raise ArgumentError(f"chunk_rows must be positive, not {chunk_rows}")
        ids = check_tokens(tokens, position, self.config)
        logits: F32 | None = None
        for first in range(0, len(ids), chunk_rows):
            chunk = ids[first : first + chunk_rows]
            done = first + len(chunk)
            logits = self.forward(chunk, position + first, attention)
            if progress is not None:
                progress(done, len(ids))
        assert logits is not None  # there is at least one token
        return logits

    def decode(self, token: int, position: int, attention: Attention) -> int:
        """One greedy step: run ``token`` at ``position``, return the likeliest next token's id.

        Of equals the lowest id. Raises as ``forward`` does.
        """
        return int(self.forward([token], position, attention).argmax())

    def plain_attention(self, capacity_tokens: int) -> PlainAttention:
        """The baseline: everything in memory."""
        c = self.config
        windows = [c.window_of(layer) for layer in range(c.layers)]
        return PlainAttention(
            c.layers, c.kv_heads, c.head_dim, capacity_tokens=capacity_tokens, windows=windows
        )

    def layer_queries(self, layer: int, hidden: F32, position: int) -> U16:
        """BF16 queries ``[rows, q_heads, head_dim]`` that a layer makes of input ``[rows, width]``.

        That of the layer before gives nearly its own, a layer early (InfiniGen, arXiv 2406.19707).
        """
        c, w = self.config, self.weights.layers[layer]
        normed = _rms_norm(hidden, w.attn_norm, c.rms_eps)
        q = (normed @ w.qkv[: c.q_heads * c.head_dim].T).reshape(len(hidden), -1, c.head_dim)
        if w.q_norm is not None:
            q = _rms_norm(q, w.q_norm, c.rms_eps)
        turned = q[:, :, : c.rope_dims].view(np.complex64)
        turned *= self._rope_rows(layer, position, len(hidden))[:, None, :]
        return from_float32(q)

    def _layers(
        self,
        tokens: TokenIds,
        position: int,
        attention: Attention,
        parts: list[slice],
        *,
        layers: int,
        on_layer: Callable[[int, F32], None] | None,
        last_only: bool,
    ) -> F32:
        """The residual stream after the layers, ``[rows, width]``, or of its last row alone.

        Rows of one of ``parts`` share their matrix products.
        """
        c, ids = self.config, check_tokens(tokens, position, self.config)
        rows, q_heads, kv_heads, head_dim = len(ids), c.q_heads, c.kv_heads, c.head_dim
        x: F32 = self.weights.embedding[ids]
        if c.is_gemma3:
            x *= np.float32(c.width**0.5)
        for layer, w in enumerate(self.weights.layers[:layers]):
            if on_layer is not None:
                on_layer(layer, x)
            qkv = np.concatenate(
                [_rms_norm(x[part], w.attn_norm, c.rms_eps) @ w.qkv.T for part in parts]
            ).reshape(rows, -1, head_dim)
            if w.q_norm is not None and w.k_norm is not None:
                both = q_heads + kv_heads
                qkv[:, :q_heads] = _rms_norm(qkv[:, :q_heads], w.q_norm, c.rms_eps)
                qkv[:, q_heads:both] = _rms_norm(qkv[:, q_heads:both], w.k_norm, c.rms_eps)
            turned = qkv[:, : q_heads + kv_heads, : c.rope_dims].view(np.complex64)
            turned *= self._rope_rows(layer, position, rows)[:, None, :]
            codes = from_float32(qkv)
            attended = attention.attend(
                layer,
                np.ascontiguousarray(codes[:, :q_heads]),
                np.ascontiguousarray(codes[:, q_heads : q_heads + kv_heads]),
                np.ascontiguousarray(codes[:, q_heads + kv_heads :]),
            )
            if attended.shape != (rows, q_heads, head_dim) or attended.dtype != np.uint16:
                raise ArgumentError(
                    f"attend returned {attended.dtype} {attended.shape}, and uint16 "
                    f"{(rows, q_heads, head_dim)} was expected"
                )
            if last_only and layer == layers - 1:
                # Of the last layer's rows only keys and values matter, and those are appended.
                x, attended = x[-1:], attended[-1:]
            for part in parts:
                self._behind_attention(x[part], attended[part], w)
        return x

    def _behind_attention(self, x: F32, attended: U16, w: LayerWeights) -> None:
        """The rest of a layer, in place."""
        eps = self.config.rms_eps
        added = to_float32(attended).reshape(len(x), -1) @ w.out.T
        x += added if w.post_attn_norm is None else _rms_norm(added, w.post_attn_norm, eps)
        gate_up = _rms_norm(x, w.ffn_norm, eps) @ w.gate_up.T
        gated = _gelu_gated(gate_up) if self.config.is_gemma3 else _gated(gate_up)
        added = gated @ w.down.T
        x += added if w.post_ffn_norm is None else _rms_norm(added, w.post_ffn_norm, eps)

    def _logits(self, hidden: F32) -> F32:
        """``[rows, vocab_size]`` of ``[rows, width]``."""
        normed = _rms_norm(hidden, self.weights.final_norm, self.config.rms_eps)
        logits: F32 = normed @ self.weights.output.T
        return logits

    def _rope_rows(self, layer: int, position: int, rows: int) -> NDArray[np.complex64]:
        """exp(i * angle) of ``rows`` positions, ``[rows, rope_dims / 2]``, from a growing table."""
        end, kind = position + rows, self.config.rope_of(layer)
        table = self._rope[kind]
        if end > len(table):
            c, have = self.config, len(table)
            # At most doubled each time, never past the context: a 128k context costs 64 MB of
            # table only if it is used.
            size = min(max(end, 2 * have, _ROPE_ROWS_MIN), c.context_tokens)
            base, factor = kind
            frequency = rope_frequencies(c, self.weights.rope_factors, base)
            angle = np.outer(np.arange(have, size) / factor, frequency)
            more = np.exp(1j * angle).astype(np.complex64)
            table = self._rope[kind] = np.concatenate([table, more])
        return table[position:end]


def check_tokens(tokens: TokenIds, position: int, config: LlamaConfig) -> NDArray[np.int64]:
    """The tokens as an array. Raises ``ArgumentError`` if they or the position pass the limits."""
    ids = np.asarray(tokens)
    if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
        raise ArgumentError("tokens must be a non-empty flat sequence of integers")
    limit = config.context_tokens
    if position < 0 or position + len(ids) > limit:
        raise ArgumentError(
            f"tokens {position} .. {position + len(ids) - 1} do not fit the model's context of "
            f"{limit} tokens; shorten the prompt or generate fewer tokens"
        )
    if ids.min() < 0 or ids.max() >= config.vocab_size:
        raise ArgumentError(f"a token id is not in 0..{config.vocab_size - 1}")
    return ids.astype(np.int64, copy=False)


def rope_frequencies(
    config: LlamaConfig, factors: F32 | None, base: float | None = None
) -> NDArray[np.float64]:
    """Radians a position of each pair of dims, ``[rope_dims / 2]``, for a base or the model's."""
    c, base = config, base or config.rope_base
    frequency: NDArray[np.float64] = base ** (-np.arange(0, c.rope_dims, 2) / c.rope_dims)
    return frequency if factors is None else frequency / factors


def _rms_norm(x: F32, weight: F32, eps: float) -> F32:
    """``x / rms(x) * weight`` over the last axis, float32 ``[..., width]``."""
    square_sum: F32 = np.vecdot(x, x)
    scale = 1.0 / np.sqrt(square_sum / np.float32(x.shape[-1]) + np.float32(eps))
    normed: F32 = x * scale[..., None]
    normed *= weight
    return normed


def _gated(gate_up: F32) -> F32:
    """``silu(gate) * up`` of ``[rows, 2 * ffn_width]``: float32 ``[rows, ffn_width]``."""
    half = gate_up.shape[1] // 2
    gate, up = gate_up[:, :half], gate_up[:, half:]
    result: F32 = np.negative(gate)
    # exp overflows to infinity for gates under -88, and gate / infinity is the right limit, 0.
    with np.errstate(over="ignore"):
        np.exp(result, out=result)
    result += np.float32(1.0)
    np.divide(gate, result, out=result)
    result *= up
    return result


def _gelu_gated(gate_up: F32) -> F32:
    """``gelu(gate) * up``, GELU by its tanh formula (arXiv 1606.08415, section 2), as Gemma's."""
    half = gate_up.shape[1] // 2
    gate, up = gate_up[:, :half], gate_up[:, half:]
    inner = np.float32((2 / np.pi) ** 0.5) * (gate + np.float32(0.044715) * gate * gate * gate)
    result: F32 = np.tanh(inner)
    result += np.float32(1.0)
    result *= gate
    result *= np.float32(0.5)
    result *= up
    return result
