"""What tests of the CUDA device share: its streams as the class, and work that takes a while."""

from __future__ import annotations

import numpy as np

from hsswap.config import LayerGroup
from hsswap.driver.cuda import CudaDevice
from hsswap.driver.cuda_stream import CudaStream
from hsswap.driver.operations import BlockPool, ChecksumWork
from hsswap.driver.tensor import tensor_in
from tests.driver.rig import Rig


def stream_of(rig: Rig) -> CudaStream:
    """The rig's stream, as the class."""
    assert isinstance(rig.stream, CudaStream)
    return rig.stream


class DelayWork:
    """Some 10 ms of work for one stream."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        group = LayerGroup(1, 32, 32, 256)
        self._memory = device.allocate(32 * 256 * 2 * 256 * 2)
        self._out = device.allocate(4 * 4096)
        zeros = np.zeros(4096, np.int32)
        blocks = tensor_in(self._memory, "u8", (1, self._memory.nbytes))
        self._work = ChecksumWork(
            BlockPool(blocks, group, 256),
            zeros,
            zeros.astype(np.uint32),
            tensor_in(self._out, "u32", (4096,)),
        )

    def enqueue(self, stream: CudaStream) -> None:
        """Put it on the stream."""
        self._device.checksum(stream, self._work)

    def close(self) -> None:
        """Free it."""
        self._memory.close()
        self._out.close()
