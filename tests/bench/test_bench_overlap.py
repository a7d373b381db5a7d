"""``hsswap bench overlap``: its arithmetic, its refusals, and one small run of the whole."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from hsswap import HighSpeedSwap, ModelDims, Sequence, SwapConfig
from hsswap.__main__ import main
from hsswap.bench import overlap
from hsswap.bench.lab import Lab, Turns, fill, muted
from hsswap.bench.launches import Graph
from hsswap.bench.overlap_rows import lag_row, overlap_row
from hsswap.errors import DeviceError


def turns_of(wall: float, read: float, compute: float, calls: float = 0.0) -> Turns:
    times = {"wall": wall, "read": read, "compute": compute, "calls": calls}
    return Turns({arm: [value] * 20 for arm, value in times.items()})


def test_overlap_is_what_the_smaller_half_saved() -> None:
    row = overlap_row("x", turns_of(2.0, 2.0, 1.5), 1000)
    assert row["overlap"]["median"] == 1.0
    assert row["within_2x"]
    assert row["passed"]
    none = overlap_row("x", turns_of(3.5, 2.0, 1.5), 1000)
    assert none["overlap"]["high"] == 0.0
    assert not none["passed"]
    unequal = overlap_row("x", turns_of(5.0, 5.0, 1.0), 1000)
    assert unequal["overlap"]["median"] == 1.0
    assert not unequal["passed"]


def test_time_that_every_call_takes_is_no_overlap() -> None:
    # 10 of calls, 2 of reading, 1.5 of computing, nothing of which overlaps.
    row = overlap_row("x", turns_of(13.5, 12.0, 11.5, 10.0), 1000)
    assert row["overlap"]["median"] == 0.0
    row = overlap_row("x", turns_of(12.0, 12.0, 11.5, 10.0), 1000)
    assert row["overlap"]["median"] == 1.0


def test_a_loop_is_as_late_as_in_its_worse_arm() -> None:
    lags = {"wall": [0.0001] * 98 + [0.0019] * 2, "read": [0.0001] * 199 + [0.5]}
    row = lag_row("x", lags)
    assert row["loop_lag_ms"]["wall"] == {"p50": 0.1, "p99": 1.9, "timers": 100}
    assert row["passed"]
    assert not lag_row("x", {**lags, "read": [0.0001] * 97 + [0.0021] * 3})["passed"]


@asynccontextmanager
async def filled(tokens: int) -> AsyncIterator[tuple[Lab, HighSpeedSwap, Sequence]]:
    """A sequence of so many tokens in a small swap on the host device."""
    dims = ModelDims.uniform(layers=1, q_heads=2, kv_heads=1, head_dim=16)
    config = SwapConfig(dims, 512, device_slots=65, host_slots=64, tile_tokens=256, io="memory")
    with Lab.on("host") as lab:
        async with HighSpeedSwap.open(config) as swap, swap.sequence() as sequence:
            await fill(lab, swap, sequence, tokens)
            yield lab, swap, sequence


async def test_a_muted_operation_does_nothing_and_is_remembered() -> None:
    async with filled(400) as (lab, swap, sequence):
        out = lab.arrays.new((1, 2, 16))
        out[...] = 0x7FC0
        query = lab.normal((1, 2, 16))
        with muted(swap, "attend") as device:
            await (await sequence.attend(0, query, out)).done()
            assert set(device.last) == {"attend"}
            assert (out == 0x7FC0).all()
        await (await sequence.attend(0, query, out)).done()
        assert not (out == 0x7FC0).any()


async def test_calls_that_are_made_again_are_muted_too() -> None:
    async with filled(100) as (lab, swap, sequence):
        queries, out = lab.normal((1, 2, 16)), lab.normal((1, 2, 16))
        for _ in range(3):
            await (await sequence.attend(0, queries, out)).done()
        wanted = out.copy()
        out[...] = 0
        with muted(swap, "attend") as device:
            for _ in range(3):
                await (await sequence.attend(0, queries, out)).done()
        assert not out.any()
        assert device.last["attend"].queries.shape == (1, 1, 2, 16)
        await (await sequence.attend(0, queries, out)).done()
        assert (out == wanted).all()


def test_turns_alternate_and_warm_up() -> None:
    order: list[str] = []

    async def run() -> Turns:
        async def one(name: str) -> float:
            order.append(name)
            return float(len(order))

        return await Turns.of({"a": lambda: one("a"), "b": lambda: one("b")}, quick=True)

    turns = asyncio.run(run())
    assert order == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert turns.seconds == {"a": [4.0, 5.0, 8.0], "b": [3.0, 6.0, 7.0]}


def test_a_small_run_on_the_host(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "overlap.json"
    monkeypatch.setattr(overlap, "machine", count().__next__)  # one second is not the next
    words = ["bench", "overlap", "--quick", "--device", "host", "--json", "--dir", str(tmp_path)]
    assert main([*words, "--out", str(out)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(out.read_text())
    assert [row["id"] for row in found["rows"]] == ["O1", "O1", "L1", "O2", "O2"]
    assert found["rows"][2]["loop_lag_ms"]["wall"]["timers"] > 0
    assert found["rows"][1]["read_bytes"] > 0  # decode did read, from the folder given
    assert list(tmp_path.iterdir()) == [out]


def test_a_gpu_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hsswap.bench.lab.load_driver", lambda _: None)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(DeviceError, match=r"pip install 'hsswap\[bench,torch\]'"), Lab.on("cuda:0"):
        pass


def test_a_graph_keeps_what_its_calls_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays read it: a launcher's workspace, say, that nobody else holds."""

    class Workspace:
        pass

    def made() -> tuple[Graph, weakref.ref[Workspace]]:
        workspace = Workspace()
        return Graph([lambda: id(workspace)], MagicMock()), weakref.ref(workspace)

    monkeypatch.setitem(sys.modules, "torch", MagicMock())
    graph, held = made()
    gc.collect()
    assert held() is not None
    del graph
    gc.collect()
    assert held() is None
