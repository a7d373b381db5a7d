"""Graphs: captured once, launched often, with what the device holds by then. Both devices."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hsswap.config import LayerGroup
from hsswap.driver.base import Device
from hsswap.driver.host import HostDevice
from hsswap.driver.operations import (
    AppendAtWork,
    AttendWork,
    AttentionState,
    FinalizeWork,
    GatherWork,
)
from hsswap.errors import ArgumentError, CaptureError, ClosedError, DeviceError
from tests.driver import oracle
from tests.driver.rig import NAN_CODE, Rig, random_codes

GROUP = LayerGroup(1, 6, 2, 64)
SIZE = 16


class Step:
    """A decode step of one sequence: append a row at the counter, attend what there is then."""

    def __init__(self, rig: Rig, tokens: int) -> None:
        blocks, heads = -(-tokens // SIZE), GROUP.kv_heads
        rng = np.random.default_rng(8)
        self.rig = rig
        self.units = rig.units(GROUP, SIZE, blocks * heads, 0x7F)
        order = rng.permutation(blocks * heads).astype(np.int32)
        self.slots = rig.tensor(order.reshape(1, heads, blocks))
        self.counter = rig.tensor(np.zeros(1, np.int64))
        self.queries = rig.tensor(np.zeros((1, 1, 6, 64), np.uint16))
        self.keys = rig.tensor(np.zeros((1, 1, 2, 64), np.uint16))
        self.values = rig.tensor(np.zeros((1, 1, 2, 64), np.uint16))
        rows = np.zeros((1, 1, 6, 64), np.float32)
        self.state = AttentionState(
            rig.tensor(rows[..., 0]), rig.tensor(rows[..., 0]), rig.tensor(rows)
        )
        self.out = rig.tensor(np.full((1, 1, 6, 64), NAN_CODE, np.uint16))
        self.append = AppendAtWork(
            self.keys, self.values, self.counter, self.units, self.slots, rig.blocks(GROUP, SIZE, 1)
        )
        self.attend = AttendWork(
            self.queries, self.counter, self.units, self.slots, 0, None, 64, self.state, True,
            added_tokens=1,
        )  # fmt: skip

    def enqueue(self) -> None:
        """The step's operations."""
        device, stream = self.rig.device, self.rig.stream
        device.append_at(stream, self.append)
        device.attend(stream, self.attend)
        device.finalize(stream, FinalizeWork(self.state, self.out))


def test_a_captured_decode_step(rig: Rig) -> None:
    """One graph for every length: the counter says where the row goes and what is attended."""
    rng = np.random.default_rng(9)
    tokens = 40
    step = Step(rig, tokens)
    keys, values = random_codes(rng, (tokens, 2, 64)), random_codes(rng, (tokens, 2, 64))
    with rig.stream.capture() as graph:
        step.enqueue()
    assert (step.out.array() == NAN_CODE).all()  # nothing ran
    heads = oracle.Heads(GROUP.group_size, GROUP.logit_scale)
    with graph:
        for length in range(1, tokens + 1):
            queries = random_codes(rng, (1, 1, 6, 64))
            step.counter.array()[...] = length - 1
            step.queries.array()[...] = queries
            step.keys.array()[...] = keys[length - 1]
            step.values.array()[...] = values[length - 1]
            graph.launch(rig.stream)
            rig.stream.synchronize()
            out = step.out.array().copy()
            wanted = oracle.attend(queries[0], keys, values, length, heads)
            error = oracle.relative_error(oracle.decode(out[0]), wanted.exact)
            assert error <= wanted.tolerance()
            step.enqueue()
            rig.stream.synchronize()
            assert (step.out.array() == out).all()


def test_index_arrays_and_records_are_baked(rig: Rig) -> None:
    """Each launch reads them again: their memory is the graph's, whatever the stream does."""
    blocks = rig.blocks(GROUP, SIZE, 6)
    units = rig.units(GROUP, SIZE, 12)
    rng = np.random.default_rng(10)
    blocks.memory.array()[...] = rng.integers(0, 256, blocks.memory.shape, np.uint8)
    lists = [np.arange(6, dtype=np.int32) for _ in range(3)]
    lists[1] %= 2
    given = [part.copy() for part in lists]
    with rig.stream.capture() as graph:
        rig.device.gather(rig.stream, GatherWork(blocks, units, given[0], given[1], given[2]))
    for part in given:
        part[...] = 0
    for _ in range(3):  # as much as the ring holds
        many = np.zeros(100_000, np.int32)
        slots = np.arange(6, dtype=np.int32)
        rig.device.gather(rig.stream, GatherWork(blocks, units, many[:6], many[:6], slots))
    units.memory.array()[...] = 0
    rig.stream.synchronize()
    with graph, rig.device.stream() as other:
        for stream in (rig.stream, other):
            rig.stream.synchronize()
            units.memory.array()[...] = 0
            graph.launch(stream)
            stream.synchronize()
            source = blocks.memory.array()
            size = units.unit_bytes
            for place in range(6):
                at = slice((place % 2) * size, (place % 2 + 1) * size)
                assert (units.memory.array()[place] == source[place, at]).all()


def test_what_a_capture_refuses(rig: Rig) -> None:
    step = Step(rig, 20)
    event = rig.stream.record()
    assert not rig.stream.is_capturing
    with rig.stream.capture() as graph:
        assert rig.stream.is_capturing
        with pytest.raises(CaptureError):
            rig.stream.record()
        with pytest.raises(CaptureError):
            rig.stream.synchronize()
        with pytest.raises(CaptureError):
            rig.stream.wait_for(event)
        with pytest.raises(CaptureError), rig.stream.capture():
            pass
        with pytest.raises(CaptureError):
            graph.launch(rig.stream)
        with pytest.raises(ArgumentError):
            rig.device.attend(rig.stream, replace(step.attend, first_block=-1))
        event.is_done()  # of earlier work
        rig.tensor(np.zeros(4, np.float32))  # memory may be allocated
        step.enqueue()
    assert not rig.stream.is_capturing
    with graph:
        with rig.stream.capture() as second, pytest.raises(CaptureError):
            graph.launch(rig.stream)
        second.launch(rig.stream)  # of nothing
        second.close()
        graph.launch(rig.stream)
        rig.stream.synchronize()
        with HostDevice() as elsewhere, elsewhere.stream() as strange, pytest.raises(ArgumentError):
            graph.launch(strange)
    with pytest.raises(ClosedError):
        graph.launch(rig.stream)


def test_a_block_that_fails_leaves_nothing(device: Device) -> None:
    with Rig(device) as rig:
        before = device.live_count
        with pytest.raises(ZeroDivisionError), rig.stream.capture():
            raise ZeroDivisionError
        assert device.live_count == before
        assert not rig.stream.is_capturing
        with rig.stream.capture() as graph:
            pass
        assert device.live_count == before + 1
        graph.close()
        graph.close()
        assert device.live_count == before


def test_a_device_closes_its_graphs() -> None:
    device = HostDevice()
    stream = device.stream()
    with stream.capture() as graph:
        pass
    device.close()
    assert graph.closed
    assert device.live_count == 0
    with pytest.raises(ClosedError):
        graph.launch(stream)


def test_a_forgotten_graph_warns() -> None:
    with HostDevice() as device, device.stream() as stream:
        with stream.capture() as graph:
            pass
        held = [graph]
        del graph
        with pytest.warns(ResourceWarning, match="graph was not closed"):
            held.clear()


def test_a_launch_that_fails_marks_its_stream() -> None:
    """And no other one; a later launch elsewhere finds what it needs mended."""
    with HostDevice() as device, Rig(device) as rig:
        step = Step(rig, 20)
        with rig.stream.capture() as graph:
            step.enqueue()
        wanted = step.slots.array().copy()
        step.slots.array()[...] = 1000
        with graph, device.stream() as other:
            graph.launch(other)
            with pytest.raises(DeviceError, match="slots, held by the device"):
                other.synchronize()
            step.slots.array()[...] = wanted
            graph.launch(rig.stream)
            rig.stream.synchronize()


@pytest.mark.gpu
def test_graphs_of_torch(gpu: Rig) -> None:
    """The caller captures on the raw handle, in the mode that forbids most."""
    torch = pytest.importorskip("torch")
    step = Step(gpu, 40)
    rng = np.random.default_rng(11)
    step.keys.array()[...] = random_codes(rng, (1, 1, 2, 64))
    step.values.array()[...] = random_codes(rng, (1, 1, 2, 64))
    step.queries.array()[...] = random_codes(rng, (1, 1, 6, 64))
    step.enqueue()
    gpu.stream.synchronize()
    wanted = step.out.array().copy()
    side = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    stream = gpu.device.stream(side.cuda_stream)
    with torch.cuda.graph(graph, stream=side, capture_error_mode="global"):
        gpu.device.append_at(stream, step.append)
        # Lists of the host, next to what the device holds.
        slots = step.slots.array().copy()
        gpu.device.attend(stream, replace(step.attend, slots=slots, lengths=np.zeros(1, np.int64)))
        gpu.device.finalize(stream, FinalizeWork(step.state, step.out))
        # Other work of the process, on another stream, goes on.
        gpu.device.attend(gpu.stream, step.attend)
        assert gpu.stream.record() is not None
        gpu.stream.synchronize()
        with pytest.raises(CaptureError):
            stream.record()
    step.out.array()[...] = NAN_CODE
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        assert (step.out.array() == wanted).all()
