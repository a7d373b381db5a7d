"""Checks of settings: each raises ConfigError, naming the field and what it must be."""

from __future__ import annotations

import math
import operator
from numbers import Real

from hsswap.errors import ConfigError


def require(ok: bool, message: str) -> None:
    """Raise ConfigError with the message unless ``ok``."""
    if not ok:
        raise ConfigError(message)


def require_integers(record: object, names: tuple[str, ...]) -> None:
    """Make plain ints of fields that must be whole numbers (NumPy's are taken)."""
    for name in names:
        object.__setattr__(record, name, integer(getattr(record, name), name))


def integer(value: object, name: str) -> int:
    """A whole number, NumPy's too, but no bool. Raises ConfigError naming it."""
    try:
        whole = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        whole = None
    if whole is None or isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; give a whole number")
    return whole


def require_finite(record: object, names: tuple[str, ...]) -> None:
    """Raise ConfigError for fields that are neither None nor a finite number."""
    for name in names:
        value = getattr(record, name)
        finite = isinstance(value, Real) and math.isfinite(value)
        require(value is None or finite, f"{name} is {value!r}; give a finite number")
