"""Kernels are loaded once, those of one file together, and compiled side by side. No GPU."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from hsswap import ptx
from hsswap.driver.cubin_cache import CubinCache
from hsswap.driver.cuda_modules import Modules, key_of
from hsswap.driver.nvrtc import Compiled, Compiler
from hsswap.errors import DeviceError
from tests.driver.fake_driver import OK, FakeContext, FakeDriver
from tests.test_ptx import needs_compiler


class Driver(FakeDriver):
    """Modules and functions are numbers."""

    loaded = 0
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES=1)

    def cuModuleLoadData(self, address: int) -> tuple[int, int]:
        """Counted."""
        self.loaded += 1
        return OK, self.loaded

    def cuModuleGetFunction(self, module: int, entry: bytes) -> tuple[int, tuple[int, bytes]]:
        """Says where it is from."""
        return OK, (module, entry)

    def cuFuncGetParamInfo(self, handle: object, index: int) -> tuple[int, int, int]:
        """Offset and bytes."""
        return OK, 0, 8

    def cuFuncGetAttribute(self, kind: int, handle: object) -> tuple[int, int]:
        """Static shared memory."""
        return OK, 0


class Told(Compiler):
    """Compiles nothing, and notes what it was asked for; ``broken`` files do not compile."""

    def __init__(self, broken: str = "") -> None:
        super().__init__("sm_90", None)
        self.files: list[str] = []
        self._broken = broken

    def compile(
        self, kernel: ptx.Kernel, constants: ptx.Constants, *, report: bool = False
    ) -> Compiled:
        """A cubin of one byte."""
        if kernel.file == self._broken:
            raise DeviceError(f"{kernel.file} does not compile")
        self.files.append(kernel.file)
        return Compiled(b"x", "")


def modules_with(compiler: Compiler) -> tuple[Modules, Driver]:
    context = FakeContext()
    context.driver = driver = Driver()
    return Modules(context, compiler), driver  # type: ignore[arg-type]


GATHER, SCATTER = (key_of(name, {"CHUNK": 16}) for name in ("gather", "scatter"))
SELECT, OTHER = key_of("select", {}), key_of("gather", {"CHUNK": 2})


def test_a_file_is_compiled_once_for_all_its_kernels() -> None:
    compiler = Told()
    modules, driver = modules_with(compiler)
    modules.load([GATHER, SCATTER, SELECT])
    assert sorted(compiler.files) == ["gather.cu", "select.cu"]
    assert driver.loaded == 2
    first = modules.function(GATHER)
    modules.load([SCATTER, GATHER, OTHER])
    assert sorted(compiler.files) == ["gather.cu", "gather.cu", "select.cu"]
    assert modules.function(GATHER) is first
    assert driver.loaded == 3


def test_what_does_not_compile_says_so_and_the_rest_can_still_be_used() -> None:
    modules, driver = modules_with(Told("select.cu"))
    with pytest.raises(DeviceError, match="select"):
        modules.load([GATHER, SELECT])
    modules.function(GATHER)
    with pytest.raises(DeviceError, match="unknown"):
        modules.load([GATHER, key_of("nothing", {})])
    assert driver.loaded == 1


def test_what_is_loaded_can_be_used_while_another_is_compiled() -> None:
    """The loop launches; a thread compiles."""
    begun, go = threading.Event(), threading.Event()

    class Slow(Told):
        def compile(
            self, kernel: ptx.Kernel, constants: ptx.Constants, *, report: bool = False
        ) -> Compiled:
            if kernel.file == "select.cu":
                begun.set()
                assert go.wait(60)
            return super().compile(kernel, constants, report=report)

    modules, driver = modules_with(Slow())
    thread = threading.Thread(target=lambda: modules.load([SELECT]))
    thread.start()
    try:
        assert begun.wait(60)
        modules.load([GATHER, SCATTER])
        modules.function(GATHER)
        assert driver.loaded == 1
    finally:
        go.set()
        thread.join(60)
    modules.function(SELECT)
    assert driver.loaded == 2


@needs_compiler
def test_cubins_come_in_the_order_asked_for(tmp_path: Path) -> None:
    compiler = Compiler("sm_90", CubinCache(tmp_path / "cubins"))
    asked: list[tuple[ptx.Kernel, ptx.Constants]] = [
        (ptx.KERNELS["gather"], {"CHUNK": 16}),
        (ptx.KERNELS["finalize"], {}),
        (ptx.KERNELS["gather"], {"CHUNK": 2}),
    ]
    made = compiler.compile_all(asked)
    assert made == [compiler.compile(*each).cubin for each in asked]
    assert len(set(made)) == 3
