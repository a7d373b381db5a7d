"""What a device is told before the first launch, so that none has to wait for a compiler."""

from __future__ import annotations

from dataclasses import dataclass

from hsswap.config import LayerGroup
from hsswap.predictor_config import PredictorConfig


@dataclass(frozen=True, slots=True)
class PrepareWork:
    """What may be launched: operations on units of these groups, ``block_size`` tokens a block,
    allocated as :class:`~hsswap.driver.operations.UnitPool` says.

    ``most_tokens``: of a list that is attended; ``most_sequences``: in one launch. ``predictor``:
    what blocks are ranked with, None where all are attended.
    """

    groups: tuple[LayerGroup, ...]
    block_size: int
    most_tokens: int
    most_sequences: int
    predictor: PredictorConfig | None = None
