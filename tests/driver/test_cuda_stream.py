"""Epochs, uploads and wake-ups against a driver that does nothing but keep count. No GPU."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass
from typing import cast

import numpy as np
import pytest

from hsswap.driver.cuda_context import Context
from hsswap.driver.cuda_events import CudaEvent
from hsswap.driver.cuda_reach import make_reachable
from hsswap.driver.cuda_stream import DIRECT_BYTES, EPOCH_WORKS, RING_BYTES, StreamState
from hsswap.driver.operations import AttentionState, FinalizeWork
from hsswap.driver.tensor import Tensor, tensor_of
from hsswap.errors import ArgumentError, ClosedError, DeviceError
from tests.driver.fake_driver import (
    ILLEGAL_ADDRESS,
    NOT_READY,
    OK,
    FakeContext,
    content,
    stream_of,
)

WAIT_LIMIT_S = 30.0


@dataclass(frozen=True)
class Holder:
    """A record with an input that may be copied."""

    scores: Tensor


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
    scores = tensor_of(np.zeros(4, np.float32), "f32", (4,), "scores")
    copied = make_reachable(real, Holder(scores), lambda array: 4096)
    assert copied.scores.address == 4096
    with pytest.raises(ArgumentError, match="scores is in host memory"):
        make_reachable(real, Holder(scores), None)
