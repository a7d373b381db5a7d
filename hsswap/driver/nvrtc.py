"""Compiling the kernels: NVRTC to a cubin for one architecture, with the cache on disk.

A cubin, never PTX: the driver's own compiler refuses PTX that is newer than itself, while any CUDA
13 driver runs cubins of any CUDA 13 compiler (minor version compatibility, CUDA compatibility
guide). Nothing here needs a GPU.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hsswap import ptx
from hsswap.driver.cubin_cache import CubinCache
from hsswap.errors import DeviceError

OPTIONS = ("-std=c++17",)
MOST_THREADS = 16  # that compile at a time
LONGEST = ("attend_tile.cu", "attend_wide.cu", "codes_mass.cu")
"""Files that take twice as long as others (0.9 to 1.1 s of an EPYC)."""
INSTALL = "pip install 'hsswap[cuda]' (the package nvidia-cuda-nvrtc)"


@dataclass(frozen=True, slots=True)
class Compiled:
    """A cubin and what the compiler wrote. ``log`` is empty when it came from the cache."""

    cubin: bytes
    log: str


@cache
def _nvrtc() -> Any:
    """``cuda.bindings.nvrtc`` with its library loaded. Raises DeviceError."""
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except Exception as error:  # each release of the bindings has an exception type of its own
        reason = " ".join(str(error).split())
        raise DeviceError(f"NVRTC cannot be loaded ({reason}): {INSTALL}") from error
    return nvrtc


@cache
def compiler_version() -> tuple[int, int]:
    """NVRTC's version, as (13, 0). Raises DeviceError when it is missing or older than 13."""
    _, major, minor = _nvrtc().nvrtcVersion()
    if major < 13:
        raise DeviceError(f"NVRTC is of CUDA {major}.{minor}; 13 or newer is needed: {INSTALL}")
    return int(major), int(minor)


@cache
def _headers() -> tuple[str, str]:
    """The folder of CUDA's headers and their version. Raises DeviceError."""
    from cuda.pathfinder import find_nvidia_header_directory

    try:
        folder = find_nvidia_header_directory("cudart")
    except Exception as error:  # as above
        raise DeviceError(f"CUDA's headers cannot be found ({error}): {INSTALL}") from error
    if folder is None:
        raise DeviceError(
            "CUDA's headers cannot be found: pip install 'hsswap[cuda]' (nvidia-cuda-runtime)"
        )
    text = (Path(folder) / "cuda_runtime_api.h").read_text(errors="replace")
    match = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", text)
    return str(folder), match[1] if match else "unknown"


class Compiler:
    """Compiles kernels of the table for ``arch`` (``"sm_90a"``). Any thread may use it."""

    def __init__(self, arch: str, disk_cache: CubinCache | None) -> None:
        self.arch = arch
        self._cache = disk_cache

    def compile(
        self, kernel: ptx.Kernel, constants: ptx.Constants, *, report: bool = False
    ) -> Compiled:
        """The cubin of a kernel's file. ``report`` asks ptxas for registers and spills.

        Raises DeviceError with the whole log when the source does not compile.
        """
        text = ptx.source(kernel.file)
        options = [f"-arch={self.arch}", *OPTIONS]
        options += [f"-D{name}={value}" for name, value in sorted(constants.items())]
        if report:
            options.append("--ptxas-options=-v")
        included = {name: ptx.source(name) for name in ptx.included_files(text)}
        facts = [*options, text, *(part for item in sorted(included.items()) for part in item)]
        if "#include <" in text or any("#include <" in t for t in included.values()):
            folder, version = _headers()
            facts.append(f"headers {version}")
            options.append(f"-I{folder}")
        facts.append("nvrtc {}.{}".format(*compiler_version()))
        if report or self._cache is None:
            return _compile(kernel.file, text, included, options)
        found = self._cache.get(facts)
        if found is not None:
            return Compiled(found, "")
        compiled = _compile(kernel.file, text, included, options)
        self._cache.put(facts, compiled.cubin)
        return compiled

    def compile_all(self, asked: Sequence[tuple[ptx.Kernel, ptx.Constants]]) -> list[bytes]:
        """Cubins of many, side by side: NVRTC takes calls of many threads at once, 0.1 to 1 s of
        processor time each. Raises DeviceError for one that does not compile.

        Long ones begin first, then the last ones asked for, since variants for longer lists take
        longer: else some would run alone at the end (54 of a top-k swap on 16 processors: 1.7 s for
        2.1 of 1.5, by their times one by one; on 8 3.2 for 3.7).
        """
        if len(asked) < 2:
            return [self.compile(*each).cubin for each in asked]
        order = sorted(range(len(asked)), key=lambda at: (asked[at][0].file not in LONGEST, -at))
        threads = min(len(asked), MOST_THREADS, os.cpu_count() or 1)
        with ThreadPoolExecutor(threads, thread_name_prefix="hsswap-nvrtc") as pool:
            made = list(pool.map(lambda at: self.compile(*asked[at]).cubin, order))
        return [cubin for _, cubin in sorted(zip(order, made, strict=True))]


def _compile(name: str, text: str, included: dict[str, str], options: list[str]) -> Compiled:
    nvrtc = _nvrtc()
    headers = [part.encode() for part in included.values()]
    names = [part.encode() for part in included]
    program = _checked(
        nvrtc.nvrtcCreateProgram(text.encode(), name.encode(), len(names), headers, names), name
    )
    try:
        encoded = [option.encode() for option in options]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        log_buffer = _room(_checked(nvrtc.nvrtcGetProgramLogSize(program), name))
        _checked(nvrtc.nvrtcGetProgramLog(program, log_buffer), name)
        log = log_buffer.rstrip(b"\0").decode(errors="replace").rstrip()
        if int(status) != 0:
            raise DeviceError(
                f"{name} does not compile ({status.name}, options {' '.join(options)}); report "
                f"this:\n{log}"
            )
        cubin_bytes = _checked(nvrtc.nvrtcGetCUBINSize(program), name)
        cubin = _room(cubin_bytes)
        _checked(nvrtc.nvrtcGetCUBIN(program, cubin), name)
        return Compiled(cubin[:cubin_bytes], log)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _room(nbytes: int) -> bytes:
    """Bytes for the bindings to write to: theirs take no other type.

    One more than asked for, because bytes of length 1 are shared by the whole interpreter, and an
    empty log has one byte.
    """
    return bytes(nbytes + 1)


def _checked(result: tuple[Any, ...], name: str) -> Any:
    if int(result[0]) != 0:
        raise DeviceError(f"NVRTC failed on {name}: {result[0].name}; {INSTALL}")
    return result[1] if len(result) > 1 else None
