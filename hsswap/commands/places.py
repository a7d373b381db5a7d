"""Folders that the command line names, tried before anything long begins."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hsswap.errors import ArgumentError


def nearest_folder(path: Path) -> Path:
    """The folder itself, or the nearest above it that exists, where it would be made.

    Raises ArgumentError when something else than a folder is in the way.
    """
    place = path.absolute()
    try:
        while not place.exists() and not place.is_symlink():
            place = place.parent
    except OSError as error:
        raise ArgumentError(
            f"--dir {path} cannot be looked up ({error.strerror}); name another folder"
        ) from error
    if not place.is_dir():
        raise ArgumentError(f"--dir {path}: {place} is no directory; name another folder")
    return place


def check_store_folder(path: Path) -> None:
    """Raise ArgumentError unless files can be made in the folder, or where it would be made."""
    place = nearest_folder(path)
    if reason := why_not_writable(place):
        raise ArgumentError(f"--dir {path}: {place} cannot be written to ({reason}); name another")


def why_not_writable(folder: Path) -> str:
    """Why no file can be made in ``folder``; "" if one can. None is left behind."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".hsswap-"):
            return ""
    except OSError as error:
        return error.strerror or str(error)
