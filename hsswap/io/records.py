"""The record file of a persistent store: what is stored where, in fixed places. Pure bytes.

::

    hsswap.records, little-endian, every part padded with zeros to 4096
    | header | id records [capacity] of 64 | layer 0: block records [capacity] of 32 | layer 1 ... |

A record lies within one 512-byte sector, which a drive writes as a whole, and has a CRC-32 of its
own, seeded with its place. So a write of a page that is cut short leaves of each record the old one
or the new one. A record of zeros was never written. Each is valid or not by itself: nothing in the
file points to anything else, and so its pages may become durable in any order.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hsswap.checksum import crc32_of_blocks
from hsswap.config import DISK_ALIGNMENT

RECORDS_NAME = "hsswap.records"

BLOCK_RECORD = np.dtype(
    [
        ("crc", "<u4"),
        ("generation", "<u4"),  # of the id, when the block was written
        ("checksum", "<u4"),  # of the block's bytes
        ("length", "<u2"),  # valid tokens
        ("state", "u1"),
        ("zero", "u1"),
        ("codes_version", "<u4"),  # of the predictor's codes stored with the block; 0: none
        ("spare", "<u4"),  # of REPLACED: slot + 1
        ("serial", "<u8"),  # of the commit; gives the order of age
    ]
)
ID_RECORD = np.dtype(
    [
        ("crc", "<u4"),
        ("generation", "<u4"),
        ("depth", "<u4"),  # blocks before it in its prefix
        ("state", "u1"),
        ("zeros", "u1", (3,)),
        ("key", "u1", (32,)),  # of the prefix that ends with this block
        ("serial", "<u8"),
        ("more_zeros", "u1", (8,)),
    ]
)
HEADER_RECORD = np.dtype(
    [
        ("crc", "<u4"),
        ("state", "u1"),
        ("zeros", "u1", (3,)),
        ("generation_limit", "<u8"),  # no id of this generation and above was ever given out
        ("serial", "<u8"),
        ("more_zeros", "u1", (40,)),
    ]
)
assert BLOCK_RECORD.itemsize == 32
assert ID_RECORD.itemsize == HEADER_RECORD.itemsize == 64
assert DISK_ALIGNMENT % ID_RECORD.itemsize == 0

VALID, CLEARED, REPLACED = 1, 2, 3
"""States of a record. CLEARED: there was a block, and its bytes may be overwritten by now.
REPLACED: so they may, and the block's newer content is in a slot of the spare file.
"""

_SEEDS = {"header": 0x48454144, "ids": 0x49445F5F, "blocks": 0x424C4F43}


@dataclass(frozen=True)
class RecordLayout:
    """Where records lie in the file."""

    layers: int
    capacity: int

    @property
    def ids_offset(self) -> int:
        """Where id records begin, in bytes."""
        return DISK_ALIGNMENT

    @property
    def blocks_offset(self) -> int:
        """Where block records begin, in bytes."""
        return self.ids_offset + _padded(self.capacity * ID_RECORD.itemsize)

    @property
    def layer_records(self) -> int:
        """Block records of a layer, those of the padding included."""
        return _padded(self.capacity * BLOCK_RECORD.itemsize) // BLOCK_RECORD.itemsize

    @property
    def file_bytes(self) -> int:
        """Bytes of the file."""
        return self.blocks_offset + self.layers * self.layer_records * BLOCK_RECORD.itemsize


class Records:
    """The file's image in memory, page-aligned, as arrays that share it.

    ``header`` ``[1]``, ``ids`` ``[capacity]``, ``blocks`` ``[layers, layer_records]``. ``crc`` in
    them means nothing until a page is sealed. ``dirty``: pages that differ from the file;
    ``in_flight``: that are being written and synced.
    """

    def __init__(self, layout: RecordLayout) -> None:
        self.layout = layout
        self._map = mmap.mmap(-1, layout.file_bytes)
        self.image: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self.header = self.image[: HEADER_RECORD.itemsize].view(HEADER_RECORD)
        first, end = layout.ids_offset, layout.ids_offset + layout.capacity * ID_RECORD.itemsize
        self.ids = self.image[first:end].view(ID_RECORD)
        records = self.image[layout.blocks_offset :].view(BLOCK_RECORD)
        self.blocks = records.reshape(layout.layers, layout.layer_records)
        self.dirty = np.zeros(layout.file_bytes // DISK_ALIGNMENT, np.bool_)
        self.in_flight = np.zeros_like(self.dirty)

    def touch_blocks(self, layers: NDArray[np.int64], indices: NDArray[np.int64]) -> None:
        """These block records were changed."""
        places = (layers * self.layout.layer_records + indices) * BLOCK_RECORD.itemsize
        self.dirty[(self.layout.blocks_offset + places) // DISK_ALIGNMENT] = True

    def dirty_blocks(
        self, layers: NDArray[np.int64], indices: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Whether these block records may differ from the file."""
        places = (layers * self.layout.layer_records + indices) * BLOCK_RECORD.itemsize
        pages = (self.layout.blocks_offset + places) // DISK_ALIGNMENT
        dirty: NDArray[np.bool_] = self.dirty[pages] | self.in_flight[pages]
        return dirty

    def touch_ids(self, indices: NDArray[np.int64]) -> None:
        """These id records were changed."""
        places = self.layout.ids_offset + indices * ID_RECORD.itemsize
        self.dirty[places // DISK_ALIGNMENT] = True

    def touch_header(self) -> None:
        """The header was changed."""
        self.dirty[0] = True

    def drop_invalid(self) -> int:
        """Zero every record whose CRC is wrong; how many there were. Takes a while."""
        tables = (
            (self.header, "header", np.arange(1)),
            (self.ids, "ids", np.arange(len(self.ids))),
            (self.blocks.reshape(-1), "blocks", np.arange(self.blocks.size)),
        )
        dropped = 0
        for table, kind, numbers in tables:
            used = np.flatnonzero(table["state"] | (table["crc"] != 0))
            wrong = used[table["crc"][used] != _crcs(table[used], kind, numbers[used])]
            # Indexing by an array is assignment to the image; table[wrong][...] would be to a copy.
            table[wrong] = np.zeros((), table.dtype)
            dropped += len(wrong)
        return dropped


def header_is_valid(first_page: NDArray[np.uint8]) -> bool:
    """Whether the first page of a record file holds a header that was written in full."""
    header = first_page[: HEADER_RECORD.itemsize].view(HEADER_RECORD)
    crc = _crcs(header, "header", np.arange(1))
    return bool(header["state"][0] == VALID and header["crc"][0] == crc[0])


def seal(layout: RecordLayout, pages: NDArray[np.uint8], first_page: int) -> None:
    """Put the CRC into every record of consecutive pages of the file."""
    at = first_page * DISK_ALIGNMENT
    for page in pages.reshape(-1, DISK_ALIGNMENT):
        if at < layout.ids_offset:
            kind, table, number = "header", page[: HEADER_RECORD.itemsize].view(HEADER_RECORD), 0
        elif at < layout.blocks_offset:
            kind, table = "ids", page.view(ID_RECORD)
            number = (at - layout.ids_offset) // ID_RECORD.itemsize
        else:
            kind, table = "blocks", page.view(BLOCK_RECORD)
            number = (at - layout.blocks_offset) // BLOCK_RECORD.itemsize
        used = np.flatnonzero(table["state"])
        table["crc"] = 0
        table["crc"][used] = _crcs(table[used], kind, number + used)
        at += DISK_ALIGNMENT


def _crcs(records: NDArray[np.void], kind: str, numbers: NDArray[np.int64]) -> NDArray[np.uint32]:
    """CRC-32 of records behind their first field, seeded with kind and place."""
    seeds = (numbers * 0x9E3779B1 ^ _SEEDS[kind]) & 0xFFFFFFFF
    rows = (
        np.ascontiguousarray(records).view(np.uint8).reshape(len(records), records.itemsize)[:, 4:]
    )
    return crc32_of_blocks(iter(rows), seeds.tolist())


def _padded(nbytes: int) -> int:
    return -(-nbytes // DISK_ALIGNMENT) * DISK_ALIGNMENT
