"""Checks of settings: each raises ConfigError, naming the field and what it must be."""

from __future__ import annotations

import math
import operator
import os
from contextlib import suppress
from numbers import Real
from pathlib import Path

import numpy as np

from hsswap.errors import ConfigError, shown


def require(ok: bool, message: str) -> None:
    """Raise ConfigError with the message unless ``ok``."""
    if not ok:
        raise ConfigError(message)


def require_integers(record: object, names: tuple[str, ...]) -> None:
    """Make plain ints of fields that must be whole numbers (NumPy's are taken)."""
    for name in names:
        object.__setattr__(record, name, integer(getattr(record, name), name))


def integer(value: object, name: str) -> int:
    """A whole number of 64 bits, NumPy's too, but no bool. Raises ConfigError naming it."""
    try:
        whole = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        whole = None
    if whole is None or isinstance(value, bool):
        raise ConfigError(f"{name} is {shown(value)}; give a whole number")
    require(abs(whole) < 1 << 63, f"{name} is {shown(whole)}; that is beyond 64 bits")
    return whole


def require_finite(record: object, names: tuple[str, ...]) -> None:
    """Make plain floats of fields that must be None or a finite number (NumPy's are taken)."""
    for name in names:
        value = getattr(record, name)
        if value is not None:
            object.__setattr__(record, name, finite(value, name))


def finite(value: object, name: str) -> float:
    """A finite number, NumPy's too, but no bool. Raises ConfigError naming it."""
    plain = math.nan
    if isinstance(value, Real) and not isinstance(value, bool):
        with suppress(OverflowError):  # of an int, or a fraction, beyond all floats
            plain = float(value)
    require(math.isfinite(plain), f"{name} is {shown(value)}; give a finite number")
    return plain


def require_flags(record: object, names: tuple[str, ...]) -> None:
    """Make plain bools of fields that must be true or false (NumPy's are taken)."""
    for name in names:
        value = getattr(record, name)
        require(isinstance(value, bool | np.bool_), f"{name} is {shown(value)}; give True or False")
        object.__setattr__(record, name, bool(value))


def require_words(record: object, names: tuple[str, ...]) -> None:
    """Make plain strings of fields that must be words."""
    for name in names:
        value = getattr(record, name)
        require(isinstance(value, str), f"{name} is {shown(value)}; give a name")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"{name} is {shown(value)}, which is no text in UTF-8") from error
        object.__setattr__(record, name, str(value))


def require_path(value: object, name: str) -> None:
    """Raise ConfigError unless the value is None or can name a folder."""
    require_kind(value, (str, Path, type(None)), name, "a path or None")
    if value is not None:
        try:
            fits = b"\0" not in os.fsencode(value)  # type: ignore[arg-type]
        except UnicodeEncodeError:
            fits = False
        # An empty name, as of a variable that is not set, would be the working directory.
        require(fits and value != "", f"{name} is {shown(value)}, which cannot be a path")


def require_kind(value: object, kind: type | tuple[type, ...], name: str, what: str) -> None:
    """Raise ConfigError unless the value is of the kind; ``what`` says it in words."""
    require(isinstance(value, kind), f"{name} is a {type(value).__name__}; give {what}")
