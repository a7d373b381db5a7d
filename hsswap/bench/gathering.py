"""S1: scattered pieces of the host tier into device slots, against one contiguous pinned copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hsswap.bench.figures import SLICES_MIN, Interval
from hsswap.bench.launches import Graph, StaticLauncher
from hsswap.config import LayerGroup
from hsswap.driver import cuda_operations
from hsswap.driver.base import Buffer, Stream
from hsswap.driver.operations import BlockPool, GatherWork, UnitPool
from hsswap.driver.tensor import tensor_in

PIECES = 1024
HOST_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Pieces:
    """``units`` neighbouring units of a block make a piece of ``nbytes``."""

    nbytes: int
    group: LayerGroup
    units: int
    floor: float


PIECE_KINDS = (
    Pieces(64 << 10, LayerGroup(1, 32, 8, 128), 8, 0.90),
    Pieces(8 << 10, LayerGroup(1, 32, 8, 128), 1, 0.80),
    Pieces(4 << 10, LayerGroup(1, 9, 3, 64), 1, 0.60),
)


@dataclass(frozen=True, slots=True)
class Bench:
    """What the rows share. ``stream`` is torch's, ``ours`` the same one as the device sees it."""

    launcher: StaticLauncher
    ours: Stream
    stream: Any
    host: Buffer
    slices: int


def measure_gather(
    device: Any, launcher: StaticLauncher, ours: Stream, stream: Any, quick: bool
) -> list[dict[str, Any]]:
    """A row for each size of piece. Bytes are compared before they are timed."""
    slices = SLICES_MIN + 1 if quick else 2 * SLICES_MIN + 1
    with device.allocate_host(HOST_BYTES) as host:
        words = tensor_in(host, "u32", (HOST_BYTES // 4,)).array()
        words[...] = np.arange(len(words), dtype=np.uint32) * np.uint32(2654435761)
        bench = Bench(launcher, ours, stream, host, slices)
        rows = [_measure(bench, pieces) for pieces in PIECE_KINDS]
        stream.synchronize()
    return rows


def _measure(bench: Bench, pieces: Pieces) -> dict[str, Any]:
    import torch

    group, stream = pieces.group, bench.stream
    unit = 16 * group.head_dim * 2 * 2
    block = -(-group.kv_heads * unit // 4096) * 4096
    host_slots = HOST_BYTES // block
    memory = tensor_in(bench.host, "u8", (host_slots, block))
    count = PIECES * pieces.units
    target = torch.zeros((count, unit), dtype=torch.uint8, device="cuda")
    rng = np.random.default_rng(3)
    chosen = rng.permutation(host_slots)[:PIECES].astype(np.int32)
    first = rng.integers(0, group.kv_heads // pieces.units, PIECES).astype(np.int32)
    heads = (first[:, None] * pieces.units + np.arange(pieces.units, dtype=np.int32)).ravel()
    work = GatherWork(
        BlockPool(memory, group, 16),
        UnitPool(_on_device(target, unit), group, 16),
        np.repeat(chosen, pieces.units),
        heads.astype(np.int32),
        rng.permutation(count).astype(np.int32),
    )
    launcher, ours = bench.launcher, bench.ours
    gather = Graph([lambda: cuda_operations.gather(launcher, ours, work)], stream)
    places = (chosen.repeat(pieces.units), heads)
    units = memory.array()[:, : group.kv_heads * unit].reshape(host_slots, group.kv_heads, unit)
    correct = bool((target.cpu().numpy()[work.device_slots] == units[places]).all())
    pinned = torch.empty(count * unit, dtype=torch.uint8, pin_memory=True).fill_(3)
    flat = target.view(-1)
    copy = Graph([lambda: flat.copy_(pinned, non_blocking=True)], stream)
    graphs = {"ours": gather, "copy": copy}
    times: dict[str, list[float]] = {"ours": [], "copy": []}
    for i in range(bench.slices):
        for name in ("ours", "copy") if i % 2 else ("copy", "ours"):
            times[name].append(graphs[name].run_us(2))
    ratio = Interval.of([c / o for c, o in zip(times["copy"], times["ours"], strict=True)])
    took = Interval.of(times["ours"])
    return {
        "id": "S1",
        "name": f"S1 {PIECES} scattered pieces of {pieces.nbytes >> 10} KiB",
        "floor": pieces.floor,
        "aim": 0.95,
        "ours_us": took._asdict(),
        "best": "pinned copy",
        "baseline_us": Interval.of(times["copy"])._asdict(),
        "ratio": ratio._asdict(),
        "slices": bench.slices,
        "gb_per_s": count * unit / took.median / 1e3,
        "error": 0.0,
        "baseline_error": 0.0,
        "correct": correct,
        "passed": correct and ratio.low >= pieces.floor,
    }


def _on_device(target: Any, unit: int) -> Any:
    from hsswap.bench.cases import tensor_from

    tensor = tensor_from(target, "u8")
    assert tensor.strides == (unit, 1)
    return tensor
