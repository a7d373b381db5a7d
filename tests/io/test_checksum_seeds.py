"""Seeds of checksums: the short way for one block gives what the arrays give."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hsswap.checksum import crc32, crc32_of_blocks, identity_seeds

INDICES = st.integers(0, (1 << 32) - 1)
GENERATIONS = st.integers(0, (1 << 31) - 1)


@given(st.integers(0, 1 << 20), INDICES, GENERATIONS)
def test_one_is_as_many(layer: int, index: int, generation: int) -> None:
    indices, generations = np.array([index, index + 1]), np.array([generation, generation])
    both = identity_seeds(layer, indices, generations)
    one = identity_seeds(layer, indices[:1], generations[:1])
    assert one.dtype == both.dtype == np.uint32
    assert one[0] == both[0]
    block = np.arange(64, dtype=np.uint8)
    assert crc32(block, int(one[0])) == crc32_of_blocks([block], one.tolist())[0]
