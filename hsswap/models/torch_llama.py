"""The Llama forward pass in torch, on a GPU or on the CPU. Attention is somebody else's, as in
:mod:`hsswap.models.llama`, whose formulas these are.

Every tensor of a step lives on the device and has a fixed shape, so :meth:`TorchLlama.hidden`,
:meth:`TorchLlama.logits` and :meth:`TorchLlama.choose` can be captured in a CUDA graph: token ids
and positions come from device memory, the embedding is gathered there, and the likeliest token
stays there. Work goes to torch's current stream, whose raw handle is ``TorchLlama.arrays.stream``.

Rows that are run together share matrix products, whose rounding depends on the number of rows. Who
needs equal bits of a token alone and among others (speculation) fills up passes of few rows to one
number (``least_rows``): that of the largest pass, which is K + 1 rows of each sequence of a batch.

torch (extra ``torch``) is imported with this file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from hsswap import Tensor
from hsswap.dims import BF16_BYTES
from hsswap.errors import ArgumentError, ModelError
from hsswap.models.config import LlamaConfig, read_config
from hsswap.models.gguf_file import GgufFile
from hsswap.models.llama import TokenIds, check_tokens, rope_frequencies
from hsswap.models.llama_weights import load_weights

CHUNK_ROWS_DEFAULT = 2048
"""Rows of a prefill chunk: enough for a GPU's matrix units, 0.5 GB of activations at 8B."""

STEP_ROWS = 16
"""``least_rows`` for decoding: as many as a captured step can have, and a tile of a tensor core."""


class TorchAttention(Protocol):
    """What the model needs of a KV cache, in tensors of its device."""

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """As :meth:`hsswap.models.Attention.attend`, bfloat16 in place of codes, in stream order:
        nothing need have run when it returns. ``keys`` and ``values`` may be strided.
        """
        ...


@dataclass(frozen=True)
class TorchLayer:
    """One layer; shapes as in :class:`hsswap.models.llama_weights.LayerWeights`."""

    attn_norm: torch.Tensor
    qkv: torch.Tensor
    out: torch.Tensor
    ffn_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True)
class TorchWeights:
    """All weights, of one dtype, on one device. ``rope_factors`` as in the NumPy model."""

    embedding: torch.Tensor
    layers: tuple[TorchLayer, ...]
    final_norm: torch.Tensor
    output: torch.Tensor
    rope_factors: NDArray[np.float32] | None = None


def random_weights(
    config: LlamaConfig, device: str, dtype: torch.dtype = torch.bfloat16
) -> TorchWeights:
    """Weights N(0, 1 / inputs) and norms of 1, made on the device, the same each time: for timing,
    and for tests.
    """
    generator = torch.Generator(device).manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        empty = torch.empty((rows, columns), dtype=dtype, device=device)
        return empty.normal_(0.0, columns**-0.5, generator=generator)

    c = config
    heads = c.q_heads + 2 * c.kv_heads
    ones = torch.ones(c.width, dtype=dtype, device=device)
    layers = tuple(
        TorchLayer(
            attn_norm=ones,
            qkv=matrix(heads * c.head_dim, c.width),
            out=matrix(c.width, c.q_heads * c.head_dim),
            ffn_norm=ones,
            gate_up=matrix(2 * c.ffn_width, c.width),
            down=matrix(c.width, c.ffn_width),
        )
        for _ in range(c.layers)
    )
    embedding = matrix(c.vocab_size, c.width)
    embedding *= c.width**0.5  # rows of size 1 an element, as the norms give
    output = embedding if c.tied_embeddings else matrix(c.vocab_size, c.width)
    return TorchWeights(embedding, layers, ones, output)


def weights_from_gguf(
    file: GgufFile, config: LlamaConfig, device: str, dtype: torch.dtype = torch.float32
) -> TorchWeights:
    """The weights of a GGUF file. Raises ``ModelError`` as :func:`load_weights` does."""
    weights = load_weights(file, config)

    def on(array: NDArray[np.float32]) -> torch.Tensor:
        return torch.from_numpy(array).to(device, dtype)

    layers = tuple(
        TorchLayer(on(w.attn_norm), on(w.qkv), on(w.out), on(w.ffn_norm), on(w.gate_up), on(w.down))
        for w in weights.layers
    )
    embedding = on(weights.embedding)
    output = embedding if config.tied_embeddings else on(weights.output)
    return TorchWeights(embedding, layers, on(weights.final_norm), output, weights.rope_factors)


class TorchLlama:
    """A Llama model in torch. It keeps no state of a sequence.

    ``least_rows``: a pass of fewer rows has matrix products of so many, filled up with rows of no
    meaning, so that a row has the same bits in every such pass. Attributes: ``config``,
    ``weights``, ``device`` (``"cuda:0"``, ``"cpu"``), ``arrays``.
    """

    def __init__(self, config: LlamaConfig, weights: TorchWeights, *, least_rows: int = 1) -> None:
        self.config = config
        self._least_rows = least_rows
        self.weights = weights
        self.device = str(weights.embedding.device)
        self.arrays = TorchArrays(self.device)
        # Angles of long contexts need float64: 131,072 in float32 has a step of 2**-6.
        frequency = torch.from_numpy(rope_frequencies(config, weights.rope_factors))
        positions = torch.arange(config.context_tokens, dtype=torch.float64, device=self.device)
        angle = torch.outer(positions / config.rope_factor, frequency.to(self.device))
        self._rope = torch.polar(torch.ones_like(angle), angle).to(torch.complex64)[:, None]

    @classmethod
    def from_gguf(
        cls,
        file: GgufFile,
        device: str = "cuda:0",
        dtype: torch.dtype = torch.float32,
        *,
        least_rows: int = 1,
    ) -> Self:
        """Read configuration and weights of ``file``. Raises ``ModelError`` as those do, and for
        a Gemma 3, which only the NumPy model runs.
        """
        config = read_config(file)
        if config.is_gemma3:
            raise ModelError(
                f"{file.path} is a Gemma 3, which runs on the host device only; "
                "leave --device out, or name a Llama"
            )
        weights = weights_from_gguf(file, config, device, dtype)
        return cls(config, weights, least_rows=least_rows)

    def forward(
        self,
        tokens: TokenIds,
        position: int,
        attention: TorchAttention,
        *,
        all_logits: bool = False,
    ) -> torch.Tensor:
        """As :meth:`hsswap.models.Llama.forward`; float32 logits on the device, in stream order."""
        ids = check_tokens(tokens, position, self.config)
        on_device = torch.from_numpy(ids).to(self.device)
        positions = torch.arange(position, position + len(ids), device=self.device)
        hidden = self.hidden(on_device, positions, attention, last_only=not all_logits)
        logits = self.logits(hidden)
        return logits if all_logits else logits[-1]

    def prefill(
        self,
        tokens: TokenIds,
        attention: TorchAttention,
        *,
        position: int = 0,
        chunk_rows: int = CHUNK_ROWS_DEFAULT,
        progress: Callable[[int, int], None] | None = None,
    ) -> torch.Tensor:
        """As :meth:`hsswap.models.Llama.prefill`; float32 logits on the device."""
        if chunk_rows <= 0:
            raise ArgumentError(f"chunk_rows must be positive, not {chunk_rows}")
        ids = check_tokens(tokens, position, self.config)
        logits: torch.Tensor | None = None
        for first in range(0, len(ids), chunk_rows):
            chunk = ids[first : first + chunk_rows]
            logits = self.forward(chunk, position + first, attention)
            if progress is not None:
                progress(first + len(chunk), len(ids))
        assert logits is not None  # there is at least one token
        return logits

    def decode(self, token: int, position: int, attention: TorchAttention) -> int:
        """One greedy step; waits for it. Of equals the lowest id. Raises as ``forward`` does."""
        return int(self.forward([token], position, attention).argmax())

    def hidden(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        attention: TorchAttention,
        *,
        layers: int | None = None,
        last_only: bool = False,
    ) -> torch.Tensor:
        """The residual stream ``[rows, width]`` after the first ``layers`` layers (None: all).

        ``ids`` and ``positions`` ``[rows]``, int64 or int32, in device memory: they are read when
        the work runs, unchecked. With fewer layers this is the body of an early-exit drafter, which
        shares the first layers' K and V with the whole model. ``last_only``: of the last row alone.
        """
        c, rows, both = self.config, len(ids), self.config.q_heads + self.config.kv_heads
        turn = self._rope.index_select(0, self._filled(positions))
        x = self.weights.embedding.index_select(0, self._filled(ids))
        gathered = x.new_zeros((len(x), c.q_heads * c.head_dim)) if len(x) > rows else None
        used = self.weights.layers[:layers]
        for layer, w in enumerate(used):
            normed = F.rms_norm(x, (c.width,), w.attn_norm, c.rms_eps)
            qkv = F.linear(normed, w.qkv).float().view(len(x), -1, c.head_dim)
            pairs = qkv[:, :both, : c.rope_dims].unflatten(-1, (-1, 2))
            torch.view_as_complex(pairs).mul_(turn)
            codes = qkv[:rows].to(torch.bfloat16)
            attended = attention.attend(
                layer, codes[:, : c.q_heads], codes[:, c.q_heads : both], codes[:, both:]
            )
            if last_only and layer == len(used) - 1:
                # Of the last layer's rows only keys and values matter, and those are appended.
                x, attended, gathered, rows = x[rows - 1 : rows], attended[-1:], None, 1
            attended = attended.reshape(rows, -1)
            if gathered is not None:
                gathered[:rows] = attended
            x.addmm_(attended.to(x.dtype) if gathered is None else gathered, w.out.T)
            gate_up = F.linear(F.rms_norm(x, (c.width,), w.ffn_norm, c.rms_eps), w.gate_up)
            gate, up = gate_up.chunk(2, -1)
            x.addmm_(F.silu(gate) * up, w.down.T)
        return x[:rows]

    def _filled(self, rows: torch.Tensor) -> torch.Tensor:
        """With zeros behind them, up to the least number of rows."""
        missing = self._least_rows - len(rows)
        return rows if missing <= 0 else F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits ``[rows, vocab_size]`` of the residual stream ``[rows, width]``."""
        c = self.config
        normed = F.rms_norm(self._filled(hidden), (c.width,), self.weights.final_norm, c.rms_eps)
        return F.linear(normed, self.weights.output).float()[: len(hidden)]

    def choose(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """Write the likeliest token of each row to ``out`` ``[rows]``, int64; of equals the lowest
        id.
        """
        torch.argmax(self.logits(hidden), -1, out=out)

    def plain_attention(self, capacity_tokens: int) -> PlainTorchAttention:
        """The baseline: everything in one dense cache on the device."""
        return PlainTorchAttention(self.config, self.device, capacity_tokens)


class PlainTorchAttention:
    """Dense causal attention over a contiguous BF16 cache ``[kv_heads, tokens, head_dim]`` a layer:
    ``scaled_dot_product_attention``. Implements :class:`TorchAttention` for eager use.
    """

    def __init__(self, config: LlamaConfig, device: str, capacity_tokens: int) -> None:
        shape = (config.layers, 2, config.kv_heads, capacity_tokens, config.head_dim)
        self._cache = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        self._lengths = [0] * config.layers

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """As the protocol. Raises ``ArgumentError`` when the cache is full."""
        rows, cache = len(queries), self._cache[layer]
        first = self._lengths[layer]
        end = first + rows
        if end > cache.shape[2]:
            raise ArgumentError(f"{end} tokens do not fit a cache of {cache.shape[2]}")
        cache[0, :, first:end] = keys.transpose(0, 1)
        cache[1, :, first:end] = values.transpose(0, 1)
        self._lengths[layer] = end
        mask = None
        if rows > 1:
            mask = torch.ones((rows, end), dtype=torch.bool, device=queries.device).tril(first)
        out = F.scaled_dot_product_attention(
            queries.transpose(0, 1)[None],
            cache[None, 0, :, :end],
            cache[None, 1, :, :end],
            attn_mask=mask,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1)


class TorchArrays:
    """How tensors of one device meet a swap. See :class:`hsswap.models.arrays.Arrays`."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)

    @property
    def stream(self) -> int | None:
        """The raw handle of torch's current stream; None for the CPU."""
        if self._device.type != "cuda":
            return None
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def new(self, shape: tuple[int, ...]) -> torch.Tensor:
        """BF16 memory of the device for an output."""
        return torch.empty(shape, dtype=torch.bfloat16, device=self._device)

    def for_swap(self, array: torch.Tensor) -> Any:
        """What :class:`hsswap.Sequence` takes, without a copy."""
        if not array.is_cuda:
            return array.view(torch.int16).numpy()
        # By pointer: 1 us, and 6 through DLPack (4 arrays a layer; one shared core of an EPYC).
        strides = tuple(BF16_BYTES * step for step in array.stride())
        return Tensor(array.data_ptr(), tuple(array.shape), strides, "bf16", True, array)

    def on_host(self, array: torch.Tensor) -> NDArray[np.uint16]:
        """BF16 codes in NumPy, once what is enqueued has run."""
        codes: NDArray[np.uint16] = (
            array.contiguous().view(torch.int16).cpu().numpy().view(np.uint16)
        )
        return codes
