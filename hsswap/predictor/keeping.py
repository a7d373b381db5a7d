"""A basis in a file, so that the next process scores as this one did.

The file is no part of what a store promises: one that is damaged, of another format or made for
other settings is as good as none, since the next prompt makes a basis. Codes are not kept; blocks
that are read back are encoded again.
"""

from __future__ import annotations

import json
import os
import zipfile
from contextlib import suppress
from dataclasses import asdict
from io import BytesIO
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from hsswap.codec import HeadCodec
from hsswap.config import ModelDims, PredictorConfig
from hsswap.plain_file import read_plain
from hsswap.predictor.codes import Learned
from hsswap.predictor.stand_in import StandIn

FORMAT = 2
BASIS_NAME = "predictor-basis"
_CODEC = ("encode", "bias", "query", "centre", "bits")
_STAND_IN = ("scale", "value")


def basis_key(dims: ModelDims, config: PredictorConfig) -> str:
    """What a basis was made for; one with another key is of no use."""
    wanted = {"format": FORMAT, "dims": asdict(dims), "ratio": config.metadata_ratio}
    return json.dumps(wanted, sort_keys=True)


def save_basis(folder: Path, key: str, learned: Learned) -> None:
    """Write the file, all or nothing. Raises OSError."""
    arrays: dict[str, Any] = {}
    for fields, records in ((_CODEC, learned.codecs), (_STAND_IN, learned.stand_ins)):
        for head, record in enumerate(records):
            arrays |= {f"{name} {head}": getattr(record, name) for name in fields}
    memory = BytesIO()
    np.savez(memory, key=np.array(key), **arrays)
    content = memory.getvalue()
    part = folder / f"{BASIS_NAME}.part"
    part.unlink(missing_ok=True)  # a process may have ended while it wrote it
    with open(part, "xb") as file:
        file.write(crc32(content).to_bytes(4, "little") + content)
        file.flush()
        os.fsync(file.fileno())
    part.replace(folder / f"{BASIS_NAME}.npz")


def load_basis(folder: Path, key: str) -> Learned | None:
    """The basis in the file; None where there is none that can be used."""
    with suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        content = read_plain(folder / f"{BASIS_NAME}.npz")
        if int.from_bytes(content[:4], "little") != crc32(content[4:]):
            return None
        with np.load(BytesIO(content[4:]), allow_pickle=False) as arrays:
            if str(arrays["key"]) != key:
                return None
            heads = range((len(arrays.files) - 1) // (len(_CODEC) + len(_STAND_IN)))
            codecs = [HeadCodec(*(arrays[f"{name} {head}"] for name in _CODEC)) for head in heads]
            ins = [StandIn(*(arrays[f"{name} {head}"] for name in _STAND_IN)) for head in heads]
            return Learned(tuple(codecs), tuple(ins))
    return None
