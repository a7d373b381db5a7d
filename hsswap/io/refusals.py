"""Why a block is not read or written, in words."""

from __future__ import annotations

import numpy as np

from hsswap.errors import CorruptBlock, HsswapError, SharedBlock, StaleBlockId
from hsswap.io.ids import BlockIds, id_of


def why_refused(ids: BlockIds, layer: int, index: int, *, writing: bool = False) -> HsswapError:
    """The error for a block that has no content to read, or that must not be written."""
    generation = int(ids.generations(np.array([index]))[0])
    name = f"layer {layer}, block id {id_of(index, generation)}"
    if not ids.is_given_out(index):
        return StaleBlockId(f"{name} is not given out; use ids that were not freed")
    if writing:
        return SharedBlock(
            f"{name} has other holders or a prefix key, so its content cannot change; copy it with "
            "copy_block and write the copy"
        )
    return CorruptBlock(f"{name} has no content: it was not written since it was given out")
