"""Folders and files that the command line names, tried before anything long begins."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from hsswap.commands.option_types import named
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
            f"{path} cannot be looked up ({error.strerror}); name another folder"
        ) from error
    if not place.is_dir():
        raise ArgumentError(f"{path}: {place} is no directory; name another folder")
    return place


def folder_to_make(text: str) -> Path:
    """An option's folder, for argparse: one that files can be made in, or that can be made."""
    path = named(text)
    try:
        place = nearest_folder(path)
    except ArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if reason := why_not_writable(place):
        raise argparse.ArgumentTypeError(
            f"{path}: {place} cannot be written to ({reason}); name another"
        )
    return path


def file_to_write(text: str) -> Path:
    """An option's file, for argparse: refused before a long run, not behind it."""
    path = named(text)
    if reason := why_no_file(path):
        raise argparse.ArgumentTypeError(reason)
    return path


def why_no_file(path: Path) -> str:
    """Why an option's file cannot be written, and the remedy; "" if it can."""
    folder = path.absolute().parent
    try:
        if path.is_dir():
            return f"{path} is a directory; name a file in it"
        if not folder.is_dir():
            return f"{folder} is no directory; make it first"
    except OSError as error:
        return f"{path} cannot be looked up ({error.strerror}); name another"
    if reason := why_not_writable(folder):
        return f"{folder} cannot be written to ({reason}); name another"
    return ""


def why_not_writable(folder: Path) -> str:
    """Why no file can be made in ``folder``; "" if one can. None is left behind."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".hsswap-"):
            return ""
    except OSError as error:
        return error.strerror or str(error)
