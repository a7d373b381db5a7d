"""Models of transformers whose K and V lie in a swap::

    with swapped(model, tokens=65536, device_bytes=2 << 30, host_bytes=8 << 30) as cache:
        model.generate(**inputs, past_key_values=cache)  # newer versions call it cache

Inside the block attention is hsswap's; all else is the model's own. For one sequence without
padding, of a model in BF16 on one device, whose attention is causal, with or without windows and
soft caps. Not for beams, packed sequences or training, which are refused.
"""

from __future__ import annotations

import dataclasses
import operator
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
    ClosedError,
    LayerGroup,
    ModelDims,
    PredictorConfig,
    Rope,
    SwapConfig,
    TopK,
    blocking,
)
from hsswap.errors import shown
from hsswap.models.torch_llama import TorchArrays
from hsswap.rope import llama3_factors

NAME = "hsswap"
"""Of the attention, where transformers asks for one."""

MASKED_BIAS = -1e4
"""What a float mask adds at most where nothing is seen: the weakest in use (BERT's, for FP16). The
weight is 0 in float32 then, as long as scores differ by less than 9,800.
"""


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
    and ArgumentError for batches, padding, other masks than the causal one, dropout and kinds of
    attention that are not known here: nothing was appended then. So does ``backward`` through it,
    and what is for beams of the cache's own calls; ``crop`` is :meth:`SwapCache.crop`.
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
        waiting: set[int] = set()
        layers = [
            SwapLayer(sequence, layer, arrays, config.dims.group(layer), waiting)
            for layer in range(config.dims.layers)
        ]
        model.set_attn_implementation(NAME)
        try:
            if model.config.get_text_config()._attn_implementation != NAME:
                raise ArgumentError(
                    f"{type(model).__name__} takes no attention but its own; swapped() needs a "
                    "model that asks transformers' AttentionInterface"
                )
            yield SwapCache(sequence, arrays, layers)
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


class SwapCache(Cache):  # type: ignore[misc]  # Any, where transformers is absent
    """The cache that :func:`swapped` gives: its layers are one sequence's, cut in one call."""

    def __init__(
        self, sequence: BlockingSequence, arrays: TorchArrays, layers: list[SwapLayer]
    ) -> None:
        super().__init__(layers=layers)
        self._sequence, self._arrays = sequence, arrays

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens of every layer, all of them where there are
        fewer; what follows is as if they had never been there. A positive number is how many are
        kept, as it was in transformers before 5.18. Raises ArgumentError for no whole number.
        """
        try:
            tokens = operator.index(tokens_to_remove)  # also a tensor of one
        except TypeError as error:
            raise ArgumentError(
                f"crop({shown(tokens_to_remove)}); give minus the tokens to remove, as an int"
            ) from error
        length = self._sequence.length
        kept = tokens if tokens > 0 else max(length + tokens, 0)
        if kept < length:
            self._sequence.truncate(kept, stream=self._arrays.stream)


class SwapLayer(CacheLayerMixin):  # type: ignore[misc]  # Any, where transformers is absent
    """A layer of the cache that keeps nothing itself. What it gives back as keys are the new ones,
    marked so that attention finds the layer, and appended there: what is refused comes to light
    only then.
    """

    is_sliding = False
    is_croppable = True

    def __init__(
        self,
        sequence: BlockingSequence,
        layer: int,
        arrays: TorchArrays,
        group: LayerGroup,
        waiting: set[int],
    ) -> None:
        """``waiting``: of all layers together, the one that was updated and not yet attended."""
        super().__init__()
        self._sequence, self._layer, self._arrays, self._group = sequence, layer, arrays, group
        self._waiting = waiting

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing is allocated."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mark ``[1, kv_heads, rows, dim]`` of K as this layer's; :meth:`attend` appends it.

        Raises ClosedError after the end of :func:`swapped`. ArgumentError for batches, and for a
        model whose attention is another, which would see no more than its rows.
        """
        if self._sequence.closed:
            raise ClosedError("swapped() has ended, and its cache with it; open a new one")
        if key_states.shape[0] != 1:
            raise ArgumentError(f"a batch of {key_states.shape[0]}; swapped() takes one sequence")
        if self._waiting:
            self._waiting.clear()
            raise ArgumentError(
                "the last rows were not attended by hsswap's attention; use the cache with the "
                "model that swapped() was given, whose attention stays as it is set meanwhile"
            )
        self._waiting.add(self._layer)
        key_states.hsswap_layer, key_states.hsswap_is_new = self, True
        return key_states, value_states

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: object,
        asked: dict[str, Any],
    ) -> torch.Tensor:
        """Append ``[1, kv_heads, rows, dim]`` of K and of V, unless layers that share them have;
        attention of ``[1, q_heads, rows, dim]``, as ``[1, rows, q_heads, dim]``. ``asked``: what
        the model says about it, which must be what the layer was made for.

        Raises ArgumentError for anything else; no layer has tokens of this pass then.
        """
        self._waiting.clear()
        arrays, before, rows = self._arrays, self.get_seq_length(), query.shape[2]
        new = key.shape[2] if key.hsswap_is_new else 0
        try:
            self._check(rows, before + new, mask, asked)
        except ArgumentError:
            if new and self._sequence.length > before:  # a layer before this one had no objection
                self._sequence.truncate(before, stream=arrays.stream)
            raise
        if new:
            self._sequence.append(
                self._layer, self._rows(key), self._rows(value), stream=arrays.stream
            )
            key.hsswap_is_new = False
        out = arrays.new((rows, query.shape[1], query.shape[3]))
        result = self._sequence.attend(
            self._layer, self._rows(query), arrays.for_swap(out), stream=arrays.stream
        )
        if arrays.stream is None:  # the CPU's torch knows no streams
            result.synchronize()
        if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
            return _NoGradients.apply(out[None], query, key, value)
        return out[None]

    def _check(self, rows: int, length: int, mask: object, asked: dict[str, Any]) -> None:
        """Raise ArgumentError unless the last ``rows`` of ``length`` tokens are to be attended as
        the layer does it.
        """
        group = self._group
        made_for = {
            "scaling": group.logit_scale,
            "sliding_window": group.window,
            "softcap": group.soft_cap,
            "s_aux": None,
            "position_bias": None,
        }
        for name, value in made_for.items():
            if asked.get(name, value) != value:
                raise ArgumentError(
                    f"layer {self._layer} attends with {name}={shown(asked[name])}, not {value} as "
                    "its configuration says; swapped() does not know this model"
                )
        if asked.get("dropout"):
            raise ArgumentError(
                f"layer {self._layer} attends with dropout={asked['dropout']}, which swapped() "
                "does not; call model.eval() first"
            )
        if asked.get("cu_seq_lens_q") is not None:
            raise ArgumentError("the sequences are packed; give swapped() one, without cu_seq_lens")
        if mask is not None and not _is_causal(mask, rows, length, group.window):
            raise ArgumentError(
                f"attention_mask, of shape {shown(tuple(getattr(mask, 'shape', ())))}, is not layer"
                f" {self._layer}'s causal one for {rows} of {length} tokens, which swapped() "
                "attends with; leave it out, and give packed sequences one by one"
            )

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

    def reorder_cache(self, *_: Any, **__: Any) -> None:
        """What beams ask for: raises ArgumentError."""
        raise ArgumentError(
            "swapped() keeps one sequence, without others to choose from; generate with "
            "num_beams=1 and num_return_sequences=1, or open a swapped() for each"
        )

    batch_repeat_interleave = batch_select_indices = reorder_cache

    def _rows(self, states: torch.Tensor) -> Any:
        return self._arrays.for_swap(states[0].detach().transpose(0, 1))


class _NoGradients(torch.autograd.Function):  # type: ignore[misc]  # Any, where torch is absent
    """The first input as it is; ``backward`` raises ArgumentError where it would give nothing to
    the others, silently. A pass whose gradients nobody wants is none the worse.
    """

    @staticmethod
    def forward(_: Any, out: torch.Tensor, *__: torch.Tensor) -> torch.Tensor:
        """``out``, tied to the others."""
        return out

    @staticmethod
    def backward(*_: Any) -> Any:
        """Raise ArgumentError."""
        raise ArgumentError(
            "attention in a swap has no gradients; train outside of swapped(), and call the model "
            "under torch.no_grad() inside"
        )


def _is_causal(mask: object, rows: int, length: int, window: int | None) -> bool:
    """Whether a mask ``[1, heads or 1, rows, length]``, bool or what is added to scores, shows each
    of the last rows what is before it, as far as the window goes. Waits for the GPU.
    """
    if not isinstance(mask, torch.Tensor) or mask.ndim != 4 or mask.shape[2:] != (rows, length):
        return False
    tokens = torch.arange(length, device=mask.device)
    own = tokens[length - rows :, None]
    seen = tokens <= own
    if window is not None:
        seen &= tokens > own - window
    if mask.dtype == torch.bool:
        return bool((mask == seen).all())
    if not mask.is_floating_point():
        return False
    return bool(torch.where(seen, mask == 0, mask <= MASKED_BIAS).all())


def _no_mask(batch_size: int, q_length: Any, kv_length: int, *_: Any, **more: Any) -> None:
    """What transformers calls for a mask, unless the caller gave one of four dimensions: hsswap's
    attention is causal by itself. Raises ArgumentError for one of two that hides tokens, which
    waits for the GPU; newer versions' ``generate`` gives none where all are ones.
    """
    mask = more.get("attention_mask")
    if mask is None:
        return
    if mask.shape[-1] < kv_length:  # transformers takes the rest for padding
        raise ArgumentError(
            f"attention_mask is for {mask.shape[-1]} tokens, and there are {kv_length} with those "
            "in the cache; leave it out"
        )
    if not bool(mask[..., :kv_length].all()):
        raise ArgumentError(
            "the sequence is padded, or has holes in its attention_mask; give swapped() one "
            "without, and no mask"
        )


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
    return layer.attend(query, key, value, attention_mask, asked), None
