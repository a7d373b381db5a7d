"""DLPack: an engine's array as an address, a shape and strides, without copying it.

NumPy's own reader knows no BF16, and nothing of a GPU's memory. The struct is that of
``dlpack.h``, version 0.8, which every framework still hands out to who asks for no version::

    data* | device type, id | ndim | code, bits, lanes | shape* | strides* | offset
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

from hsswap.errors import ArgumentError

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
"""Kinds of memory (DLDeviceType). The last two are reached by the CPU and the GPU."""

INT, UINT, FLOAT, BFLOAT, E4M3 = 0, 1, 2, 4, 10
"""Kinds of numbers (DLDataTypeCode)."""

KINDS = {
    "bf16": ((BFLOAT, 16), (UINT, 16), (INT, 16)),
    "f16": ((FLOAT, 16),),
    "e4m3": ((E4M3, 8), (UINT, 8)),
    "f32": ((FLOAT, 32),),
    "i32": ((INT, 32),),
    "i64": ((INT, 64),),
    "u8": ((UINT, 8),),
    "u32": ((UINT, 32),),
}
"""What is taken for each dtype; BF16 and E4M3 also as their codes."""


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class Exported(NamedTuple):
    """Where an array is. ``strides`` in bytes. ``owner`` keeps the memory alive."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    on_device: bool
    owner: object


def exported(obj: Any, dtype: str, what: str) -> Exported:
    """Read what an object with ``__dlpack__`` exports. Nothing is synchronised: work is in the
    order of the caller's stream.

    Raises ArgumentError for another dtype or kind of memory, and for what cannot be exported.
    """
    try:
        kind = int(obj.__dlpack_device__()[0])
        # -1: no stream of the producer is to be waited for.
        capsule = obj.__dlpack__(stream=-1) if kind == CUDA else obj.__dlpack__()
        tensor = _Tensor.from_address(_pointer_in(capsule))
    except Exception as error:  # of any framework
        raise ArgumentError(f"{what} cannot be exported through DLPack: {error}") from error
    if tensor.device_type not in (CPU, CUDA, CUDA_HOST, CUDA_MANAGED):
        raise ArgumentError(f"{what} is in memory of kind {tensor.device_type}; give CPU or CUDA")
    if (tensor.code, tensor.bits) not in KINDS[dtype] or tensor.lanes != 1:
        raise ArgumentError(f"{what} has dtype {_name_of(tensor)}; {dtype} is needed")
    itemsize = tensor.bits // 8
    shape = tuple(tensor.shape[: tensor.ndim])
    if tensor.strides:
        strides = tuple(step * itemsize for step in tensor.strides[: tensor.ndim])
    else:  # contiguous
        steps = [itemsize]
        for extent in reversed(shape[1:]):
            steps.insert(0, steps[0] * extent)
        strides = tuple(steps[: tensor.ndim])
    address = (tensor.data or 0) + tensor.byte_offset
    # The capsule was not taken over: when it goes, the producer takes its array back.
    return Exported(address, shape, strides, tensor.device_type == CUDA, (capsule, obj))


def _name_of(tensor: _Tensor) -> str:
    """What a framework calls the dtype, as far as it is one that may be met."""
    kinds = {INT: "int", UINT: "uint", FLOAT: "float", BFLOAT: "bfloat"}
    kind = kinds.get(tensor.code, f"of DLPack's code {tensor.code}, bits ")
    name = "float8_e4m3fn" if tensor.code == E4M3 else f"{kind}{tensor.bits}"
    return name if tensor.lanes == 1 else f"{name} in lanes of {tensor.lanes}"


def _pointer_in(capsule: object) -> int:
    """The address in a capsule of this version. Raises ValueError for what is none."""
    api = ctypes.pythonapi.PyCapsule_GetPointer
    api.restype, api.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    return int(api(capsule, b"dltensor"))
