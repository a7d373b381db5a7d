"""The sizes of a model's KV cache and the settings of a swap. Plain data, no I/O.

Words (design section 3): a *block* is ``block_size`` tokens of K and V of one layer, all KV heads;
a *unit* is one KV head's part of a block. Bytes of a block::

    | head 0: K [block_size, head_dim] | V [block_size, value_dim] | aux | head 1: ... | zeros |
    |<------------------- unit_bytes ------------------------------->|   to a multiple of 4096 |
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

from hsswap.predictor_config import PredictorConfig as PredictorConfig
from hsswap.rope import Rope
from hsswap.validation import integer as _integer
from hsswap.validation import require as _require
from hsswap.validation import require_finite as _require_finite
from hsswap.validation import require_integers as _require_integers

DISK_ALIGNMENT = 4096
"""Bytes. Block sizes, file offsets and host slots are multiples of it (direct I/O)."""

SPAN_TOKENS, CUDA_SPAN_TOKENS = 256, 1024
"""Partials of attention belong to spans of at least this many tokens, at fixed positions; those of
a GPU to spans of the second number. A tile is whole spans."""

MAX_BLOCK_SIZE = 256
MAX_HEAD_DIM = 256
BF16_BYTES = 2


@dataclass(frozen=True)
class LayerGroup:
    """Layers of equal dims.

    ``layers``: how many. ``q_heads`` is a multiple of ``kv_heads``. ``head_dim`` and ``value_dim``
    (default: the same) count elements of K and of V, multiples of 8 from 8 to 256. ``dtype``, of K,
    V, queries and outputs, is ``"bf16"`` or ``"f16"``. ``window``: a row sees at most this many
    tokens, its own included; None: all. ``scale`` multiplies the logits (default ``head_dim **
    -0.5``). ``soft_cap`` bounds them by ``cap * tanh(logit / cap)`` (Gemma 2, arXiv 2408.00118,
    section 2). ``aux_bytes``: extra bytes of a unit behind V, for the scales of quantised formats.
    ``rope``: how the model turns queries and keys, for the predictor alone; what is appended is
    turned already.
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

    def __post_init__(self) -> None:
        _require_integers(
            self, ("layers", "q_heads", "kv_heads", "head_dim", "value_dim", "aux_bytes")
        )
        if self.window is not None:
            _require_integers(self, ("window",))
        _require_finite(self, ("scale", "soft_cap"))
        if self.value_dim == 0:
            object.__setattr__(self, "value_dim", self.head_dim)
        _require(self.layers >= 1, f"layers is {self.layers}; a layer group has at least one")
        _require(self.kv_heads >= 1, f"kv_heads is {self.kv_heads}; at least 1 is needed")
        _require(
            self.q_heads >= 1 and self.q_heads % self.kv_heads == 0,
            f"q_heads is {self.q_heads}; it must be a multiple of kv_heads ({self.kv_heads})",
        )
        for name in ("head_dim", "value_dim"):
            dim = getattr(self, name)
            _require(
                8 <= dim <= MAX_HEAD_DIM and dim % 8 == 0,
                f"{name} is {dim}; it must be a multiple of 8 from 8 to {MAX_HEAD_DIM}",
            )
        _require(
            self.dtype in ("bf16", "f16"), f"dtype {self.dtype!r} is unknown; known: bf16, f16"
        )
        _require(
            self.window is None or self.window >= 1,
            f"window is {self.window}; give None, or 1 or more",
        )
        _require(
            self.soft_cap is None or self.soft_cap > 0,
            f"soft_cap is {self.soft_cap}; give None or a positive number",
        )
        _require(self.aux_bytes >= 0, f"aux_bytes is {self.aux_bytes}; it cannot be negative")
        if self.rope is not None:
            self.rope.turned_dims(self.head_dim)
        _require(self.aux_bytes % 2 == 0, f"aux_bytes is {self.aux_bytes}; it must be even")

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
        _require(len(self.groups) >= 1, "a model has at least one layer group")
        _require_integers(self, ("block_size",))
        size = self.block_size
        _require(
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
    ) -> ModelDims:
        """The common case: one layer group, V as wide as K."""
        return cls((LayerGroup(layers, q_heads, kv_heads, head_dim, rope=rope),), block_size)

    @cached_property
    def layers(self) -> int:
        """Layers of all groups."""
        return sum(group.layers for group in self.groups)

    @cached_property
    def _group_of_layer(self) -> tuple[int, ...]:
        return tuple(g for g, group in enumerate(self.groups) for _ in range(group.layers))

    def group_index(self, layer: int) -> int:
        """Which group a layer is of. Raises ConfigError for a layer out of range."""
        _require(
            0 <= layer < self.layers, f"layer {layer} is out of range; there are {self.layers}"
        )
        return self._group_of_layer[layer]

    def group(self, layer: int) -> LayerGroup:
        """The group a layer is of. Raises ConfigError for a layer out of range."""
        return self.groups[self.group_index(layer)]

    def unit_bytes(self, group: LayerGroup) -> int:
        """Bytes of one KV head of one block."""
        values = self.block_size * (group.head_dim + group.value_dim)
        return values * BF16_BYTES + group.aux_bytes

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


@dataclass(frozen=True)
class SwapConfig:
    """Settings of one HighSpeedSwap. Slots count blocks over all layers and sequences.

    ``capacity_tokens``: tokens the store can hold, all sequences together, rounded up to blocks.
    ``device_slots``: blocks in device memory (active blocks, the ring of tiles, the caches).
    ``host_slots``: blocks in page-aligned host memory; they are the I/O buffers.
    ``max_sequences``: sequences open at a time; each takes one device slot a layer for the block
    being filled. ``directory``: where the store is made (None: a new folder in the system's
    temporary folder).
    ``device``: ``"host"`` or ``"cuda:N"``. ``io``: ``"auto"``, ``"posix"`` or ``"memory"``.
    ``io_threads``: threads of the posix backend. ``tile_tokens``: tokens that exact attention
    brings in at a time, a multiple of 256; on a GPU raised to 1,024 at least. ``look_ahead``: read
    the next layer while this one is attended. ``persist``: the store in ``directory`` outlives the
    swap, and what a sequence has committed is found again by
    :meth:`~hsswap.HighSpeedSwap.open_prefix`; it is opened with the
    same ``dims`` and ``fingerprint``, which names the model and its weights, and with as many
    ``capacity_tokens`` or more.
    ``disk_bytes``: what its files may take in all (None: what the capacity needs). ``predictor``:
    what top-k mode ranks blocks with, in device memory beside the slots;
    None: exact mode only.
    """

    dims: ModelDims
    capacity_tokens: int
    device_slots: int
    host_slots: int
    max_sequences: int = 1
    directory: Path | str | None = None
    device: str = "host"
    io: str = "auto"
    io_threads: int = 4
    tile_tokens: int = 4 * SPAN_TOKENS
    look_ahead: bool = True
    predictor: PredictorConfig | None = None
    persist: bool = False
    fingerprint: str = ""
    disk_bytes: int | None = None

    def __post_init__(self) -> None:
        known = isinstance(self.dims, ModelDims)
        _require(known, f"dims is a {type(self.dims).__name__}; give ModelDims")
        known = self.predictor is None or isinstance(self.predictor, PredictorConfig)
        kind = type(self.predictor).__name__
        _require(known, f"predictor is a {kind}; give a PredictorConfig or None")
        for name in ("device", "io", "fingerprint"):
            value = getattr(self, name)
            _require(isinstance(value, str), f"{name} is {value!r}; give a name")
        if self.disk_bytes is not None:
            _require_integers(self, ("disk_bytes",))
            _require(self.disk_bytes > 0, f"disk_bytes is {self.disk_bytes}; give 1 or more")
        _require(
            not self.persist or self.directory is not None or self.io == "memory",
            "persist needs a directory that stays; give SwapConfig(directory=...)",
        )
        _require_integers(self, tuple(f.name for f in fields(self) if f.type == "int"))
        _require(
            self.capacity_tokens >= 1,
            f"capacity_tokens is {self.capacity_tokens}; give 1 or more",
        )
        _require(
            self.capacity_blocks < 1 << 32,
            f"capacity_tokens is {self.capacity_tokens}: more blocks than ids (2**32)",
        )
        _require(
            self.tile_tokens >= SPAN_TOKENS and self.tile_tokens % SPAN_TOKENS == 0,
            f"tile_tokens is {self.tile_tokens}; it must be a multiple of {SPAN_TOKENS}",
        )
        if self.tile_tokens < self.span_tokens:
            object.__setattr__(self, "tile_tokens", self.span_tokens)
        heads = max(group.kv_heads for group in self.dims.groups)
        for name in ("device_slots", "host_slots"):
            value = getattr(self, name)
            _require(
                value * heads < 1 << 31,
                f"{name} is {value}: more units than slot numbers have (2**31)",
            )
        _require(self.max_sequences >= 1, f"max_sequences is {self.max_sequences}; give 1 or more")
        _require(1 <= self.io_threads <= 64, f"io_threads is {self.io_threads}; give 1 to 64")
        need = self.min_device_slots
        _require(
            self.device_slots >= need,
            f"device_slots is {self.device_slots}; {need} are needed: a ring of two tiles of "
            f"{self.tile_blocks} blocks in each of {len(self.dims.groups)} layer group(s) and one "
            f"active block in each of {self.dims.layers} layers for {self.max_sequences} "
            "sequence(s)",
        )
        need = self.min_host_slots
        _require(
            self.host_slots >= need,
            f"host_slots is {self.host_slots}; {need} are needed: two tiles of "
            f"{self.tile_blocks} blocks in each of {len(self.dims.groups)} layer group(s)",
        )

    @property
    def span_tokens(self) -> int:
        """Tokens of a span on the device, the least that a tile can be."""
        return SPAN_TOKENS if self.device == "host" else CUDA_SPAN_TOKENS

    @property
    def capacity_blocks(self) -> int:
        """Block ids of the store."""
        return self.dims.blocks_of(self.capacity_tokens)

    @property
    def tile_blocks(self) -> int:
        """Blocks of one tile."""
        return self.tile_tokens // self.dims.block_size

    @property
    def code_bytes(self) -> int:
        """Bytes of device memory that the predictor's codes take beside the slots."""
        if self.predictor is None:
            return 0
        groups = self.dims.groups
        return self.predictor.code_bytes(
            heads=sum(g.layers * g.kv_heads for g in groups),
            elements=sum(g.layers * g.kv_heads * (g.head_dim + g.value_dim) for g in groups),
            blocks=self.capacity_blocks,
            block_size=self.dims.block_size,
        )

    @property
    def min_device_slots(self) -> int:
        """The least ``device_slots`` that can serve ``max_sequences`` in exact mode."""
        ring = 2 * self.tile_blocks * len(self.dims.groups)
        return ring + self.max_sequences * self.dims.layers

    @property
    def min_host_slots(self) -> int:
        """The least ``host_slots`` that exact attention can run with."""
        return 2 * self.tile_blocks * len(self.dims.groups)

    def device_slots_of(self, group_index: int) -> int:
        """Device slots of one layer group: its ring and active blocks, and of the slots beyond the
        minimum a share by its number of layers (rounded down).
        """
        layers = self.dims.groups[group_index].layers
        spare = self.device_slots - self.min_device_slots
        least = 2 * self.tile_blocks + self.max_sequences * layers
        return least + spare * layers // self.dims.layers

    def host_slots_of(self, group_index: int) -> int:
        """Host slots of one layer group: two tiles, and a share by its number of layers."""
        layers = self.dims.groups[group_index].layers
        spare = self.host_slots - self.min_host_slots
        return 2 * self.tile_blocks + spare * layers // self.dims.layers

    @classmethod
    def plan(
        cls,
        dims: ModelDims,
        tokens: int,
        device_bytes: int,
        host_bytes: int,
        *,
        max_sequences: int = 1,
        predictor: PredictorConfig | None = None,
        device: str = "host",
    ) -> SwapConfig:
        """Settings for ``tokens`` tokens, all sequences together, within the given bytes.

        Device bytes hold the slots and the predictor's codes, host bytes the host slots. Takes as
        many slots as the bytes hold, but no more than the cache has blocks, and the largest tile up
        to 2,048 tokens whose ring is at most half of either tier. Raises ConfigError, with the
        bytes needed, when not even the smallest tile fits.
        """
        tokens, max_sequences = _integer(tokens, "tokens"), _integer(max_sequences, "max_sequences")
        device_bytes = _integer(device_bytes, "device_bytes")
        host_bytes = _integer(host_bytes, "host_bytes")
        _require(tokens >= 1, f"tokens is {tokens}; give 1 or more")
        _require(max_sequences >= 1, f"max_sequences is {max_sequences}; give 1 or more")
        span_tokens = SPAN_TOKENS if device == "host" else CUDA_SPAN_TOKENS
        ring = 2 * (span_tokens // dims.block_size) * len(dims.groups)
        active = max_sequences * dims.layers
        unit_slot_bytes = max(g.kv_heads * dims.unit_bytes(g) for g in dims.groups)
        host_slot_bytes = max(dims.block_bytes(g) for g in dims.groups)
        least = cls(
            dims, tokens, ring + active, ring, max_sequences, predictor=predictor,
            tile_tokens=span_tokens, device=device,
        )  # fmt: skip
        need = (ring + active) * unit_slot_bytes + least.code_bytes
        _require(
            device_bytes >= need,
            f"device_bytes is {device_bytes}; give {need} or more: a ring of {ring} blocks, "
            f"{active} being filled, and {least.code_bytes} bytes of codes",
        )
        need = ring * host_slot_bytes
        _require(
            host_bytes >= need,
            f"host_bytes is {host_bytes}; give {need} or more: two tiles of {span_tokens} tokens "
            "in each layer group",
        )
        most = ring + active + dims.layers * (dims.blocks_of(tokens) + 1)
        device_slots = min((device_bytes - least.code_bytes) // unit_slot_bytes, most)
        host_slots = min(host_bytes // host_slot_bytes, most)
        tile_tokens = span_tokens
        while tile_tokens < 8 * SPAN_TOKENS:
            ring *= 2
            if ring + active > device_slots or 2 * ring > min(device_slots, host_slots):
                break
            tile_tokens *= 2
        return cls(
            dims, tokens, device_slots, host_slots, max_sequences, predictor=predictor,
            tile_tokens=tile_tokens, device=device,
        )  # fmt: skip
