"""Every kernel compiles without a GPU, within its registers; the cubin cache; the table."""

from __future__ import annotations

import os
import re
import stat
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from hsswap import ptx
from hsswap.driver import nvrtc
from hsswap.driver.cubin_cache import CubinCache, cache_folder
from hsswap.driver.nvrtc import Compiler
from hsswap.errors import DeviceError

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
HOPPER_ONLY = re.compile(r"wgmma|setmaxnreg")
REPORT = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


def missing_compiler() -> str | None:
    """Why NVRTC cannot be used here, or None."""
    try:
        nvrtc.compiler_version()
    except DeviceError as error:
        return str(error)
    return None


needs_compiler = pytest.mark.skipif(missing_compiler() is not None, reason=str(missing_compiler()))
EXAMPLES = [
    pytest.param(name, example, id=f"{name}-{index}")
    for name, kernel in ptx.KERNELS.items()
    for index, example in enumerate(kernel.examples)
]


@cache
def compiled_file(
    file: str, arch: str, example: tuple[tuple[str, int | str], ...]
) -> nvrtc.Compiled:
    """A file, with the report; once for all its kernels."""
    return Compiler(arch, None).compile(ptx.Kernel(file, ""), dict(example), report=True)


def report_of(log: str, entry: str) -> tuple[int, int, int]:
    """Bytes of stack, spill stores and spill loads of one kernel, from ptxas's report."""
    start = re.search(rf"Function properties for {entry}\b|Compiling entry function '{entry}'", log)
    assert start, log
    numbers = REPORT.search(log, start.start())
    assert numbers, log
    return int(numbers[1]), int(numbers[2]), int(numbers[3])


@needs_compiler
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("name", "example"), EXAMPLES)
def test_every_kernel_compiles(name: str, example: ptx.Constants, arch: str) -> None:
    kernel = ptx.KERNELS[name]
    parts = [kernel.file, *ptx.included_files(ptx.source(kernel.file))]
    if any(HOPPER_ONLY.search(ptx.source(part)) for part in parts):
        if arch != "sm_90":
            pytest.skip(f"{kernel.file} is for Hopper only")
        arch = "sm_90a"
    compiled = compiled_file(kernel.file, arch, tuple(example.items()))
    assert compiled.cubin[:4] == b"\x7fELF"
    assert "warning" not in compiled.log
    if kernel.no_spills:
        assert report_of(compiled.log, kernel.entry) == (0, 0, 0)


@needs_compiler
def test_a_source_that_does_not_compile_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ptx, "source", lambda file: "not C++")
    with pytest.raises(DeviceError, match=r"x\.cu does not compile(.|\n)*error"):
        Compiler("sm_90", None).compile(ptx.Kernel("x.cu", "x"), {})


@needs_compiler
def test_the_cache_saves_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = ptx.KERNELS["gather"]
    cache = CubinCache(tmp_path / "cubins")
    first = Compiler("sm_90", cache).compile(kernel, {"CHUNK": 16})
    calls: list[str] = []
    real = nvrtc._compile

    def counted(
        name: str, text: str, included: dict[str, str], options: list[str]
    ) -> nvrtc.Compiled:
        calls.append(name)
        return real(name, text, included, options)

    monkeypatch.setattr(nvrtc, "_compile", counted)
    assert Compiler("sm_90", cache).compile(kernel, {"CHUNK": 16}).cubin == first.cubin
    assert calls == []
    Compiler("sm_90", cache).compile(kernel, {"CHUNK": 2})
    Compiler("sm_80", cache).compile(kernel, {"CHUNK": 16})
    monkeypatch.setattr(nvrtc, "compiler_version", lambda: (13, 99))
    Compiler("sm_90", cache).compile(kernel, {"CHUNK": 16})
    assert len(calls) == 3


@needs_compiler
def test_the_log_is_written_to_memory_of_its_own() -> None:
    """An empty log is one byte, and CPython shares bytes of length one."""
    shared = [bytes([value]) for value in range(256)]
    Compiler("sm_90", None).compile(ptx.KERNELS["gather"], {"CHUNK": 16})
    assert [value[0] for value in shared] == list(range(256))


def test_sources_are_part_of_the_package() -> None:
    """A wheel without them would fail on its first GPU only."""
    folder = Path(ptx.__file__).parent
    project = (folder.parents[1] / "pyproject.toml").read_text()
    assert '"ptx/*.cu", "ptx/*.cuh"' in project
    named = {kernel.file for kernel in ptx.KERNELS.values()}
    assert named == {path.name for path in folder.glob("*.cu")}
    for name in named:
        assert ptx.source(name).startswith("//"), f"{name} does not say what it is"
        for kernel in ptx.KERNELS.values():
            if kernel.file == name:
                assert re.search(rf"\b{kernel.entry}\(", ptx.source(name))


def test_included_files_are_found_once_and_through_others() -> None:
    expected = ("select_cache.cuh", "select_parts.cuh", "common.cuh")
    assert ptx.included_files(ptx.source("select.cu")) == expected


# --- the cache on disk


def test_what_is_put_is_got(tmp_path: Path) -> None:
    cache = CubinCache(tmp_path / "a" / "b")
    assert cache.get(["x"]) is None
    cache.put(["x", "y"], b"one")
    cache.put(["xy"], b"two")
    assert (cache.get(["x", "y"]), cache.get(["xy"]), cache.get(["x"])) == (b"one", b"two", None)
    folder = tmp_path / "a" / "b"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {path.suffix for path in folder.iterdir()} == {".cubin"}


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "other schema"])
def test_damaged_entries_are_removed(tmp_path: Path, damage: str) -> None:
    cache = CubinCache(tmp_path / "cubins")
    cache.put(["x"], b"content")
    (entry,) = (tmp_path / "cubins").iterdir()
    data = entry.read_bytes()
    entry.write_bytes(
        {
            "cut": data[:-1],
            "flip": data[:-1] + bytes([data[-1] ^ 1]),
            "empty": b"",
            "other schema": b"h" + data,
        }[damage]
    )
    assert cache.get(["x"]) is None
    assert not entry.exists()
    cache.put(["x"], b"content")
    assert cache.get(["x"]) == b"content"


def test_a_folder_that_others_may_write_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "cubins"
    cache = CubinCache(folder)
    cache.put(["x"], b"content")
    folder.chmod(0o777)
    assert cache.get(["x"]) is None
    cache.put(["y"], b"content")
    folder.chmod(0o700)
    assert cache.get(["y"]) is None
    assert cache.get(["x"]) == b"content"


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = CubinCache(tmp_path / "file" / "cubins")
    cache.put(["x"], b"content")
    assert cache.get(["x"]) is None


def test_where_the_cache_is() -> None:
    home = Path.home()
    assert cache_folder({}) == home / ".cache" / "hsswap"
    assert cache_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/hsswap")
    assert cache_folder({"XDG_CACHE_HOME": "relative"}) == home / ".cache" / "hsswap"
    assert cache_folder({"XDG_CACHE_HOME": "/x", "HSSWAP_CACHE_DIR": "/y"}) == Path("/y")


def test_no_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def old() -> tuple[int, int, int]:
        return 0, 12, 9

    monkeypatch.setattr(nvrtc, "_nvrtc", lambda: SimpleNamespace(nvrtcVersion=old))
    nvrtc.compiler_version.cache_clear()
    with pytest.raises(DeviceError, match=r"CUDA 12\.9; 13 or newer.*pip install"):
        nvrtc.compiler_version()
    nvrtc.compiler_version.cache_clear()


def test_no_bindings_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc._nvrtc.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(DeviceError, match=r"NVRTC cannot be loaded.*pip install"):
        nvrtc._nvrtc()
    nvrtc._nvrtc.cache_clear()


def test_importing_the_driver_loads_nothing(tmp_path: Path) -> None:
    """Promise 6: nothing of CUDA is touched by an import, nor by opening the host device."""
    code = (
        "import sys, hsswap.driver as d\n"
        "d.open_device('host').close()\n"
        "assert not [m for m in sys.modules if m.split('.')[0] == 'cuda'], sys.modules"
    )
    root = Path(ptx.__file__).parents[2]
    assert (
        os.spawnve(
            os.P_WAIT, sys.executable, [sys.executable, "-c", code], {"PYTHONPATH": str(root)}
        )
        == 0
    )
