"""Finding the driver and reading its codes: what a user is told, without a GPU."""

from __future__ import annotations

import enum
import random
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from hsswap.driver.cuda import arch_of
from hsswap.driver.cuda_errors import CudaError, checked, error_of, load_driver
from hsswap.driver.cuda_memory import UploadRing
from hsswap.driver.cuda_operations import power_of_x
from hsswap.driver.cuda_stream import handle_number
from hsswap.errors import ArgumentError, DeviceError


def one_sentence(error: DeviceError) -> str:
    """The message, which must fit one line."""
    text = str(error)
    assert "\n" not in text
    return text


def fake_library(monkeypatch: pytest.MonkeyPatch, status: int, version: int) -> None:
    """A libcuda that answers one question."""

    def get_version(out: Any) -> int:
        out._obj.value = version
        return status

    library = SimpleNamespace(cuDriverGetVersion=get_version)
    monkeypatch.setattr("ctypes.CDLL", lambda name: library)


def test_no_libcuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr("ctypes.CDLL", missing)
    with pytest.raises(DeviceError, match=r"cuda:0 needs libcuda.*580 or newer.*host") as caught:
        load_driver("cuda:0")
    one_sentence(caught.value)


@pytest.mark.parametrize("version", [12080, 12090, 11040])
def test_a_driver_of_cuda_12_is_refused(monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    fake_library(monkeypatch, 0, version)
    shown = rf"for CUDA {version // 1000}\.{version % 1000 // 10}: update"
    with pytest.raises(DeviceError, match=rf"580 or newer.*{shown}") as caught:
        load_driver("cuda:1")
    one_sentence(caught.value)


def test_a_library_that_is_not_nvidias(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: SimpleNamespace())
    with pytest.raises(DeviceError, match="not NVIDIA's driver"):
        load_driver("cuda:0")


def test_no_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_library(monkeypatch, 0, 13000)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(DeviceError, match=r"needs the package cuda-python.*pip install"):
        load_driver("cuda:0")


class Code(enum.IntEnum):
    """Some codes, as the bindings give them."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_NEW_IN_CUDA_99 = 12345


def test_codes_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "cuda.bindings.driver", raising=False)
    ordinary = error_of(Code.CUDA_ERROR_OUT_OF_MEMORY, "cuMemAlloc of 5 bytes")
    assert str(ordinary) == (
        "cuMemAlloc of 5 bytes failed: CUDA_ERROR_OUT_OF_MEMORY (out of memory); memory is used "
        "up; take fewer slots, or free memory elsewhere"
    )
    sticky = error_of(Code.CUDA_ERROR_ILLEGAL_ADDRESS, "work on cuda:0")
    assert "start a new process" in one_sentence(sticky)
    assert "documentation" in one_sentence(error_of(Code.CUDA_ERROR_NEW_IN_CUDA_99, "x"))


def test_checked_gives_values_or_raises() -> None:
    ok = Code.CUDA_SUCCESS
    assert checked((ok,), "x") is None
    assert checked((ok, 5), "x") == 5
    assert checked((ok, 5, 6), "x") == (5, 6)
    with pytest.raises(CudaError) as caught:
        checked((Code.CUDA_ERROR_OUT_OF_MEMORY, None), "x")
    assert caught.value.code == "CUDA_ERROR_OUT_OF_MEMORY"


def test_architectures() -> None:
    names = [arch_of(version) for version in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 1))]
    assert names == ["sm_80", "sm_89", "sm_90a", "sm_100", "sm_121"]


def test_handles_of_other_libraries() -> None:
    pointer = 0x7F0000001000
    for given in (
        pointer,
        SimpleNamespace(__cuda_stream__=lambda: (0, pointer)),
        SimpleNamespace(__cuda_stream__=(0, pointer)),
        SimpleNamespace(cuda_stream=pointer),
        SimpleNamespace(ptr=pointer),
    ):
        assert handle_number(given) == pointer
    assert handle_number(0) == 0
    for wrong in ("1", 1.5, True, None, object(), SimpleNamespace(ptr="x")):
        with pytest.raises(ArgumentError, match="a stream handle is a"):
            handle_number(wrong)
    for wrong in (2, 5, -1):
        with pytest.raises(ArgumentError, match="names no stream"):
            handle_number(wrong)


def test_powers_of_x_compose() -> None:
    """x^0 is bit 31; x^32 is the polynomial itself."""
    assert power_of_x(0) == 1 << 31
    assert power_of_x(31) == 1
    assert power_of_x(32) == 0xEDB88320
    # 2^32 - 1 is the order of x modulo a primitive polynomial.
    assert power_of_x((1 << 32) - 1) == 1 << 31


def bare_ring(nbytes: int) -> UploadRing:
    """A ring without its memory."""
    ring = object.__new__(UploadRing)
    ring.nbytes, ring.head, ring._tail = nbytes, 0, 0
    return ring


def test_a_ring_never_gives_what_is_in_flight() -> None:
    ring = bare_ring(1024)
    assert [ring.take(1), ring.take(256), ring.take(257)] == [0, 256, 512]
    assert ring.take(1) is None
    ring.free_until(256)
    assert [ring.take(200), ring.take(1)] == [0, None]
    ring.free_until(ring.head)
    # 768 bytes do not fit between 256 and the end: the rest is left out.
    assert ring.take(1000) is None
    assert ring.take(600) == 256
    assert ring.take(300) is None
    ring.free_until(ring.head)
    assert ring.take(512) == 0


def test_a_ring_against_a_model() -> None:
    """Random takes and releases in order: no two spans in flight overlap."""
    rng = random.Random(1)
    ring = bare_ring(1 << 13)
    flying: list[tuple[int, int, int]] = []  # offset, nbytes, head behind it
    for _ in range(3000):
        if flying and rng.random() < 0.4:
            ring.free_until(flying.pop(0)[2])
        nbytes = rng.randrange(1, 3000)
        offset = ring.take(nbytes)
        if offset is None:
            assert flying or nbytes > ring.nbytes
            continue
        assert offset % ring.ALIGN == 0
        assert offset + nbytes <= ring.nbytes
        for other, length, _ in flying:
            assert offset + nbytes <= other or other + length <= offset
        flying.append((offset, nbytes, ring.head))
