"""Folders that the command line names, tried before anything long begins."""

from __future__ import annotations

import argparse
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


def why_no_file(path: Path) -> str:
    """Why an option's file cannot be written, and the remedy; "" if it can."""
    folder = path.absolute().parent
    if path.is_dir():
        return f"{path} is a directory; name a file in it"
    if not folder.is_dir():
        return f"{folder} is no directory; make it first"
    if reason := why_not_writable(folder):
        return f"{folder} cannot be written to ({reason}); name another"
    return ""


def file_to_write(text: str) -> Path:
    """An option's file, for argparse: refused before a long run, not behind it."""
    if reason := why_no_file(Path(text)):
        raise argparse.ArgumentTypeError(reason)
    return Path(text)


def folder_to_make(text: str) -> Path:
    """An option's folder, for argparse: one that is there or can be made."""
    place = Path(text).absolute()
    while not place.exists() and not place.is_symlink():
        place = place.parent
    if not place.is_dir():
        raise argparse.ArgumentTypeError(f"{place} is no directory; name another folder")
    if reason := why_not_writable(place):
        raise argparse.ArgumentTypeError(f"{place} cannot be written to ({reason}); name another")
    return Path(text)


def why_not_writable(folder: Path) -> str:
    """Why no file can be made in ``folder``; "" if one can. None is left behind."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".hsswap-"):
            return ""
    except OSError as error:
        return error.strerror or str(error)
