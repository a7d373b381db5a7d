"""Captures on a raw handle, the caller's and ours, against a driver that keeps count. No GPU."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

from hsswap.driver import cuda_graph
from hsswap.driver.cuda_seam import Grid, Launch
from hsswap.driver.cuda_stream import EPOCH_WORKS, RING_BYTES, CudaStream, StreamState
from hsswap.errors import CaptureError, ClosedError, DeviceError
from tests.driver.fake_driver import ILLEGAL_ADDRESS, FakeContext, content, stream_of


def test_a_capture_ends_no_epoch_and_holds_nothing(
    context: FakeContext, state: StreamState
) -> None:
    """What a caller captures is his to keep."""
    context.driver.capturing = 1
    assert state.captures.look()
    for number in range(2 * EPOCH_WORKS):
        state.hold(number)
    assert not state._epochs
    assert not state._held


def test_what_a_capture_reads_stays_where_it_is(context: FakeContext, state: StreamState) -> None:
    """Each launch of the graph reads it again, long after the ring has gone round."""
    array = np.arange(900, dtype=np.int32)
    kept = state.keep("list", array)
    workspace = state.workspace(1 << 16)
    read: dict[int, bytes] = {}
    for number in (1, 2):
        context.driver.capturing = number
        assert state.captures.look()
        for address in (
            state.upload(array, True),
            state.upload(array, False),
            state.keep("list", array),
            state.upload(np.zeros(1 << 19, np.uint8), False),
            state.upload(array, False),
        ):
            assert address != kept
            assert address not in read
            read[address] = array.tobytes()
        own = state.workspace(1 << 16)
        assert own != workspace
        assert own == state.workspace(10)
        assert own not in read
        read[own] = b""
        assert state.workspace(1 << 22) != own
    context.driver.capturing = 0
    assert not state.captures.look()
    assert state.workspace(1 << 16) == workspace
    for _ in range(9):
        state.upload(np.full(RING_BYTES // 3, 9, np.uint8), False)
        state.mark()
    filled = [content(address, array) == array.tobytes() for address in read]
    assert filled.count(True) == 8


def test_graphs_of_the_callers_are_limited(
    context: FakeContext, state: StreamState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graph, "MOST_CAPTURES", 2)
    for number in (1, 2, 1, 2):
        context.driver.capturing = number
        assert state.captures.look()
    context.driver.capturing = 3
    with pytest.raises(CaptureError, match="2 graphs were captured"):
        state.captures.look()


def test_what_graphs_of_the_callers_read_is_taken(
    context: FakeContext, state: StreamState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all handles of a capture, and of no other; then it counts no more."""
    monkeypatch.setattr(cuda_graph, "MOST_CAPTURES", 2)
    side = StreamState(state.shared, state.handle + 1, owned=False)
    stream = stream_of(state)
    for number in range(1, 9):
        context.driver.capturing = number
        for each in (state, side) if number % 2 else (state,):
            assert each.captures.look()
            each.workspace(100)
        with pytest.raises(CaptureError, match="is being captured"):
            stream.take_captured()
        context.driver.capturing = 0
        with stream.take_captured():
            assert state.captures.last_of_callers() is None
            assert side.captures.last_of_callers() is None
    for number in (9, 10):  # of which the last one is ours
        context.driver.capturing = number
        assert state.captures.look()
    context.driver.capturing = 11
    assert side.captures.look()
    context.driver.capturing = 0
    stream.take_captured().close()
    assert state.captures.last_of_callers() == 9
    assert side.captures.last_of_callers() == 11
    side.close()


def test_a_graph_of_ours(context: FakeContext, state: StreamState) -> None:
    class Work:
        """A record."""

    stream, works = stream_of(state), state.shared
    array, work = np.arange(9, dtype=np.int32), Work()
    alive = weakref.ref(work)
    with stream.capture() as graph:
        assert stream.is_capturing
        assert works.graphs
        assert state.captures.look()
        address = state.upload(array, True)
        state.hold(work)
        del work
        for call in (stream.record, stream.synchronize, stream.capture().__enter__):
            with pytest.raises(CaptureError, match="is being captured"):
                call()
        with pytest.raises(CaptureError, match="still being captured"):
            graph.launch(stream)
    assert not stream.is_capturing
    state.last_launch = Launch("select_few", {}, Grid(8), Grid(256), 0, b"", 1, True)
    for _ in range(2):
        graph.launch(stream)
    assert state.last_launch is None  # what its last kernel is is not known here
    assert context.driver.launches == 2
    assert content(address, array) == array.tobytes()
    assert alive() is not None
    graph.close()
    graph.close()
    assert not works.graphs
    assert not state.captures.look()
    state.mark()
    assert alive() is None
    with pytest.raises(ClosedError):
        graph.launch(stream)


def test_a_capture_that_fails_is_ended(context: FakeContext, state: StreamState) -> None:
    stream = stream_of(state)
    with pytest.raises(ZeroDivisionError), stream.capture():
        raise ZeroDivisionError
    assert not stream.is_capturing
    assert not state.shared.graphs
    context.driver.status = ILLEGAL_ADDRESS
    with pytest.raises(DeviceError, match="cuStreamEndCapture"), stream.capture():
        pass
    assert not state.shared.graphs


def test_the_default_stream_cannot_be_captured(context: FakeContext, state: StreamState) -> None:
    context.driver.capturing = 1
    default = StreamState(state.shared, 0, owned=False)
    assert not default.captures.look()
    with (
        pytest.raises(CaptureError, match="default stream"),
        CudaStream(default, lambda stream: None, owner=False).capture(),
    ):
        pass
    default.close()
