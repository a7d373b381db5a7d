"""A basis in a file, so that the next process scores as this one did.

The file is no part of what a store promises: one that is damaged, of another format or made for
other settings is as good as none, since the next prompt makes a basis. Codes are not kept; blocks
that are read back are encoded again.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from io import BytesIO
from pathlib import Path
from zlib import crc32

import numpy as np

from hsswap.codec import HeadCodec
from hsswap.config import ModelDims, PredictorConfig

FORMAT = 1
BASIS_NAME = "predictor-basis"
_FIELDS = ("encode", "bias", "query", "centre", "bits")


def basis_key(dims: ModelDims, config: PredictorConfig) -> str:
    """What a basis was made for; one with another key is of no use."""
    wanted = {"format": FORMAT, "dims": asdict(dims), "ratio": config.metadata_ratio}
    return json.dumps(wanted, sort_keys=True)


def save_basis(folder: Path, key: str, codecs: Sequence[HeadCodec]) -> None:
    """Write the file, all or nothing. Raises OSError."""
    arrays = {
        f"{name} {head}": getattr(codec, name)
        for head, codec in enumerate(codecs)
        for name in _FIELDS
    }
    memory = BytesIO()
    np.savez(memory, key=np.array(key), **arrays)
    content = memory.getvalue()
    part = folder / f"{BASIS_NAME}.part"
    with open(part, "wb") as file:
        file.write(crc32(content).to_bytes(4, "little") + content)
        file.flush()
        os.fsync(file.fileno())
    part.replace(folder / f"{BASIS_NAME}.npz")


def load_basis(folder: Path, key: str) -> tuple[HeadCodec, ...]:
    """The basis in the file; nothing where there is none that can be used."""
    with suppress(OSError, ValueError, KeyError, zipfile.BadZipFile):
        content = (folder / f"{BASIS_NAME}.npz").read_bytes()
        if int.from_bytes(content[:4], "little") != crc32(content[4:]):
            return ()
        with np.load(BytesIO(content[4:]), allow_pickle=False) as arrays:
            if str(arrays["key"]) != key:
                return ()
            heads = (len(arrays.files) - 1) // len(_FIELDS)
            return tuple(
                HeadCodec(*(arrays[f"{name} {head}"] for name in _FIELDS)) for head in range(heads)
            )
    return ()
