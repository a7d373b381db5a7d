"""The CUDA driver: finding it, and the one place where its return codes are checked.

Every call goes through :func:`checked`. An error names the call, the code, what it means and what
to do. Some codes are *sticky*: after them every call in the process's context fails the same way,
and only a new process helps; the text says so.
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress
from types import ModuleType
from typing import Any

from hsswap.errors import DeviceError

DRIVER_FLOOR = 13000
"""CUDA version of the oldest driver that runs cubins of CUDA 13: release 580."""

_REMEDIES = {
    "CUDA_ERROR_OUT_OF_MEMORY": "memory is used up; take fewer slots, or free memory elsewhere",
    "CUDA_ERROR_NO_DEVICE": "no GPU is visible; look at nvidia-smi and CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_INVALID_DEVICE": "there is no such GPU; look at nvidia-smi -L",
    "CUDA_ERROR_NOT_INITIALIZED": "the driver could not start; look at nvidia-smi",
    "CUDA_ERROR_SYSTEM_NOT_READY": "the driver's services do not run; look at nvidia-fabricmanager",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "libcuda and the kernel module differ; reboot",
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": "remove the cuda-compat package from the path",
    "CUDA_ERROR_INVALID_HANDLE": "the stream or event was destroyed, or is no handle at all",
    "CUDA_ERROR_CONTEXT_IS_DESTROYED": "the context was destroyed while hsswap used it",
    "CUDA_ERROR_INVALID_CONTEXT": "the handle is of another context or GPU",
    "CUDA_ERROR_INVALID_IMAGE": "delete the cubin cache (HSSWAP_CACHE_DIR or ~/.cache/hsswap)",
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "delete the cubin cache (HSSWAP_CACHE_DIR or ~/.cache/hsswap)",
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES": "report it: a kernel asks for more than this GPU has",
    "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED": "the memory is pinned already, by someone else",
    "CUDA_ERROR_OPERATING_SYSTEM": "the system refused; pinning is limited by ulimit -l (memlock)",
    "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": "this call cannot be captured in a graph",
}

# Codes after which the context is lost (CUDA driver API, "sticky" errors of kernels).
_STICKY = frozenset(
    {
        "CUDA_ERROR_ILLEGAL_ADDRESS",
        "CUDA_ERROR_LAUNCH_TIMEOUT",
        "CUDA_ERROR_ASSERT",
        "CUDA_ERROR_HARDWARE_STACK_ERROR",
        "CUDA_ERROR_ILLEGAL_INSTRUCTION",
        "CUDA_ERROR_MISALIGNED_ADDRESS",
        "CUDA_ERROR_INVALID_ADDRESS_SPACE",
        "CUDA_ERROR_INVALID_PC",
        "CUDA_ERROR_LAUNCH_FAILED",
        "CUDA_ERROR_ECC_UNCORRECTABLE",
        "CUDA_ERROR_NVLINK_UNCORRECTABLE",
        "CUDA_ERROR_CONTAINED",
        "CUDA_ERROR_TENSOR_MEMORY_LEAK",
    }
)


class CudaError(DeviceError):
    """A driver call failed. ``code`` is the code's name."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


def error_of(code: Any, what: str) -> CudaError:
    """The error that says what ``code``, a CUresult, means for the call ``what``."""
    name = str(getattr(code, "name", code))
    text = name.removeprefix("CUDA_ERROR_").replace("_", " ").lower()
    # Whatever goes wrong here, the error itself must be reported.
    with suppress(Exception):
        status, explanation = sys.modules["cuda.bindings.driver"].cuGetErrorString(code)
        if int(status) == 0:
            text = explanation.decode(errors="replace")
    if name in _STICKY:
        remedy = (
            "earlier work on this GPU failed and its context is lost: start a new process, and run "
            "compute-sanitizer to find the kernel"
        )
    else:
        remedy = _REMEDIES.get(name, "see the CUDA driver API documentation for this code")
    return CudaError(f"{what} failed: {name} ({text}); {remedy}", name)


def checked(result: tuple[Any, ...], what: str) -> Any:
    """What a call of ``cuda.bindings.driver`` returned behind its status; raises CudaError.

    One value by itself, several as a tuple, none as None.
    """
    status = result[0]
    if status:
        raise error_of(status, what)
    if len(result) == 2:
        return result[1]
    return result[1:] or None


def load_driver(name: str) -> ModuleType:
    """``cuda.bindings.driver``, started. ``name`` ("cuda:0") is for errors.

    libcuda is looked at by itself first, so that a missing or old driver is one sentence and not a
    stack of loader errors. Raises DeviceError.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceError(
            f"{name} needs libcuda.so.1, which cannot be loaded: install the NVIDIA driver, 580 or "
            'newer, or use device="host"'
        ) from error
    version = ctypes.c_int(0)
    try:
        status = int(library.cuDriverGetVersion(ctypes.byref(version)))
    except AttributeError as error:
        raise DeviceError(
            f"{name}: libcuda.so.1 is not NVIDIA's driver (it has no cuDriverGetVersion); install "
            'the driver, 580 or newer, or use device="host"'
        ) from error
    if status != 0 or version.value < DRIVER_FLOOR:
        shown = f"{version.value // 1000}.{version.value % 1000 // 10}"
        raise DeviceError(
            f"{name} needs an NVIDIA driver for CUDA 13 (release 580 or newer); this one is for "
            f'CUDA {shown}: update the driver, or use device="host"'
        )
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DeviceError(
            f"{name} needs the package cuda-python, 13 or newer, which cannot be imported "
            f"({error}): pip install 'hsswap[cuda]'"
        ) from error
    checked(driver.cuInit(0), f"{name}: cuInit")
    module: ModuleType = driver
    return module
