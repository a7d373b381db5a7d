"""Devices by name, their memory, the handles of their streams, and what they count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hsswap.driver import open_device
from hsswap.driver.base import Device
from hsswap.driver.host import HostDevice
from hsswap.driver.host_memory import Scratch
from hsswap.driver.tensor import tensor_in
from hsswap.errors import ArgumentError, ClosedError, DeviceError
from tests.conftest import missing_for_gpu


def test_live_count(device: Device) -> None:
    assert device.live_count == 0
    stream = device.stream()
    buffers = [device.allocate(100), device.allocate_host(5000)]
    again = device.stream(stream.handle)
    assert device.live_count == 3
    again.close()
    assert device.live_count == 3
    for thing in (*buffers, stream, stream, *buffers):
        thing.close()
    assert device.live_count == 0


def test_handles_name_streams(device: Device) -> None:
    with device.stream() as stream, device.stream() as other:
        assert stream.handle != other.handle
        assert device.stream(stream).handle == stream.handle
        assert device.stream(stream.handle).handle == stream.handle

        class Foreign:
            def __cuda_stream__(self) -> tuple[int, int]:
                return 0, stream.handle

        assert device.stream(Foreign()).handle == stream.handle
        for wrong in ("1", 1.5, True, object()):
            with pytest.raises(ArgumentError, match="a stream handle is a"):
                device.stream(wrong)


def _raises() -> None:
    raise RuntimeError("of the stream's own")


@pytest.mark.parametrize(
    "given", [5, (), (0,), (0, "a"), (0, None), (0, 1.5), lambda: (0, None), lambda: 7, _raises]
)
def test_a_stream_protocol_that_gives_no_handle_is_refused(device: Device, given: object) -> None:
    with pytest.raises(ArgumentError, match="gives no version and handle"):
        device.stream(SimpleNamespace(__cuda_stream__=given))


def test_buffers_are_zero_aligned_and_writable(device: Device) -> None:
    for nbytes in (1, 4096, 5000, 3 << 20):
        with device.allocate_host(nbytes) as buffer:
            assert (buffer.address % 4096, buffer.nbytes, buffer.closed) == (0, nbytes, False)
            view = tensor_in(buffer, "u8", (nbytes,)).array()
            assert not view.any()
            view[...] = 7
        assert buffer.closed


@pytest.mark.parametrize("nbytes", [0, -1])
def test_buffers_of_nothing_are_refused(device: Device, nbytes: int) -> None:
    with pytest.raises(ArgumentError, match="nbytes"):
        device.allocate(nbytes)


@pytest.mark.parametrize("nbytes", [1 << 60, 1 << 70])
def test_buffers_that_do_not_fit_are_refused(device: Device, nbytes: int) -> None:
    with pytest.raises(DeviceError, match="slots"):
        device.allocate_host(nbytes)


def test_a_closed_device_refuses(device: Device) -> None:
    stream = device.stream()
    device.close()
    device.close()
    for call in (device.stream, lambda: device.allocate(1), lambda: device.allocate_host(1)):
        with pytest.raises(ClosedError):
            call()
    with pytest.raises(ClosedError):
        stream.record()


def test_forgotten_streams_and_buffers_warn(host: HostDevice) -> None:
    with pytest.warns(ResourceWarning, match="was not closed"):
        host.stream()
    with pytest.warns(ResourceWarning, match="buffer of 10 bytes was not closed"):
        host.allocate(10)


@pytest.mark.parametrize(
    "name", ["", "gpu", "cuda", "cuda:", "cuda:x", "cuda:-1", "HOST", "cuda:" + "9" * 5000]
)
def test_unknown_device_names_list_the_known(name: str) -> None:
    with pytest.raises(DeviceError, match='known: "host", "cuda:N"'):
        open_device(name)


@pytest.mark.skipif(missing_for_gpu() is None, reason="this machine has libcuda.so.1")
def test_cuda_without_a_driver_says_what_to_do() -> None:
    with pytest.raises(DeviceError, match=r"580 or newer, or use device=.host.") as caught:
        open_device("cuda:0")
    assert "\n" not in str(caught.value)


def test_scratch_grows_and_is_reused() -> None:
    scratch = Scratch()

    def address(array: np.ndarray[Any, Any]) -> int:
        return int(array.ctypes.data)

    large = scratch.array("a", (10, 7), np.float32)
    assert large.shape == (10, 7)
    assert large.dtype == np.float32
    assert address(scratch.array("a", (3,), np.int64)) == address(large)
    assert address(scratch.array("b", (3,), np.int64)) != address(large)
    assert scratch.array("a", (0, 4), np.uint8).shape == (0, 4)
