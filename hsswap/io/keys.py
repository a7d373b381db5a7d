"""Prefix keys: names of blocks by the tokens that led to them, and which block has which name.

The key of a block is a BLAKE2b hash, keyed with the store's salt, over the key before it and the
block's tokens; the first one is over the model's fingerprint, rank and block size. So equal keys
mean equal tokens from the beginning on, of the same model and part, whatever the process, and
nobody without the salt can tell from a key what the tokens were.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hsswap.errors import ArgumentError

KEY_BYTES = 32


def as_tokens(tokens: ArrayLike) -> NDArray[np.int64]:
    """Tokens as an int64 array ``[n]``. Raises ArgumentError for other shapes and numbers."""
    try:
        array = np.asarray(tokens)
    except ValueError as error:  # rows of unequal length
        raise ArgumentError(f"tokens must be a one-dimensional array: {error}") from error
    if array.size == 0 and array.ndim == 1:
        return np.empty(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ArgumentError("tokens must be a one-dimensional array of integers")
    if array.dtype == np.uint64 and (array >> np.uint64(63)).any():
        raise ArgumentError("tokens must be whole numbers below 2**63")
    return array.astype(np.int64)


class PrefixKeys:
    """Makes the keys of one store. ``salt``: up to 64 bytes."""

    def __init__(self, salt: bytes, fingerprint: str, rank: int, block_size: int) -> None:
        self._salt = salt
        self._block_size = block_size
        root = f"hsswap prefix 1\0{fingerprint}\0{rank}\0{block_size}".encode()
        self._root = self._hash(root)

    def of(self, tokens: ArrayLike) -> list[bytes]:
        """The key of every full block of the tokens, in order. Raises ArgumentError."""
        array = as_tokens(tokens)
        size = self._block_size
        content = memoryview(array.astype("<i8").tobytes())
        keys: list[bytes] = []
        key = self._root
        for begin in range(0, len(array) - size + 1, size):
            key = self._hash(key, content[8 * begin : 8 * (begin + size)])
            keys.append(key)
        return keys

    def _hash(self, *parts: bytes | memoryview) -> bytes:
        state = blake2b(key=self._salt, digest_size=KEY_BYTES)
        for part in parts:
            state.update(part)
        return state.digest()


class PrefixIndex:
    """Which block index has which key, both ways. Covered by the lock of the ids."""

    def __init__(self) -> None:
        self._index_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._index_of)

    def put(self, key: bytes, index: int) -> bool:
        """Name a block. False, and nothing changes, when the key or the block is taken."""
        if key in self._index_of or index in self._key_of:
            return False
        self._index_of[key] = index
        self._key_of[index] = key
        return True

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of the first keys, as far as they are known."""
        found: list[int] = []
        for key in keys:
            index = self._index_of.get(key)
            if index is None:
                break
            found.append(index)
        return found

    def forget(self, indices: NDArray[np.int64]) -> None:
        """These blocks have no key any more."""
        for index in indices.tolist() if self._key_of else ():
            key = self._key_of.pop(index, None)
            if key is not None:
                self._index_of.pop(key, None)
