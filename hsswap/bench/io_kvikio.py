"""kvikio called directly, as a stranger would: reads of the same blocks into the same memory."""

from __future__ import annotations

import asyncio
import ctypes
import importlib.util
import time
from collections import deque
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from hsswap.bench.io_arms import DRAWN, Memory, Slice
from hsswap.driver.base import Buffer, Device
from hsswap.io.gds_kvikio import DeviceBuffer

THREADS_MAX = 16


class KvikioArm:
    """``CuFile.pread`` futures, ``depth`` in flight, waited for in the order they were begun."""

    name = "kvikio"

    def __init__(
        self, files: Sequence[Path], block_bytes: int, depth: int, device: Device | None
    ) -> None:
        import kvikio
        import kvikio.defaults

        kvikio.defaults.set(
            {
                "num_threads": min(depth, THREADS_MAX),
                "gds_threshold": 0,
                "auto_direct_io_read": True,
            }
        )
        compatible = kvikio.defaults.is_compat_mode_preferred()
        self.path = "compatibility path" if compatible else "cuFile"
        self._files: list[Any] = [kvikio.CuFile(str(path), "r") for path in files]
        blocks = [path.stat().st_size // block_bytes for path in files]
        self._arena: Buffer | None = None
        if device is None:
            self.destination = "host"
            self._slots: list[Any] = list(Memory(depth, block_bytes).blocks)
        else:
            self.destination = f"device {device.name}"
            self._arena = device.allocate(depth * block_bytes)
            begins = range(
                self._arena.address, self._arena.address + depth * block_bytes, block_bytes
            )
            self._slots = [DeviceBuffer(address, block_bytes) for address in begins]
        self._block_bytes = block_bytes
        # Drawn before, as for the store.
        rng = np.random.default_rng(3)
        drawn = rng.integers(0, len(files), DRAWN)
        places = rng.integers(0, np.array(blocks)[drawn]) * block_bytes
        self._places = cycle(zip(drawn.tolist(), places.tolist(), strict=True))

    @classmethod
    def make(
        cls, files: Sequence[Path], block_bytes: int, depth: int, device: Device | None = None
    ) -> KvikioArm | None:
        """Into host memory, or that of a device.

        None where kvikio or the NVIDIA driver is not: it asks the driver at every transfer.
        """
        if importlib.util.find_spec("kvikio") is None:
            return None
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            return None
        return cls(files, block_bytes, depth, device)

    async def slice(self, seconds: float) -> Slice:
        """Work that long, in another thread."""
        return await asyncio.get_running_loop().run_in_executor(None, self._run, seconds)

    def _run(self, seconds: float) -> Slice:
        wall, processor = time.perf_counter(), time.process_time()
        deadline, operations = wall + seconds, 0
        free, flying = deque(range(len(self._slots))), deque[tuple[int, Any]]()
        block_bytes = self._block_bytes
        while True:
            if free and time.perf_counter() < deadline:
                slot = free.popleft()
                number, offset = next(self._places)
                file = self._files[number]
                flying.append((slot, file.pread(self._slots[slot], block_bytes, offset)))
            elif flying:
                slot, future = flying.popleft()
                assert future.get() == block_bytes
                operations += 1
                free.append(slot)
            else:
                break
        used = time.process_time() - processor
        return Slice(operations, time.perf_counter() - wall, used)

    async def close(self) -> None:
        """Close the files, and give device memory back."""
        for file in self._files:
            file.close()
        if self._arena is not None:
            self._arena.close()
