"""Settings of a swap. Plain data, no I/O. The sizes of its cache are in :mod:`hsswap.dims`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from hsswap.dims import CUDA_SPAN_TOKENS as CUDA_SPAN_TOKENS
from hsswap.dims import DISK_ALIGNMENT as DISK_ALIGNMENT
from hsswap.dims import SPAN_TOKENS as SPAN_TOKENS
from hsswap.dims import LayerGroup as LayerGroup
from hsswap.dims import ModelDims as ModelDims
from hsswap.predictor_config import PredictorConfig as PredictorConfig
from hsswap.validation import (
    integer,
    require,
    require_flags,
    require_integers,
    require_kind,
    require_path,
    require_words,
)


@dataclass(frozen=True)
class SwapConfig:
    """Settings of one HighSpeedSwap. Slots count blocks over all layers and sequences.

    ``capacity_tokens``: tokens the store can hold, all sequences together, rounded up to blocks.
    ``device_slots``: blocks in device memory (active blocks, the ring of tiles, the caches).
    ``host_slots``: blocks in page-aligned host memory; they are the I/O buffers.
    ``max_sequences``: sequences open at a time; each takes one device slot a layer for the block
    being filled. ``directory``: where the store is made (None: a new folder in the system's
    temporary folder).
    ``device``: ``"host"`` or ``"cuda:N"``. ``io``: ``"auto"`` (the best of posix and uring here),
    ``"posix"``, ``"uring"``, ``"gds"``, ``"gds-compat"`` or ``"memory"`` (RAM, for tests).
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
        require_kind(self.dims, ModelDims, "dims", "ModelDims")
        kinds = (PredictorConfig, type(None))
        require_kind(self.predictor, kinds, "predictor", "a PredictorConfig or None")
        require_path(self.directory, "directory")
        require_words(self, ("device", "io", "fingerprint"))
        require_flags(self, ("look_ahead", "persist"))
        if self.disk_bytes is not None:
            require_integers(self, ("disk_bytes",))
            require(self.disk_bytes > 0, f"disk_bytes is {self.disk_bytes}; give 1 or more")
        require(
            not self.persist or self.directory is not None or self.io == "memory",
            "persist needs a directory that stays; give SwapConfig(directory=...)",
        )
        require_integers(self, tuple(f.name for f in fields(self) if f.type == "int"))
        require(
            self.capacity_tokens >= 1,
            f"capacity_tokens is {self.capacity_tokens}; give 1 or more",
        )
        require(
            self.capacity_blocks < 1 << 32,
            f"capacity_tokens is {self.capacity_tokens}: more blocks than ids (2**32)",
        )
        require(
            self.tile_tokens >= SPAN_TOKENS and self.tile_tokens % SPAN_TOKENS == 0,
            f"tile_tokens is {self.tile_tokens}; it must be a multiple of {SPAN_TOKENS}",
        )
        if self.tile_tokens < self.span_tokens:
            object.__setattr__(self, "tile_tokens", self.span_tokens)
        heads = max(group.kv_heads for group in self.dims.groups)
        for name in ("device_slots", "host_slots"):
            value = getattr(self, name)
            require(
                value * heads < 1 << 31,
                f"{name} is {value}: more units than slot numbers have (2**31)",
            )
        require(self.max_sequences >= 1, f"max_sequences is {self.max_sequences}; give 1 or more")
        require(1 <= self.io_threads <= 64, f"io_threads is {self.io_threads}; give 1 to 64")
        need = self.min_device_slots
        require(
            self.device_slots >= need,
            f"device_slots is {self.device_slots}; {need} are needed: a ring of two tiles of "
            f"{self.tile_blocks} blocks in each of {len(self.dims.groups)} layer group(s) and one "
            f"active block in each of {self.dims.layers} layers for {self.max_sequences} "
            "sequence(s)",
        )
        need = self.min_host_slots
        require(
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
        require_kind(dims, ModelDims, "dims", "ModelDims")
        require_kind(device, str, "device", "a name")
        tokens, max_sequences = integer(tokens, "tokens"), integer(max_sequences, "max_sequences")
        device_bytes = integer(device_bytes, "device_bytes")
        host_bytes = integer(host_bytes, "host_bytes")
        require(tokens >= 1, f"tokens is {tokens}; give 1 or more")
        require(max_sequences >= 1, f"max_sequences is {max_sequences}; give 1 or more")
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
        require(
            device_bytes >= need,
            f"device_bytes is {device_bytes}; give {need} or more: a ring of {ring} blocks, "
            f"{active} being filled, and {least.code_bytes} bytes of codes",
        )
        need = ring * host_slot_bytes
        require(
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
