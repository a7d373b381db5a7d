"""Epochs, uploads and wake-ups against a driver that does nothing but keep count. No GPU."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from hsswap.driver.cuda_context import Context
from hsswap.driver.cuda_events import CudaEvent, EventPool, Waiter
from hsswap.driver.cuda_reach import make_reachable
from hsswap.driver.cuda_stream import (
    DIRECT_BYTES,
    EPOCH_WORKS,
    RING_BYTES,
    CudaStream,
    Shared,
    StreamState,
)
from hsswap.driver.operations import AttentionState, FinalizeWork
from hsswap.driver.tensor import Tensor, tensor_of
from hsswap.errors import ArgumentError, ClosedError, DeviceError

WAIT_LIMIT_S = 30.0
OK, NOT_READY, ILLEGAL_ADDRESS = 0, 600, 700


class FakeDriver:
    """Device memory is host memory; copies are made at once; events are what the test says."""

    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUevent_flags = SimpleNamespace(CU_EVENT_DISABLE_TIMING=2, CU_EVENT_BLOCKING_SYNC=1)
    CUresult = SimpleNamespace(CUDA_ERROR_NOT_READY=NOT_READY)
    CUpointer_attribute = SimpleNamespace(CU_POINTER_ATTRIBUTE_DEVICE_POINTER=3)
    CUlaunchConfig = SimpleNamespace
    CUhostFn = staticmethod(lambda address: address)
    CU_MEMHOSTREGISTER_PORTABLE = 1
    CU_MEMHOSTREGISTER_DEVICEMAP = 2

    def __init__(self) -> None:
        self.status = OK
        self.capturing = 0
        self.copies = 0
        self._memory: dict[int, Any] = {}
        self._next = 100

    def cuMemAlloc(self, nbytes: int) -> tuple[int, int]:
        """Zeroed host memory."""
        array = np.zeros(nbytes, np.uint8)
        self._memory[array.ctypes.data] = array
        return OK, int(array.ctypes.data)

    def cuMemFree(self, address: int) -> tuple[int]:
        """Each once."""
        del self._memory[address]
        return (OK,)

    def cuMemHostGetDevicePointer(self, address: int, flags: int) -> tuple[int, int]:
        """The same."""
        return OK, address

    def cuPointerGetAttribute(self, kind: int, address: int) -> tuple[int, int]:
        """Nothing else is pinned."""
        return 1, 0

    def cuMemcpyHtoDAsync(self, target: int, source: int, nbytes: int, stream: int) -> tuple[int]:
        """At once."""
        self.copies += 1
        ctypes.memmove(target, source, nbytes)
        return (OK,)

    def cuStreamIsCapturing(self, stream: int) -> tuple[int, int]:
        """As the test says."""
        return OK, self.capturing

    def cuEventQuery(self, event: int) -> tuple[int]:
        """As the test says."""
        return (self.status,)

    def cuEventCreate(self, flags: int) -> tuple[int, int]:
        """A number."""
        self._next += 1
        return OK, self._next

    cuStreamCreate = cuEventCreate

    def __getattr__(self, name: str) -> Any:
        if name.startswith("cu"):
            return lambda *arguments: (OK,)
        raise AttributeError(name)


class FakeContext(nullcontext[None]):
    """A context that is always current."""

    def __init__(self) -> None:
        super().__init__()
        self.name = "cuda:fake"
        self.driver = FakeDriver()
        self.memory_stream = 1


@pytest.fixture
def context() -> FakeContext:
    """A context."""
    return FakeContext()


@pytest.fixture
def state(context: FakeContext) -> Iterator[StreamState]:
    """A stream's state; all memory must be given back."""
    real = cast(Context, context)
    shared = Shared(real, EventPool(real), Waiter(real))
    made = StreamState(shared, 5000, owned=True)
    yield made
    context.driver.status = OK
    made.close()
    made.close()
    shared.waiter.stop()
    shared.events.close()
    assert not context.driver._memory


def stream_of(state: StreamState) -> CudaStream:
    """A stream that names the state."""
    return CudaStream(state, lambda stream: None, owner=False)


def content(address: int, array: np.ndarray[Any, Any]) -> bytes:
    """What lies where an array was uploaded."""
    return ctypes.string_at(address, array.nbytes)


def test_work_is_held_until_its_epoch_is_over(context: FakeContext, state: StreamState) -> None:
    context.driver.status = NOT_READY
    for number in range(EPOCH_WORKS):
        state.hold(number)
    assert [len(epoch.works) for epoch in state._epochs] == [EPOCH_WORKS]
    assert state._held == []
    state.hold("more")
    state.mark()
    assert len(state._epochs) == 2
    context.driver.status = OK
    state.reap()
    assert not state._epochs


def test_a_capture_ends_no_epoch(context: FakeContext, state: StreamState) -> None:
    context.driver.capturing = 1
    for number in range(2 * EPOCH_WORKS):
        state.hold(number)
    state.mark()
    assert not state._epochs
    assert len(state._held) == 2 * EPOCH_WORKS


def test_uploads_are_copies_and_short_lists_are_read_in_place(
    context: FakeContext, state: StreamState
) -> None:
    array = np.arange(20, dtype=np.int32)
    direct, copied = state.upload(array, True), state.upload(array, False)
    assert context.driver.copies == 1
    assert content(direct, array) == content(copied, array) == array.tobytes()
    state.upload(np.zeros(DIRECT_BYTES + 1, np.uint8), True)
    assert context.driver.copies == 2
    strided = np.arange(40, dtype=np.int32)[::2]
    assert content(state.upload(strided, True), strided) == strided.tobytes()
    state.upload(np.zeros(0, np.int32), False)
    assert context.driver.copies == 2


def test_a_full_ring_is_followed_by_a_larger_one(context: FakeContext, state: StreamState) -> None:
    context.driver.status = NOT_READY
    arrays = [np.full(RING_BYTES // 3, fill, np.uint8) for fill in range(9)]
    addresses = [state.upload(array, False) for array in arrays]
    assert len(state._rings) > 1
    for address, array in zip(addresses, arrays, strict=True):
        assert content(address, array) == array.tobytes()
    state.mark()
    context.driver.status = OK
    rings = len(state._rings)
    for array in arrays:
        state.upload(array, False)
        state.mark()
    assert len(state._rings) == rings


def test_kept_arrays_are_copied_when_they_change(context: FakeContext, state: StreamState) -> None:
    first, second = np.arange(9, dtype=np.int32), np.arange(7, dtype=np.int32)
    address = state.keep("list", first)
    assert state.keep("list", first.copy()) == address
    assert context.driver.copies == 1
    assert state.keep("list", second) == address
    assert content(address, second) == second.tobytes()
    assert state.keep("other", second) != address
    large = np.arange(5000, dtype=np.int32)
    assert content(state.keep("list", large), large) == large.tobytes()
    assert context.driver.copies == 4
    context.driver.capturing = 1
    assert content(state.keep("list", first), first) == first.tobytes()
    context.driver.capturing = 0
    assert content(state.keep("list", large), large) == large.tobytes()


def test_a_larger_workspace_is_zero(state: StreamState) -> None:
    address = state.workspace(10)
    assert state.workspace(1 << 20) == address
    larger = state.workspace((1 << 20) + 1)
    assert larger != address
    assert not any(ctypes.string_at(larger, 1 << 21))
    state.keep("list", np.zeros(9, np.int32))
    assert state.workspace(10) == larger


def test_wakes_without_the_drivers_help(context: FakeContext, state: StreamState) -> None:
    """After a lost context the driver calls no host function: the thread looks by itself."""
    context.driver.status = NOT_READY
    event = stream_of(state).record()
    called = [threading.Event(), threading.Event()]
    event.call_when_done(called[0].set)
    context.driver.status = ILLEGAL_ADDRESS
    event.call_when_done(called[1].set)
    for one in called:
        assert one.wait(WAIT_LIMIT_S)
    for call in (event.is_done, event.synchronize):
        with pytest.raises(DeviceError, match="700"):
            call()


async def test_waits_end_with_the_failure(context: FakeContext, state: StreamState) -> None:
    context.driver.status = NOT_READY
    event = stream_of(state).record()
    assert isinstance(event, CudaEvent)
    wait = event.wait()
    event.call_when_done(lambda: None)
    context.driver.status = ILLEGAL_ADDRESS
    with pytest.raises(DeviceError, match="700"):
        await wait


def test_a_callback_that_raises_does_not_end_the_thread(
    context: FakeContext, state: StreamState, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    context.driver.status = NOT_READY
    event = stream_of(state).record()
    called = threading.Event()
    event.call_when_done(fail)
    event.call_when_done(called.set)
    context.driver.status = OK
    assert called.wait(WAIT_LIMIT_S)
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_closed_streams_refuse(state: StreamState) -> None:
    stream = stream_of(state)
    stream.close()
    stream.close()
    for call in (stream.record, stream.synchronize):
        with pytest.raises(ClosedError):
            call()


def test_what_a_gpu_cannot_reach(context: FakeContext, state: StreamState) -> None:
    def device(shape: tuple[int, ...], dtype: str, item: int) -> Tensor:
        strides = tuple(item * int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))
        return Tensor(1 << 20, shape, strides, dtype, True, None)

    rows = (1, 1, 1)
    carried = AttentionState(
        device(rows, "f32", 4), device(rows, "f32", 4), device((*rows, 8), "f32", 4)
    )
    out = tensor_of(np.zeros((*rows, 8), np.uint16), "bf16", (*rows, 8), "out")
    work = FinalizeWork(carried, out)
    real = cast(Context, context)
    with pytest.raises(ArgumentError, match="out is in host memory that cuda:fake cannot reach"):
        make_reachable(real, work, lambda array: state.upload(array, False))
    fine = FinalizeWork(carried, device((*rows, 8), "bf16", 2))
    assert make_reachable(real, fine, lambda array: 0) is fine
