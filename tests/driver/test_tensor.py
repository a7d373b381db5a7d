"""Tensors: raw memory and NumPy arrays look the same, and what is wrong is refused."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from hsswap.driver import open_device
from hsswap.driver.tensor import Tensor, contiguous_strides, tensor_in, tensor_of
from hsswap.errors import ArgumentError, ClosedError
from tests.driver.rig import Rig


def raw(array: np.ndarray[tuple[int, ...], np.dtype[np.int32]]) -> Tensor:
    """The array's memory, known only by its address."""
    return Tensor(array.ctypes.data, array.shape, array.strides, "i32", False, object())


def test_array_of_a_buffer_is_a_view(rig: Rig) -> None:
    with rig.device.allocate_host(4096) as buffer:
        whole = tensor_in(buffer, "u8", (4096,)).array()
        part = tensor_in(buffer, "f32", (3, 5), offset_bytes=16)
        assert part.strides == (20, 4)
        part.array()[2, 4] = 1.5
        assert whole[16 + 14 * 4 :][:4].view(np.float32)[0] == 1.5
        assert np.count_nonzero(whole) == 2


@pytest.mark.parametrize(
    ("shape", "offset"), [((1025,), 0), ((1024,), 4), ((1,), 4096), ((1,), -4), ((1,), 2)]
)
def test_what_does_not_fit_a_buffer_is_refused(
    rig: Rig, shape: tuple[int, ...], offset: int
) -> None:
    with rig.device.allocate_host(4096) as buffer, pytest.raises(ArgumentError, match="4096 bytes"):
        tensor_in(buffer, "f32", shape, offset_bytes=offset)


def test_array_of_a_numpy_array_is_that_array() -> None:
    array = np.zeros((3, 4), np.uint16)[:, ::2]
    tensor = tensor_of(array, "bf16", (3, 2), "x")
    assert tensor.array() is array
    assert (tensor.shape, tensor.strides, tensor.on_device) == ((3, 2), (8, 4), False)
    assert tensor_of(tensor, "bf16", (3, 2), "x") is tensor


def test_bf16_may_come_as_signed_integers() -> None:
    assert tensor_of(np.zeros(2, np.int16), "bf16", (2,), "x").dtype == "bf16"


@pytest.mark.parametrize("step", [1, 2, -1, -2])
def test_strides_of_raw_memory(step: int) -> None:
    array = np.arange(60, dtype=np.int32).reshape(6, 10)
    for view in (array[::step], array[:, ::step], array.T[::step, ::step], array[2:2, ::step]):
        np.testing.assert_array_equal(raw(view).array(), view)


def test_rows_row_and_batch() -> None:
    array = np.arange(60, dtype=np.int32).reshape(6, 10)[:, ::3]
    tensor = tensor_of(array, "i32", array.shape, "x")
    np.testing.assert_array_equal(tensor.rows(2, 5).array(), array[2:5])
    np.testing.assert_array_equal(tensor.row(4).array(), array[4])
    np.testing.assert_array_equal(tensor.as_batch().array(), array[None])
    np.testing.assert_array_equal(tensor.rows(1, 4).row(1).array(), array[2])


def test_contiguous_strides() -> None:
    assert contiguous_strides((2, 3, 4), 2) == (24, 8, 2)
    assert contiguous_strides((), 4) == ()


def test_wrong_kinds_are_refused() -> None:
    with pytest.raises(ArgumentError, match="q is a list"):
        tensor_of([1, 2], "f32", (2,), "q")
    with pytest.raises(ArgumentError, match="q has dtype float64; float32"):
        tensor_of(np.zeros(2), "f32", (2,), "q")
    with pytest.raises(ArgumentError, match=r"q has dtype float32.*from_float32"):
        tensor_of(np.zeros(2, np.float32), "bf16", (2,), "q")
    with pytest.raises(ArgumentError, match=r"q has shape \(2,\); \(3,\)"):
        tensor_of(np.zeros(2, np.float32), "f32", (3,), "q")
    with pytest.raises(ArgumentError, match="q has dtype i32; f32"):
        tensor_of(raw(np.zeros(2, np.int32)), "f32", (2,), "q")


def test_cuda_array_interface() -> None:
    facts = {"shape": (2, 3), "typestr": "|V2", "data": (4096, False), "version": 3}
    tensor = tensor_of(SimpleNamespace(__cuda_array_interface__=facts), "bf16", (2, 3), "k")
    assert (tensor.address, tensor.strides, tensor.on_device) == (4096, (6, 2), True)
    with pytest.raises(ArgumentError, match="GPU"):
        tensor.array()
    strided = SimpleNamespace(__cuda_array_interface__={**facts, "strides": (12, 4)})
    assert tensor_of(strided, "bf16", (2, 3), "k").strides == (12, 4)
    with pytest.raises(ArgumentError, match="float32"):
        tensor_of(strided, "f32", (2, 3), "k")


def test_tensors_compare_by_what_they_name() -> None:
    tensor = raw(np.zeros(2, np.int32))
    assert replace(tensor) == tensor


SHARED = {  # strides of bytes for u16 [4, 3, 8]
    "expanded rows": (0, 16, 2),
    "expanded heads": (16, 0, 2),
    "expanded elements": (48, 16, 0),
    "rows that overlap": (32, 16, 2),
    "rows that overlap backwards": (-32, 16, 2),
    "heads that overlap": (48, 14, 2),
    "rows inside each other": (2, 16, 2),
}
APART = {
    "in order": (48, 16, 2),
    "in another order": (16, 64, 2),
    "backwards": (-48, -16, -2),
    "with gaps": (300, 40, 4),
    "between each other": (2, 64, 8),
}


@pytest.mark.parametrize("strides", SHARED.values(), ids=SHARED)
def test_what_is_written_and_overlaps_itself_is_refused(strides: tuple[int, int, int]) -> None:
    memory = np.zeros(2000, np.uint16)[1000:]
    array = np.lib.stride_tricks.as_strided(memory, (4, 3, 8), strides)
    with pytest.raises(ArgumentError, match=r"x has strides .* share bytes"):
        tensor_of(array, "bf16", (4, 3, 8), "x", written=True)
    assert tensor_of(array, "bf16", (4, 3, 8), "x").strides == strides
    alike = Tensor(memory.ctypes.data, (4, 3, 8), strides, "bf16", False, memory)
    with pytest.raises(ArgumentError, match="share bytes"):
        tensor_of(alike, "bf16", (4, 3, 8), "x", written=True)
    one = np.lib.stride_tricks.as_strided(memory, (1, 1, 1), strides)
    assert tensor_of(one, "bf16", (1, 1, 1), "x", written=True).strides == strides


@pytest.mark.parametrize("strides", APART.values(), ids=APART)
def test_what_is_written_may_have_any_other_strides(strides: tuple[int, int, int]) -> None:
    memory = np.zeros(2000, np.uint16)[1000:]
    array = np.lib.stride_tricks.as_strided(memory, (4, 3, 8), strides)
    assert tensor_of(array, "bf16", (4, 3, 8), "x", written=True).strides == strides


def test_a_buffer_that_was_closed_is_not_read() -> None:
    """It would be a segmentation fault."""
    with open_device("host") as device:
        buffer = device.allocate_host(4096)
        whole = tensor_in(buffer, "i32", (8, 4))
        for part in (whole, whole.rows(2, 4), whole.row(3), whole.rows(1, 5).every(2, 0, 2)):
            assert not part.array().any()
        parts = [whole, whole.row(3), whole.rows(1, 5).every(2, 0, 2).as_batch()]
        buffer.close()
        for part in parts:
            with pytest.raises(ClosedError, match=r"i32 .* is in a buffer that was closed"):
                part.array()
