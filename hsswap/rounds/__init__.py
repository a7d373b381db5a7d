"""ROUND-STREAM: speculative decoding, M rounds ahead of the host (:mod:`hsswap.rounds.stream`).

An engine gives a model as a :class:`Target`: :class:`StepsTarget` over sequences of a swap, with a
function that enqueues a pass over K + 1 rows. Then::

    async with RoundStream(
        swap.device, target, NgramDrafter(swap.device), k=4, rounds=4,
        history_tokens=8192, stream=stream,
    ) as speculating:
        await speculating.start([SequenceStart(prompt, first_token, len(prompt) + 512)])
        async for token in speculating.tokens():
            ...

The tokens are those of plain decoding. ``speculating.acceptance`` says how drafts fared.
"""

from hsswap.driver.base import Graph, Stream
from hsswap.driver.tensor import Tensor
from hsswap.rounds.buffers import Drained, Published, SequenceStart, StreamBufs
from hsswap.rounds.choosing import Choice, Choosing
from hsswap.rounds.contracts import Admission, Drafter, Target
from hsswap.rounds.drafters import NgramDrafter
from hsswap.rounds.ends import End
from hsswap.rounds.lengths import (
    LayerLengths,
    PointerTable,
    addresses_of,
    kv_len_ptr_table,
    kv_len_ptr_table_range,
)
from hsswap.rounds.round import RoundOptions
from hsswap.rounds.steps_drafter import StepsEarlyExit
from hsswap.rounds.steps_target import RowsModel, StepsTarget
from hsswap.rounds.stream import Acceptance, Burst, RoundStream
from hsswap.rounds.waiting_steps import Steps

__all__ = [
    "Acceptance",
    "Admission",
    "Burst",
    "Choice",
    "Choosing",
    "Drafter",
    "Drained",
    "End",
    "Graph",
    "LayerLengths",
    "NgramDrafter",
    "PointerTable",
    "Published",
    "RoundOptions",
    "RoundStream",
    "RowsModel",
    "SequenceStart",
    "Steps",
    "StepsEarlyExit",
    "StepsTarget",
    "Stream",
    "StreamBufs",
    "Target",
    "Tensor",
    "addresses_of",
    "kv_len_ptr_table",
    "kv_len_ptr_table_range",
]
