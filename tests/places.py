"""Arrays for outputs that the CPU and a device both reach."""

from __future__ import annotations

import numpy as np

from hsswap.driver.base import Buffer, Device
from hsswap.driver.host import HostDevice
from hsswap.driver.tensor import tensor_in
from tests.swap_cases import U16

NAN = 0x7FC0
CHUNK_BYTES = 4 << 20


class Places:
    """Of one device, each given out once: an answer nobody waited for may still be written."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._buffers: list[Buffer] = []
        self._used = 0

    def new(self, shape: tuple[int, ...]) -> tuple[object, U16]:
        """What a call is given, and the same to look at; full of NaN."""
        if isinstance(self._device, HostDevice):
            array = np.full(shape, NAN, np.uint16)
            return array, array
        nbytes = -(-2 * int(np.prod(shape)) // 64) * 64
        if not self._buffers or self._used + nbytes > self._buffers[-1].nbytes:
            self._buffers.append(self._device.allocate_host(max(nbytes, CHUNK_BYTES)))
            self._used = 0
        tensor = tensor_in(self._buffers[-1], "bf16", shape, offset_bytes=self._used)
        self._used += nbytes
        tensor.array()[...] = NAN
        return tensor, tensor.array()

    def close(self) -> None:
        """Free them; nothing that is enqueued may write to them."""
        for buffer in self._buffers:
            buffer.close()
