"""What a persistent store is: format, sizes, and whose keys and values it holds.

One file, ``hsswap.manifest``, in every directory of the store: a JSON object with a CRC-32 of
itself, padded with spaces to a multiple of 4096 bytes. It is written and synced when the store is
made and never changed. A store opened with other settings is refused, and the message names the
difference.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict, dataclass, replace
from typing import Any
from zlib import crc32

from hsswap.config import DISK_ALIGNMENT, LayerGroup, ModelDims
from hsswap.errors import ConfigError

MANIFEST_NAME = "hsswap.manifest"
FORMAT_VERSION = 1
CHECKSUM_KIND = "crc32"
SALT_BYTES = 32
MANIFEST_BYTES_LIMIT = 1 << 20
"""A manifest is some hundred bytes a layer group; a longer file is none."""


@dataclass(frozen=True)
class Manifest:
    """The settings of one directory of a persistent store.

    ``capacity_blocks``: that it was made with. ``fingerprint``: what the caller calls his model and
    its weights. ``salt``: the secret in which prefix keys are made, hexadecimal. ``rank``: whose
    part of the model. ``store``: a random name; ``part`` of ``directories``, the paths at the time
    the store was made, home first.
    """

    dims: ModelDims
    capacity_blocks: int
    fingerprint: str
    salt: str
    rank: int
    store: str
    directories: tuple[str, ...]
    part: int = 0
    checksum: str = CHECKSUM_KIND
    version: int = FORMAT_VERSION

    @classmethod
    def new(
        cls,
        dims: ModelDims,
        capacity_blocks: int,
        *,
        fingerprint: str,
        salt: bytes | None,
        rank: int,
        directories: tuple[str, ...],
    ) -> Manifest:
        """The manifest of a store to be made. ``salt`` None: a random one."""
        secret = secrets.token_bytes(SALT_BYTES) if salt is None else salt
        return cls(
            dims=dims,
            capacity_blocks=capacity_blocks,
            fingerprint=fingerprint,
            salt=secret.hex(),
            rank=rank,
            store=secrets.token_hex(8),
            directories=directories,
        )

    def of_part(self, part: int) -> Manifest:
        """The one of another directory."""
        return replace(self, part=part)

    def to_bytes(self) -> bytes:
        """What the file holds, padded."""
        fields = asdict(self)
        fields["dims"]["groups"] = [_layout(group) for group in self.dims.groups]
        text = _text({**fields, "crc32": crc32(_text(fields))})
        return text + b" " * (-(len(text) + 1) % DISK_ALIGNMENT) + b"\n"

    @classmethod
    def from_bytes(cls, content: bytes, place: str, *, alone: bool) -> Manifest | None:
        """The manifest in a file, or None if the file was made and not written in full.

        ``alone``: no other file of a store is there, so that a damaged one is one that was not
        written in full. Raises ConfigError for a damaged one, and for another format version.
        """
        if not content.strip(b"\0"):
            return None
        damaged = ConfigError(f"{place} is damaged; restore it or remove the store")
        try:
            fields: dict[str, Any] = json.loads(content)
            expected = fields.pop("crc32")
            version = fields["version"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if alone:
                return None
            raise damaged from error
        if version != FORMAT_VERSION:
            raise ConfigError(
                f"{place} has format version {version}, this hsswap reads {FORMAT_VERSION}; use "
                "another directory, or the hsswap that made it"
            )
        if crc32(_text(fields)) != expected:
            raise damaged
        dims = fields.pop("dims")
        groups = tuple(LayerGroup(**group) for group in dims["groups"])
        fields["directories"] = tuple(fields["directories"])
        return cls(dims=ModelDims(groups, dims["block_size"]), **fields)

    def require(self, wanted: Manifest, place: str, *, salt: bytes | None) -> None:
        """Raise ConfigError, naming the differences, unless the store is what was asked for.

        How many blocks it has room for now, its record file says (:mod:`hsswap.io.growth`).
        ``salt`` None: any.
        """
        names = ["fingerprint", "rank", "checksum", "part"]
        differences = [
            f"{name} {getattr(self, name)!r}, not {getattr(wanted, name)!r}"
            for name in names
            if getattr(self, name) != getattr(wanted, name)
        ]
        differences.extend(_dims_differences(self.dims, wanted.dims))
        if len(self.directories) != len(wanted.directories):
            differences.append(
                f"{len(self.directories)} directories, not {len(wanted.directories)}"
            )
        if salt is not None and self.salt != salt.hex():
            differences.append("another salt")
        if differences:
            raise ConfigError(
                f"the store in {place} has {'; '.join(differences)}: open it with its own "
                "settings, name another directory, or remove it"
            )


def _dims_differences(have: ModelDims, want: ModelDims) -> list[str]:
    found = []
    if have.block_size != want.block_size:
        found.append(f"block_size {have.block_size}, not {want.block_size}")
    if len(have.groups) != len(want.groups):
        found.append(f"{len(have.groups)} layer groups, not {len(want.groups)}")
    for number, (old, new) in enumerate(zip(have.groups, want.groups, strict=False)):
        old_fields, new_fields = _layout(old), _layout(new)
        found.extend(
            f"layer group {number} with {name} {value!r}, not {new_fields[name]!r}"
            for name, value in old_fields.items()
            if value != new_fields[name]
        )
    return found


def _layout(group: LayerGroup) -> dict[str, Any]:
    """What of a group decides what blocks look like."""
    fields = asdict(group)
    del fields["rope"]
    return fields


def _text(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True, indent=1).encode()
