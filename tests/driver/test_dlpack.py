"""Arrays of other frameworks through DLPack: BF16, strides, memory of a GPU, wrong kinds."""

from __future__ import annotations

import ctypes
import gc
import re
from typing import Any

import numpy as np
import pytest

from hsswap.driver import dlpack
from hsswap.driver.tensor import tensor_of
from hsswap.errors import ArgumentError
from tests.swap_cases import SMALL, config_for, random_case
from tests.swap_watch import watched


class Foreign:
    """Somebody's array: what it exports is made by hand, as a framework does in C."""

    alive = 0

    def __init__(self, array: np.ndarray, code: int, kind: int = dlpack.CPU, **more: Any) -> None:
        Foreign.alive += 1
        self.array = array
        self.shape = array.shape
        self._kind = kind
        itemsize = array.itemsize
        self._shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        self._strides = (ctypes.c_int64 * array.ndim)(*[s // itemsize for s in array.strides])
        self._tensor = dlpack._Tensor(
            array.ctypes.data - more.get("offset", 0),
            kind,
            0,
            array.ndim,
            code,
            8 * itemsize,
            more.get("lanes", 1),
            self._shape,
            None if more.get("contiguous") else self._strides,
            more.get("offset", 0),
        )
        self.streams: list[object] = []

    def __del__(self) -> None:
        Foreign.alive -= 1

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._kind, 0

    def __dlpack__(self, stream: object = None) -> object:
        self.streams.append(stream)
        new = ctypes.pythonapi.PyCapsule_New
        new.restype = ctypes.py_object
        new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(self._tensor), b"dltensor", None)


class Exporting:
    """A NumPy array of which nothing but DLPack is seen."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array
        self.shape = array.shape

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> object:
        return self._array.__dlpack__(**options)


def test_bf16_with_strides_is_taken_where_it_lies() -> None:
    whole = np.arange(96, dtype=np.uint16).reshape(4, 6, 4)
    for view in (whole, whole[::-1, 1:5, ::2], whole.transpose(2, 0, 1)):
        tensor = tensor_of(Foreign(view, dlpack.BFLOAT), "bf16", view.shape, "keys")
        assert tensor.address == view.ctypes.data
        assert (tensor.array() == view).all()
        gc.collect()
        assert Foreign.alive == 1  # the tensor holds it
        del tensor
        gc.collect()
        assert Foreign.alive == 0


def test_contiguous_without_strides_and_with_an_offset() -> None:
    whole = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
    foreign = Foreign(whole, dlpack.FLOAT, contiguous=True, offset=64)
    assert (tensor_of(foreign, "f32", (3, 4, 5), "x").array() == whole).all()
    one = Foreign(whole[0, 0], dlpack.FLOAT, contiguous=True)
    assert tensor_of(one, "f32", (5,), "x").strides == (4,)
    plain = np.arange(6, dtype=np.int32)
    assert (tensor_of(Exporting(plain), "i32", (6,), "x").array() == plain).all()


def test_memory_of_a_gpu_is_not_waited_for() -> None:
    foreign = Foreign(np.zeros((2, 2), np.uint16), dlpack.BFLOAT, dlpack.CUDA)
    assert tensor_of(foreign, "bf16", (2, 2), "keys").on_device
    assert foreign.streams == [-1]
    for kind in (dlpack.CUDA_HOST, dlpack.CUDA_MANAGED):
        pinned = Foreign(np.zeros((2, 2), np.uint16), dlpack.BFLOAT, kind)
        assert not tensor_of(pinned, "bf16", (2, 2), "keys").on_device
        assert pinned.streams == [None]


def test_wrong_kinds_are_refused() -> None:
    numbers = np.zeros((2, 2), np.uint16)
    for foreign, dtype, message in (
        (Foreign(numbers, dlpack.FLOAT), "bf16", "has dtype float16; bf16"),
        (Foreign(numbers, dlpack.BFLOAT, lanes=2), "bf16", "has dtype bfloat16 in lanes of 2;"),
        (Foreign(numbers, dlpack.BFLOAT, 7), "bf16", "is in memory of kind 7"),
        (Foreign(np.zeros((2, 2), np.float64), dlpack.FLOAT), "f32", "has dtype float64; f32"),
        (Foreign(np.zeros(2, np.uint8), dlpack.E4M3), "bf16", "has dtype float8_e4m3fn; bf16"),
        (Foreign(numbers, 99), "bf16", "has dtype of DLPack's code 99, bits 16;"),
        (Exporting(np.array(["a"])), "u8", "cannot be exported"),
    ):
        with pytest.raises(ArgumentError, match=f"queries {message}"):
            tensor_of(foreign, dtype, foreign.shape, "queries")
    meaning = re.escape("(2, 3) is needed, [rows, dim]")
    with pytest.raises(ArgumentError, match=meaning):
        tensor_of(Foreign(numbers, dlpack.BFLOAT), "bf16", (2, 3), "queries", axes="[rows, dim]")


async def test_a_sequence_takes_them() -> None:
    case = random_case(SMALL, 40, 3)
    outputs = []
    for wrap in (lambda a: a, lambda a: Foreign(a, dlpack.BFLOAT), Exporting):
        async with watched(config_for(case)) as swap, swap.sequence() as sequence:
            await sequence.append(0, wrap(case.keys[0]), wrap(case.values[0]))
            out = np.zeros((40, 6, 16), np.uint16)
            await (await sequence.attend(0, wrap(case.queries[0]), wrap(out))).done()
            outputs.append(out)
    assert outputs[0].any()
    assert all((out == outputs[0]).all() for out in outputs)
