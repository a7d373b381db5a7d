"""Device time of the operations beside attention, and what enqueuing costs: S1, parts of A3.

Device time: graphs of launches, replayed in alternating slices; every number is a median. Results
are compared with a copy of the data first. Needs a GPU; prints one JSON object a line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from hsswap.config import LayerGroup
from hsswap.driver import open_device
from hsswap.driver.cuda import CudaDevice
from hsswap.driver.cuda_errors import checked
from hsswap.driver.cuda_stream import CudaStream
from hsswap.driver.operations import (
    BlockPool,
    ChecksumWork,
    EncodeWork,
    GatherWork,
    ProjectionCodes,
    ScatterWork,
    ScoreWork,
    SelectWork,
    UnitCache,
    UnitPool,
)
from hsswap.driver.tensor import Tensor, tensor_in
from hsswap.errors import HsswapError

Run = Callable[[], None]


class Bench:
    """A device, a stream and the driver's clocks."""

    def __init__(self, device: CudaDevice) -> None:
        self.device = device
        stream = device.stream()
        assert isinstance(stream, CudaStream)
        self.stream = stream
        self.driver: Any = device.context.driver
        with device.context:
            self._clocks = [checked(self.driver.cuEventCreate(0), "clock") for _ in range(2)]

    def graph(self, run: Run, launches: int) -> Any:
        """A graph of ``launches`` runs."""
        self.stream.synchronize()  # so that no epoch ends during the capture
        driver, mode = self.driver, self.driver.CUstreamCaptureMode
        with self.device.context:
            relaxed = mode.CU_STREAM_CAPTURE_MODE_RELAXED
            checked(driver.cuStreamBeginCapture(self.stream.handle, relaxed), "capture")
            for _ in range(launches):
                run()
            graph = checked(driver.cuStreamEndCapture(self.stream.handle), "capture")
            return checked(driver.cuGraphInstantiate(graph, 0), "graph")

    def slice_us(self, graph: Any, replays: int, launches: int) -> float:
        """Microseconds of one launch, in this slice."""
        driver, handle = self.driver, self.stream.handle
        with self.device.context:
            checked(driver.cuGraphLaunch(graph, handle), "replay")
            checked(driver.cuEventRecord(self._clocks[0], handle), "clock")
            for _ in range(replays):
                checked(driver.cuGraphLaunch(graph, handle), "replay")
            checked(driver.cuEventRecord(self._clocks[1], handle), "clock")
            checked(driver.cuStreamSynchronize(handle), "clock")
            ms = checked(driver.cuEventElapsedTime(*self._clocks), "clock")
        return float(ms) * 1000 / replays / launches

    def compare(self, runs: dict[str, Run], *, launches: int, slices: int) -> dict[str, float]:
        """Medians over alternating slices, in microseconds of one launch."""
        graphs = {name: self.graph(run, launches) for name, run in runs.items()}
        seen: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(slices):
            for name, graph in graphs.items():
                seen[name].append(self.slice_us(graph, 3, launches))
        return {name: statistics.median(times) for name, times in seen.items()}

    def enqueue_us(self, run: Run, times: int = 200) -> float:
        """Microseconds of the calling thread for one enqueue."""
        seen = []
        for _ in range(times):
            start = time.perf_counter()
            run()
            seen.append(time.perf_counter() - start)
            if len(seen) % 20 == 0:
                self.stream.synchronize()
        return statistics.median(seen) * 1e6

    def device_tensor(self, dtype: str, shape: tuple[int, ...], item: int) -> Tensor:
        """Zeroed device memory."""
        return tensor_in(self.device.allocate(int(np.prod(shape)) * item), dtype, shape)

    def host_tensor(self, dtype: str, array: np.ndarray[Any, Any]) -> Tensor:
        """Mapped memory with content."""
        tensor = tensor_in(self.device.allocate_host(array.nbytes), dtype, array.shape)
        tensor.array()[...] = array
        return tensor


def link(bench: Bench, group: LayerGroup, size: int, total: int, slices: int) -> dict[str, Any]:
    """S1: gather and scatter of scattered units against one contiguous copy of the same bytes."""
    rng = np.random.default_rng(0)
    device, driver = bench.device, bench.driver
    unit = UnitPool(Tensor(0, (1, 1), (1, 1), "u8", True, None), group, size).unit_bytes
    count = total // unit
    slots = 2 * count // group.kv_heads
    units = UnitPool(bench.device_tensor("u8", (2 * count, unit), 1), group, size)
    empty = BlockPool(units.memory, group, size)
    content = rng.integers(0, 256, (slots, empty.block_bytes), np.uint8)
    blocks = BlockPool(bench.host_tensor("u8", content), group, size)
    pairs = rng.permutation(slots * group.kv_heads)[:count].astype(np.int32)
    block, head = np.divmod(pairs, np.int32(group.kv_heads))
    places = rng.permutation(2 * count)[:count].astype(np.int32)
    move = GatherWork(blocks, units, block, head, places)
    back = ScatterWork(blocks, units, block, head, places)
    device.gather(bench.stream, move)
    bench.stream.synchronize()
    got = np.empty((2 * count, unit), np.uint8)
    with device.context:
        checked(driver.cuMemcpyDtoH(got.ctypes.data, units.memory.address, got.nbytes), "copy")
    wanted = content[:, : group.kv_heads * unit].reshape(slots, -1, unit)[block, head]
    assert np.array_equal(got[places], wanted), "gather is wrong"
    host, target = blocks.memory.address, units.memory.address
    handle = bench.stream.handle

    def copy() -> None:
        checked(driver.cuMemcpyHtoDAsync(target, host, count * unit, handle), "copy")

    runs = {
        "copy": copy,
        "gather": lambda: device.gather(bench.stream, move),
        "scatter": lambda: device.scatter(bench.stream, back),
    }
    us = bench.compare(runs, launches=2, slices=slices)
    return {
        "what": "S1",
        "unit_bytes": unit,
        "units": count,
        **{f"{name}_us": round(value, 1) for name, value in us.items()},
        "copy_gb_s": round(count * unit / us["copy"] / 1e3, 1),
        "gather_over_copy": round(us["copy"] / us["gather"], 3),
        "enqueue_us": round(bench.enqueue_us(runs["gather"], 40), 1),
    }


def ranking(bench: Bench, blocks: int, k: int, slices: int) -> dict[str, Any]:
    """Score and select of one layer, 32 q / 8 kv heads, d 128, rank 32, blocks of 16."""
    rng = np.random.default_rng(1)
    group, device = LayerGroup(1, 32, 8, 128), bench.device
    matrix = bench.host_tensor("bf16", rng.integers(0x3C00, 0x3F00, (128, 32)).astype(np.uint16))
    codes = ProjectionCodes(bench.device_tensor("bf16", (blocks, 8, 16, 32), 2), matrix, group)
    queries = bench.device_tensor("bf16", (32, 128), 2)
    scores = bench.device_tensor("f32", (8, blocks), 4)
    keys = BlockPool(bench.device_tensor("u8", (64, 8 * 16 * 512), 1), group, 16)
    some = np.arange(64, dtype=np.int32)
    score = ScoreWork(codes, queries, rng.permutation(blocks).astype(np.int32), scores)
    random = bench.host_tensor("f32", rng.standard_normal((8, blocks)).astype(np.float32))
    ranked = bench.device_tensor("f32", (8, blocks), 4)
    with device.context:
        source, target = random.address, ranked.address
        checked(bench.driver.cuMemcpyDtoD(target, source, 32 * blocks), "copy")
    places, pinned = 4 * k, np.array([0, *range(blocks - 8, blocks)], np.int32)
    chosen = (8, k + 9)
    slots = np.arange(8 * places, dtype=np.int32).reshape(8, places)
    cache = UnitCache(
        bench.host_tensor("i32", slots),
        *(bench.device_tensor(kind, (8, places), 4) for kind in ("i32", "f32", "i32")),
    )
    last = bench.device_tensor("i32", chosen, 4), bench.device_tensor("f32", chosen, 4)
    results = [
        bench.host_tensor(kind, np.zeros(shape, dtype))
        for kind, shape, dtype in (
            ("i32", chosen, np.int32),
            ("i32", chosen, np.int32),
            ("u8", chosen, np.uint8),
            ("f32", (8,), np.float32),
        )
    ]
    step = [0]

    def select() -> None:
        work = SelectWork(ranked, ranked, k, pinned, cache, step[0], 0.9, *last, *results)
        device.select(bench.stream, work)
        step[0] += 1

    select()
    device.score(bench.stream, score)  # so that what it keeps is there when it is captured
    runs: dict[str, Run] = {
        "score": lambda: device.score(bench.stream, score),
        "select": select,
        "encode_64": lambda: device.encode(bench.stream, EncodeWork(codes, keys, some, some)),
    }
    us = bench.compare(runs, launches=8, slices=slices)
    return {
        "what": "ranking",
        "blocks": blocks,
        "k": k,
        **{f"{name}_us": round(value, 2) for name, value in us.items()},
        **{f"{name}_enqueue_us": round(bench.enqueue_us(run), 1) for name, run in runs.items()},
    }


def checksums(bench: Bench, count: int, slices: int) -> dict[str, Any]:
    """CRC-32 of blocks of 64 KiB, in mapped host memory and in device memory."""
    group = LayerGroup(1, 32, 8, 128)
    slots, seeds = np.arange(count, dtype=np.int32), np.zeros(count, np.uint32)
    out = bench.device_tensor("u32", (count,), 4)
    shape = (count, 65536)
    content = np.random.default_rng(2).integers(0, 256, shape, np.uint8)
    memories = {
        "host": bench.host_tensor("u8", content),
        "device": bench.device_tensor("u8", shape, 1),
    }
    works = {
        name: ChecksumWork(BlockPool(memory, group, 16), slots, seeds, out)
        for name, memory in memories.items()
    }
    runs: dict[str, Run] = {
        name: (lambda work=work: bench.device.checksum(bench.stream, work))  # type: ignore[misc]
        for name, work in works.items()
    }
    us = bench.compare(runs, launches=2, slices=slices)
    return {
        "what": "checksum",
        "blocks": count,
        **{f"{name}_gb_s": round(65.536 * count / value, 1) for name, value in us.items()},
    }


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--slices", type=int, default=20, help="turns of each operation (20)")
    slices = parser.parse_args().slices
    with open_device("cuda:0") as device:
        assert isinstance(device, CudaDevice)
        bench = Bench(device)
        for head_dim, size in ((128, 16), (64, 16), (128, 128)):
            group = LayerGroup(1, 32, 8, head_dim)
            print(json.dumps(link(bench, group, size, 64 << 20, slices)), flush=True)
        for blocks, k in ((2048, 64), (8192, 64), (8192, 256)):
            print(json.dumps(ranking(bench, blocks, k, slices)), flush=True)
        print(json.dumps(checksums(bench, 1024, slices)), flush=True)


if __name__ == "__main__":
    try:
        main()
    except HsswapError as error:
        sys.exit(f"gpu_operations: {error}")
