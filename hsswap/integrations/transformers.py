"""Models of transformers whose K and V lie in a swap::

    with swapped(model, tokens=65536, device_bytes=2 << 30, host_bytes=8 << 30) as cache:
        model.generate(**inputs, past_key_values=cache)  # newer versions call it cache

Inside the block attention is hsswap's; all else is the model's own. For one sequence without
padding, of a model in BF16 on one device, whose attention is causal, with or without windows and
soft caps. Not for beams, nor for drafts that are cut off again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, Cache
from transformers.cache_utils import CacheLayerMixin
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from hsswap import (
    ArgumentError,
    BlockingSequence,
    LayerGroup,
    ModelDims,
    PredictorConfig,
    Rope,
    SwapConfig,
    TopK,
    blocking,
)
from hsswap.models.torch_llama import TorchArrays
from hsswap.rope import llama3_factors

NAME = "hsswap"
"""Of the attention, where transformers asks for one."""


@contextmanager
def swapped(
    model: Any,
    tokens: int,
    *,
    device_bytes: int,
    host_bytes: int,
    directory: Path | str | None = None,
    top_k: TopK | None = None,
) -> Iterator[Cache]:
    """A cache in a swap for one sequence of ``tokens`` tokens, those made included, and hsswap's
    attention in the model until the block ends.

    ``device_bytes``, ``host_bytes``: as :meth:`hsswap.SwapConfig.plan` has them. ``directory``:
    where the rest lies (None: a new folder in the temporary folder). ``top_k``: single rows attend
    the best blocks (None: all of them).

    Raises ArgumentError for a model that cannot be swapped, ConfigError for bytes that are too few,
    and what :func:`hsswap.blocking` raises. Calls of the model raise OutOfBlocks beyond ``tokens``
    and ArgumentError for batches, padding and kinds of attention that are not known here.
    """
    if model.dtype != torch.bfloat16:
        raise ArgumentError(f"the model is {model.dtype}; load it with dtype=torch.bfloat16")
    device = "host" if model.device.type == "cpu" else str(model.device)
    predictor = None if top_k is None else PredictorConfig()
    config = SwapConfig.plan(
        dims_of(model), tokens, device_bytes, host_bytes, predictor=predictor, device=device
    )
    config = dataclasses.replace(config, directory=directory)
    before = model.config._attn_implementation
    AttentionInterface.register(NAME, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _no_mask)
    with blocking(config) as swap, swap.sequence(top_k=top_k) as sequence:
        arrays = TorchArrays(str(model.device))
        layers = [
            SwapLayer(sequence, layer, arrays, config.dims.group(layer))
            for layer in range(config.dims.layers)
        ]
        model.set_attn_implementation(NAME)
        try:
            yield Cache(layers=layers)
        finally:
            model.set_attn_implementation(before)


def dims_of(model: Any) -> ModelDims:
    """The cache of a model. Raises ArgumentError or ConfigError for one that cannot be kept."""
    config = model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    window = getattr(config, "sliding_window", None)
    kind = "full_attention" if window is None else "sliding_attention"
    kinds = getattr(config, "layer_types", None) or [kind] * config.num_hidden_layers
    if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
        raise ArgumentError(f"layers of the kind {', '.join(sorted(unknown))} are not supported")
    scale = next((m.scaling for m in model.modules() if hasattr(m, "scaling")), None)
    groups = [
        LayerGroup(
            len(list(alike)),
            config.num_attention_heads,
            config.num_key_value_heads,
            head_dim,
            window=window if kind == "sliding_attention" else None,
            scale=scale,
            soft_cap=getattr(config, "attn_logit_softcapping", None),
            rope=rope_of(config, head_dim),
        )
        for kind, alike in groupby(kinds)
    ]
    return ModelDims(tuple(groups))


def rope_of(config: Any, head_dim: int) -> Rope | None:
    """How keys are turned, for the predictor of top-k; None where it is not known here, which costs
    top-k much of its recall.
    """
    found = getattr(config, "rope_parameters", None) or {}
    base, kind = found.get("rope_theta"), found.get("rope_type", "default")
    if base is None or found.get("partial_rotary_factor", 1.0) != 1.0:
        return None
    if kind == "default":
        return Rope(base)
    if kind == "llama3":
        factors = llama3_factors(
            base,
            head_dim,
            found["factor"],
            found["low_freq_factor"],
            found["high_freq_factor"],
            found["original_max_position_embeddings"],
        )
        return Rope(base, frequency_factors=factors)
    return None


class SwapLayer(CacheLayerMixin):  # type: ignore[misc]  # Any, where transformers is absent
    """A layer of the cache that keeps nothing itself. What it gives back as keys are the new ones,
    marked so that attention finds the layer.
    """

    is_sliding = False

    def __init__(
        self, sequence: BlockingSequence, layer: int, arrays: TorchArrays, group: LayerGroup
    ) -> None:
        super().__init__()
        self._sequence, self._layer, self._arrays, self._group = sequence, layer, arrays, group

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing is allocated."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append ``[1, kv_heads, rows, dim]`` of K and of V."""
        if key_states.shape[0] != 1:
            raise ArgumentError(f"a batch of {key_states.shape[0]}; swapped() takes one sequence")
        keys, values = self._rows(key_states), self._rows(value_states)
        self._sequence.append(self._layer, keys, values, stream=self._arrays.stream)
        key_states.hsswap_layer = self
        return key_states, value_states

    def attend(self, query: torch.Tensor, asked: dict[str, Any]) -> torch.Tensor:
        """Attention of ``[1, q_heads, rows, dim]``, as ``[1, rows, q_heads, dim]``. ``asked``: what
        the model says about it, which must be what the layer was made for.
        """
        group = self._group
        made_for = {
            "scaling": group.logit_scale,
            "sliding_window": group.window,
            "softcap": group.soft_cap,
            "s_aux": None,
        }
        for name, value in made_for.items():
            if asked.get(name, value) != value:
                raise ArgumentError(
                    f"layer {self._layer} attends with {name}={asked[name]}, not {value} as its "
                    "configuration says; swapped() does not know this model"
                )
        arrays, shape = self._arrays, query.shape
        out = arrays.new((shape[2], shape[1], shape[3]))
        result = self._sequence.attend(
            self._layer, self._rows(query), arrays.for_swap(out), stream=arrays.stream
        )
        if arrays.stream is None:  # the CPU's torch knows no streams
            result.synchronize()
        return out[None]

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Length and offset of K and V, for masks, of which there are none."""
        rows = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.get_seq_length() + rows, 0

    def get_seq_length(self) -> int:
        """Tokens of the layer."""
        return self._sequence.layer_length(self._layer)

    def get_max_length(self) -> int:
        """No maximum that is known ahead."""
        return -1

    get_max_cache_shape = get_max_length  # what older versions call it

    def reset(self) -> None:
        """Forget all tokens, of every layer."""
        self._sequence.truncate(0)

    def _rows(self, states: torch.Tensor) -> Any:
        return self._arrays.for_swap(states[0].detach().transpose(0, 1))


def _no_mask(batch_size: int, q_length: Any, *_: Any, **more: Any) -> None:
    """What transformers calls for a mask: hsswap's attention is causal by itself. Raises
    ArgumentError for padding, which is looked for in prompts alone: that waits for the GPU.
    """
    mask = more.get("attention_mask")
    rows = q_length if isinstance(q_length, int) else q_length.shape[0]
    if mask is not None and rows > 1 and not bool(mask.all()):
        raise ArgumentError("the prompt is padded; give swapped() one without padding")


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object = None,
    **asked: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls for each layer."""
    layer = getattr(key, "hsswap_layer", None)
    if layer is None:
        raise ArgumentError("the model was called without the cache that swapped() gives")
    return layer.attend(query, asked), None
