"""The baseline: the same model with its whole KV cache in memory.

``PlainAttention`` is what hsswap is measured against and tested with, so it is made to be fast: the
cache is float32 (no conversion when it is read), it grows by doubling, each KV head's query rows go
through BLAS together, and nothing loops over tokens or heads in Python.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hsswap.bf16 import F32, U16, from_float32, to_float32
from hsswap.errors import ArgumentError

_CAPACITY_TOKENS = 256


class PlainAttention:
    """Dense causal attention over an ordinary in-memory float32 KV cache: the baseline.

    Implements ``hsswap.models.llama.Attention``. Logits, softmax and output are float32; the output
    is rounded to BF16. Takes ``8 * kv_heads * head_dim`` bytes a token and layer, up to twice that
    while room is left for more. Not for use from two threads at once.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        *,
        capacity_tokens: int = _CAPACITY_TOKENS,
        windows: Sequence[int | None] = (),
    ) -> None:
        """``capacity_tokens`` is the room made at first; it doubles when it is full. ``windows``:
        the last tokens that each layer's rows see, None: all; empty: all in every layer.

        Raises ``ArgumentError`` if a size is not positive.
        """
        if min(layers, kv_heads, head_dim, capacity_tokens) <= 0:
            raise ArgumentError("layers, kv_heads, head_dim and capacity_tokens must be positive")
        shape = (kv_heads, capacity_tokens, head_dim)
        self._keys: list[F32] = [np.empty(shape, np.float32) for _ in range(layers)]
        self._values: list[F32] = [np.empty(shape, np.float32) for _ in range(layers)]
        self._lengths = [0] * layers
        self._windows = tuple(windows) or (None,) * layers

    def length(self, layer: int) -> int:
        """The tokens now in ``layer``'s cache."""
        return self._lengths[layer]

    def attend(self, layer: int, queries: U16, keys: U16, values: U16) -> U16:
        """Append and attend; shapes and meaning as in ``hsswap.models.llama.Attention.attend``.

        Raises ``ArgumentError``, before anything changes, for a layer or shapes that do not fit.
        """
        if not 0 <= layer < len(self._keys):
            raise ArgumentError(f"layer {layer} is not in 0..{len(self._keys) - 1}")
        kv_heads, _, head_dim = self._keys[layer].shape
        rows, q_heads = queries.shape[0], queries.shape[1]
        expected = (rows, kv_heads, head_dim)
        if keys.shape != expected or values.shape != expected or queries.shape[2] != head_dim:
            raise ArgumentError(
                f"queries {queries.shape}, keys {keys.shape}, values {values.shape} do not fit a "
                f"cache of {kv_heads} KV heads of {head_dim}"
            )
        if rows == 0 or q_heads == 0 or q_heads % kv_heads:
            raise ArgumentError(f"{rows} rows of {q_heads} heads do not fit {kv_heads} KV heads")
        end = self._append(layer, keys, values)
        # [kv_heads, tokens, head_dim]: each head's matrix is contiguous, as BLAS wants it.
        first, window = 0, self._windows[layer]
        if window is not None:
            first = max(0, end - rows + 1 - window)  # what the first row sees
        part = slice(first, end)
        keys_seen, values_seen = self._keys[layer][:, part], self._values[layer][:, part]
        return self._dense(keys_seen, values_seen, queries, window)

    def _append(self, layer: int, keys: U16, values: U16) -> int:
        first = self._lengths[layer]
        end = first + len(keys)
        for cache, codes in ((self._keys, keys), (self._values, values)):
            old = cache[layer]
            if end > old.shape[1]:
                room = max(end, 2 * old.shape[1])
                cache[layer] = np.empty((old.shape[0], room, old.shape[2]), np.float32)
                cache[layer][:, :first] = old[:, :first]
            cache[layer][:, first:end] = to_float32(codes).transpose(1, 0, 2)
        self._lengths[layer] = end
        return end

    @staticmethod
    def _dense(keys: F32, values: F32, queries: U16, window: int | None) -> U16:
        kv_heads, tokens, head_dim = keys.shape
        rows, q_heads = queries.shape[0], queries.shape[1]
        group = q_heads // kv_heads
        # [kv_heads, group, rows, head_dim], scaled: head_dim values a row instead of tokens.
        q = to_float32(queries).reshape(rows, kv_heads, group, head_dim).transpose(1, 2, 0, 3)
        q = q * np.float32(head_dim**-0.5)
        if rows > 1:  # one product for the whole group of a KV head
            q = q.reshape(kv_heads, 1, group * rows, head_dim)
        # One row: a matrix-vector product for each query head was twice as fast as a product of
        # three rows (0.057 ms against 0.104 ms at 2,048 tokens, 9 query heads of 64).
        scores: F32 = q @ keys[:, None].swapaxes(-1, -2)
        if rows > 1:
            own = scores.reshape(kv_heads, group, rows, tokens)[..., tokens - rows :]
            own[...] = np.where(np.tri(rows, dtype=np.bool_), own, np.float32(-np.inf))
            if window is not None:
                row, token = np.arange(rows)[:, None], np.arange(tokens)
                far = token <= row + (tokens - rows) - window
                every = scores.reshape(kv_heads, group, rows, tokens)
                np.copyto(every, np.float32(-np.inf), where=far)
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        total = scores.sum(axis=-1, keepdims=True)
        out: F32 = scores @ values[:, None]
        out /= total
        # [kv_heads, group, rows, head_dim] back to [rows, q_heads, head_dim]
        out = out.reshape(kv_heads, group, rows, head_dim).transpose(2, 0, 1, 3)
        return from_float32(out).reshape(rows, q_heads, head_dim)
