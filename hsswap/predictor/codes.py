"""The predictor ``codes``: a few bits a dim in a basis that calibration makes.

Memory comes in pages of :data:`~hsswap.codec.PAGE_BLOCKS` blocks, all layers of a group in one
buffer, when a block whose index lies there is first encoded.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hsswap.codec import PAGE_BLOCKS, HeadCodec
from hsswap.config import LayerGroup, ModelDims
from hsswap.driver.base import Buffer, Device
from hsswap.driver.codes_operations import (
    TABLE_ALIGNMENT,
    EncodeCodesWork,
    LayerCodes,
    ScoreCodesWork,
    row_bytes_of,
    table_bytes,
)
from hsswap.driver.operations import I32, BlockPool, LeftOut
from hsswap.driver.round_operations import CopyWork
from hsswap.driver.tensor import Tensor, tensor_in
from hsswap.errors import ArgumentError
from hsswap.predictor.base import I64, Predictor, ScoreRequest
from hsswap.predictor.stand_in import StandIn


class CodesPredictor(Predictor):
    """Packed codes of each layer, once :meth:`install` has given it a basis."""

    remembers = True

    def __init__(self, dims: ModelDims, ids: int, device: Device) -> None:
        super().__init__(dims.layers, ids)
        self._dims = dims
        self._device = device
        self._memory: list[Buffer] = []
        self._layers = [_Layer(g, (), None, None) for g in dims.groups for _ in range(g.layers)]
        self.codecs: tuple[HeadCodec, ...] = ()

    @property
    def ready(self) -> bool:
        return bool(self.codecs)

    def prepare(self, learned: Learned) -> PreparedBasis:
        """Bring a basis to the device.

        Waits for the copy; any thread may call it. Raises ArgumentError for another number of
        heads or dims, DeviceError when there is no memory.
        """
        codecs = learned.codecs
        groups = [group for group in self._dims.groups for _ in range(group.layers)]
        wanted = [group.head_dim for group in groups for _ in range(group.kv_heads)]
        if [len(codec.centre) for codec in codecs] != wanted:
            raise ArgumentError(f"a basis of {len(codecs)} heads does not fit a model's {wanted}")
        sizes = [group.group_size for group in groups for _ in range(group.kv_heads)]
        if [len(one.scale) for one in learned.stand_ins] != sizes:
            raise ArgumentError("a basis of other query heads than the model's")
        parts, at = [], 0
        for group in groups:
            own = slice(at, at + group.kv_heads)
            at += group.kv_heads
            scale = np.concatenate([one.scale for one in learned.stand_ins[own]])
            value = np.concatenate([one.value for one in learned.stand_ins[own]])
            parts.append((codecs[own], table_bytes(codecs[own]), scale, value))
        raw = [array.tobytes() for _, *arrays in parts for array in arrays]
        padded = b"".join(part + bytes(-len(part) % TABLE_ALIGNMENT) for part in raw)
        memory = _copied(self._device, np.frombuffer(padded, np.uint8))
        layers, offset = [], 0
        for group, (of_layer, *arrays) in zip(groups, parts, strict=True):
            tensors = []
            for array, dtype in zip(arrays, ("u8", "f32", "f32"), strict=True):
                tensors.append(tensor_in(memory, dtype, array.shape, offset_bytes=offset))
                offset += -(-array.nbytes // TABLE_ALIGNMENT) * TABLE_ALIGNMENT
            layers.append(_Layer(group, of_layer, tensors[0], (tensors[1], tensors[2])))
        return PreparedBasis(learned, layers, memory)

    def install(self, basis: PreparedBasis) -> None:
        """Use a basis from now on; blocks that were encoded before are without a code."""
        # What is enqueued may still read the old memory: it stays until the end.
        self._memory.append(basis.memory)
        self._layers = basis.layers
        self._coded[...] = False
        self.codecs = basis.learned.codecs
        self.version += 1

    def encode_work(
        self, layer: int, blocks: BlockPool, host_slots: I32, indices: I64
    ) -> EncodeCodesWork:
        """See :meth:`Predictor.encode_work`."""
        self._make_pages(int(indices.max(initial=0)) // PAGE_BLOCKS)
        return EncodeCodesWork(self._of(layer), blocks, host_slots, indices.astype(np.int32))

    def score_work(self, layer: int, request: ScoreRequest) -> ScoreCodesWork:
        """See :meth:`Predictor.score_work`."""
        return ScoreCodesWork(
            codes=self._of(layer),
            queries=request.queries,
            code_index=request.code_index,
            resident=request.resident,
            memory=request.memory,
            first=request.first,
            last=request.last,
            scores=request.scores,
            uncorrected=request.uncorrected,
        )

    def left_out(
        self,
        layer: int,
        predicted: Tensor,
        chosen: Tensor,
        learned: tuple[Tensor, Tensor] | None = None,
    ) -> LeftOut | None:
        """See :meth:`Predictor.left_out`."""
        own = learned or self._layers[layer].stand_in
        return None if own is None else LeftOut(predicted, chosen, *own)

    def close(self) -> None:
        """See :meth:`Predictor.close`."""
        for buffer in self._memory:
            buffer.close()
        self._memory.clear()

    def _of(self, layer: int) -> LayerCodes:
        own = self._layers[layer]
        size = self._dims.block_size
        return LayerCodes(own.codecs, own.tables, tuple(own.pages), own.group, size)

    def _make_pages(self, last: int) -> None:
        """Have pages up to number ``last`` in every layer."""
        size = self._dims.block_size
        while len(self._layers[0].pages) <= last:
            nbytes = [PAGE_BLOCKS * row_bytes_of(layer.codecs, size) for layer in self._layers]
            buffer = self._device.allocate(sum(nbytes))
            self._memory.append(buffer)
            offset = 0
            for layer, count in zip(self._layers, nbytes, strict=True):
                shape = (PAGE_BLOCKS, count // PAGE_BLOCKS)
                layer.pages.append(tensor_in(buffer, "u8", shape, offset_bytes=offset))
                offset += count


def _copied(device: Device, content: NDArray[np.uint8]) -> Buffer:
    """Device memory that holds these bytes, a multiple of 4."""
    memory = device.allocate(content.nbytes)
    try:
        with device.allocate_host(content.nbytes) as staging, device.stream() as stream:
            words = (content.nbytes // 4,)
            source = tensor_in(staging, "u32", words)
            source.array()[...] = content.view(np.uint32)
            device.copy_words(stream, CopyWork(source, tensor_in(memory, "u32", words)))
            stream.synchronize()
    except BaseException:
        memory.close()
        raise
    return memory


@dataclass(frozen=True, slots=True)
class Learned:
    """What calibration gives: one of each for every KV head of every layer, in order."""

    codecs: tuple[HeadCodec, ...]
    stand_ins: tuple[StandIn, ...]


@dataclass(frozen=True, slots=True)
class PreparedBasis:
    """A basis whose tables are on the device, in ``memory``."""

    learned: Learned
    layers: list[_Layer]
    memory: Buffer


class _Layer:
    """One layer's basis and pages."""

    def __init__(
        self,
        group: LayerGroup,
        codecs: tuple[HeadCodec, ...],
        tables: Tensor | None,
        stand_in: tuple[Tensor, Tensor] | None,
    ) -> None:
        """``stand_in``: scale ``[Q]`` and value ``[Q, dv]``."""
        self.group = group
        self.codecs = codecs
        self.tables = tables
        self.stand_in = stand_in
        self.pages: list[Tensor] = []
