"""The sizes of a model's KV cache. Plain data, no I/O.

Words (ARCHITECTURE.md): a *block* is ``block_size`` tokens of K and V of one layer, all KV heads;
a *unit* is one KV head's part of a block. Bytes of a block::

    | head 0: K [block_size, head_dim] | V [block_size, value_dim] | scales | aux | head 1 ... | 0
    |<------------------------- unit_bytes -------------------------------->|   to whole 4096

Scales are there in a cache of E4M3: float32, of each row of K ``[block_size]``, then of V.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from hsswap.rope import Rope
from hsswap.validation import (
    require,
    require_finite,
    require_integers,
    require_kind,
    require_words,
)

DISK_ALIGNMENT = 4096
"""Bytes. Block sizes, file offsets and host slots are multiples of it (direct I/O)."""

SPAN_TOKENS, CUDA_SPAN_TOKENS = 256, 1024
"""Partials of attention belong to spans of at least this many tokens, at fixed positions; those of
a GPU to spans of the second number. A tile is whole spans."""

MAX_BLOCK_SIZE = 256
MAX_HEAD_DIM = 256
BF16_BYTES = 2
FLOAT32_END = 2.0**128
SCALE_BYTES = 4


@dataclass(frozen=True)
class LayerGroup:
    """Layers of equal dims.

    ``layers``: how many. ``q_heads`` is a multiple of ``kv_heads``. ``head_dim`` and ``value_dim``
    (default: the same) count elements of K and of V, multiples of 8 from 8 to 256. ``dtype``, of K,
    V, queries and outputs, is ``"bf16"`` or ``"f16"``. ``window``: a row sees at most this many
    tokens, its own included; None: all. ``scale`` multiplies the logits (default ``head_dim **
    -0.5``). ``soft_cap`` bounds them by ``cap * tanh(logit / cap)`` (Gemma 2, arXiv 2408.00118,
    section 2). ``aux_bytes``: extra bytes of a unit behind all else, which nothing here reads.
    ``rope``: how the model turns queries and keys, for the predictor alone; what is appended is
    turned already. ``kv_dtype``: what K and V are kept as, ``dtype`` (the default) or ``"e4m3"``:
    FP8 with a scale for each row of a head (:mod:`hsswap.e4m3`), half of the bytes.
    """

    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int = 0
    dtype: str = "bf16"
    window: int | None = None
    scale: float | None = None
    soft_cap: float | None = None
    aux_bytes: int = 0
    rope: Rope | None = None
    kv_dtype: str = ""

    def __post_init__(self) -> None:
        require_integers(
            self, ("layers", "q_heads", "kv_heads", "head_dim", "value_dim", "aux_bytes")
        )
        if self.window is not None:
            require_integers(self, ("window",))
        require_finite(self, ("scale", "soft_cap"))
        for name, value in (("scale", self.scale), ("soft_cap", self.soft_cap)):
            require(
                value is None or abs(value) < FLOAT32_END,
                f"{name} is {value}; logits are float32, which ends before 2**128",
            )
        require_words(self, ("dtype", "kv_dtype"))
        require_kind(self.rope, (Rope, type(None)), "rope", "a Rope or None")
        if self.value_dim == 0:
            object.__setattr__(self, "value_dim", self.head_dim)
        require(self.layers >= 1, f"layers is {self.layers}; a layer group has at least one")
        require(self.kv_heads >= 1, f"kv_heads is {self.kv_heads}; at least 1 is needed")
        require(
            self.q_heads >= 1 and self.q_heads % self.kv_heads == 0,
            f"q_heads is {self.q_heads}; it must be a multiple of kv_heads ({self.kv_heads})",
        )
        for name in ("head_dim", "value_dim"):
            dim = getattr(self, name)
            require(
                8 <= dim <= MAX_HEAD_DIM and dim % 8 == 0,
                f"{name} is {dim}; it must be a multiple of 8 from 8 to {MAX_HEAD_DIM}",
            )
        require(self.dtype in ("bf16", "f16"), f"dtype {self.dtype!r} is unknown; known: bf16, f16")
        if not self.kv_dtype:
            object.__setattr__(self, "kv_dtype", self.dtype)
        require(
            self.kv_dtype in (self.dtype, "e4m3"),
            f"kv_dtype {self.kv_dtype!r} does not go with dtype {self.dtype!r}; give "
            f"{self.dtype!r} or 'e4m3'",
        )
        require(
            self.window is None or self.window >= 1,
            f"window is {self.window}; give None, or 1 or more",
        )
        require(
            self.soft_cap is None or self.soft_cap * FLOAT32_END > 1,
            f"soft_cap is {self.soft_cap}; give None or a positive number of float32",
        )
        require(self.aux_bytes >= 0, f"aux_bytes is {self.aux_bytes}; it cannot be negative")
        if self.rope is not None:
            self.rope.turned_dims(self.head_dim)
        whole = 8 if self.is_e4m3 else 2
        require(
            self.aux_bytes % whole == 0,
            f"aux_bytes is {self.aux_bytes}; it must be a multiple of {whole}",
        )

    @property
    def is_e4m3(self) -> bool:
        """Whether K and V are kept as E4M3 codes with scales."""
        return self.kv_dtype == "e4m3"

    @property
    def item_bytes(self) -> int:
        """Bytes of an element of K or V in a unit."""
        return 1 if self.is_e4m3 else BF16_BYTES

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's K and V of one KV head, with their scales."""
        scales = 2 * SCALE_BYTES if self.is_e4m3 else 0
        return (self.head_dim + self.value_dim) * self.item_bytes + scales

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head."""
        return self.q_heads // self.kv_heads

    @property
    def logit_scale(self) -> float:
        """What q.k is multiplied with."""
        return self.head_dim**-0.5 if self.scale is None else self.scale


@dataclass(frozen=True)
class ModelDims:
    """The shape of a model's KV cache: layer groups in layer order and the tokens of a block.

    ``block_size`` is a power of two from 1 to 256. Layers are numbered through the groups.
    """

    groups: tuple[LayerGroup, ...]
    block_size: int = 16

    def __post_init__(self) -> None:
        require_kind(self.groups, (tuple, list), "groups", "a tuple of LayerGroups")
        object.__setattr__(self, "groups", tuple(self.groups))
        require(len(self.groups) >= 1, "a model has at least one layer group")
        for group in self.groups:
            require_kind(group, LayerGroup, "a layer group", "LayerGroup(...)")
        require_integers(self, ("block_size",))
        size = self.block_size
        require(
            1 <= size <= MAX_BLOCK_SIZE and size & (size - 1) == 0,
            f"block_size is {size}; it must be a power of two from 1 to {MAX_BLOCK_SIZE}",
        )

    @classmethod
    def uniform(
        cls,
        *,
        layers: int,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        block_size: int = 16,
        rope: Rope | None = None,
        kv_dtype: str = "",
    ) -> ModelDims:
        """The common case: one layer group, V as wide as K."""
        group = LayerGroup(layers, q_heads, kv_heads, head_dim, rope=rope, kv_dtype=kv_dtype)
        return cls((group,), block_size)

    @cached_property
    def layers(self) -> int:
        """Layers of all groups."""
        return sum(group.layers for group in self.groups)

    @cached_property
    def _group_of_layer(self) -> tuple[int, ...]:
        return tuple(g for g, group in enumerate(self.groups) for _ in range(group.layers))

    def group_index(self, layer: int) -> int:
        """Which group a layer is of. Raises ConfigError for a layer out of range."""
        require(0 <= layer < self.layers, f"layer {layer} is out of range; there are {self.layers}")
        return self._group_of_layer[layer]

    def group(self, layer: int) -> LayerGroup:
        """The group a layer is of. Raises ConfigError for a layer out of range."""
        return self.groups[self.group_index(layer)]

    def unit_bytes(self, group: LayerGroup) -> int:
        """Bytes of one KV head of one block."""
        return self.block_size * group.token_bytes + group.aux_bytes

    def block_bytes(self, group: LayerGroup) -> int:
        """Bytes of one block on disk and in a host slot: units, then zeros to the alignment."""
        units = group.kv_heads * self.unit_bytes(group)
        return -(-units // DISK_ALIGNMENT) * DISK_ALIGNMENT

    @cached_property
    def id_bytes(self) -> int:
        """Bytes on disk of one block id, which is valid in every layer."""
        return sum(group.layers * self.block_bytes(group) for group in self.groups)

    @property
    def span_blocks(self) -> int:
        """Blocks of the smallest span; a tile is a whole number of these."""
        return SPAN_TOKENS // self.block_size

    def blocks_of(self, tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-tokens // self.block_size)
