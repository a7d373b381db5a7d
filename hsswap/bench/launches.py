"""Operations as a CUDA graph replays them: arguments uploaded once, device time by events.

Needs torch, which is asked for streams, graphs and events only.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsswap.driver.base import Stream
from hsswap.driver.cuda_seam import Launcher

WORKSPACE_BYTES = 320 << 20


class StaticLauncher:
    """A :class:`Launcher` whose uploads are made once an array and stay.

    The device's own go through a ring, which a graph could not replay. Arrays are known by their
    content, since launch code makes some itself. Run an operation once before capturing it.
    """

    def __init__(self, device: Launcher) -> None:
        import torch

        self._torch = torch
        self._uploads: dict[tuple[int, bytes], Any] = {}
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        self.launch, self.start = device.launch, device.start
        self.copy, self.last_launch = device.copy, device.last_launch
        self.max_active_clusters = device.max_active_clusters
        self.arch = device.arch
        self.compute_capability = device.compute_capability
        self.sm_count = device.sm_count
        self.shared_bytes_limit = device.shared_bytes_limit

    def upload(self, stream: Stream, array: NDArray[Any], *, direct: bool = False) -> int:
        """Address of a copy that stays."""
        digest = blake2b(array.tobytes()).digest()
        known = self._uploads.get((array.nbytes, digest))
        if known is None:
            known = self._torch.from_numpy(np.ascontiguousarray(array)).cuda()
            self._uploads[array.nbytes, digest] = known
        return int(known.data_ptr())

    def keep(self, stream: Stream, name: str, array: NDArray[Any]) -> int:
        """As :meth:`upload`."""
        return self.upload(stream, array)

    def workspace(self, stream: Stream, nbytes: int) -> int:
        """One for all operations, which follow each other on one stream."""
        if nbytes > WORKSPACE_BYTES:
            raise ValueError(f"a workspace of {nbytes} bytes; {WORKSPACE_BYTES} are there")
        return int(self._workspace.data_ptr())


class Graph:
    """Calls captured once; ``run_us`` replays them.

    It keeps the calls: what they hold (a :class:`StaticLauncher`'s workspace and lists) is read at
    every replay, and torch gives unheld memory back to the driver when the next graph is made.
    """

    def __init__(self, calls: list[Callable[[], object]], stream: Any) -> None:
        import torch

        self._torch = torch
        self._stream = stream
        self._calls = calls
        with torch.cuda.stream(stream):
            for call in calls:
                call()
        stream.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            self._kept = [call() for call in calls]
        self.run_us(1)

    def run_us(self, replays: int) -> float:
        """Device time of one call, over so many replays of all."""
        begin = self._torch.cuda.Event(enable_timing=True)
        end = self._torch.cuda.Event(enable_timing=True)
        with self._torch.cuda.stream(self._stream):
            begin.record()
            for _ in range(replays):
                self._graph.replay()
            end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3 / (replays * len(self._calls))

    def total_us(self) -> float:
        """Device time of one replay of all calls."""
        return self.run_us(2) * len(self._calls)
