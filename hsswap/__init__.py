"""hsswap: decode with a KV cache larger than device memory.

::

    async with HighSpeedSwap.open(config) as swap, swap.sequence() as sequence:
        await sequence.append(layer, keys, values)
        result = await sequence.attend(layer, queries)
        await result.done()

or, without an event loop, ``with hsswap.blocking(config) as swap``. :class:`SwapConfig` says how
much of the cache is where, :class:`HighSpeedSwap` and :class:`Sequence` what an engine calls, and
``hsswap.rounds`` is speculation. Importing does nothing but define names; the names below, and the
modules ``bf16``, ``rope`` and ``rounds``, are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hsswap import bf16 as bf16
    from hsswap import rope as rope
    from hsswap import rounds as rounds
    from hsswap.attending import AttendResult
    from hsswap.config import LayerGroup, ModelDims, PredictorConfig, SwapConfig
    from hsswap.diagnostics import DiagnosticSummary
    from hsswap.driver.tensor import Tensor
    from hsswap.e4m3 import E4M3Rows
    from hsswap.errors import (
        ArgumentError,
        BadDraft,
        BlockIOError,
        CaptureError,
        ClosedError,
        ConfigError,
        CorruptBlock,
        DeviceError,
        HsswapError,
        ModelError,
        OutOfBlocks,
        OutOfSlots,
        OutOfSpace,
        SharedBlock,
        StaleBlockId,
        StoreLocked,
    )
    from hsswap.metrics import SwapStatistics
    from hsswap.rope import Rope
    from hsswap.sequence import Sequence
    from hsswap.swap import HighSpeedSwap
    from hsswap.sync import BlockingSequence, BlockingSwap, blocking
    from hsswap.topk import TopK

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "AttendResult",
    "BadDraft",
    "BlockIOError",
    "BlockingSequence",
    "BlockingSwap",
    "CaptureError",
    "ClosedError",
    "ConfigError",
    "CorruptBlock",
    "DeviceError",
    "DiagnosticSummary",
    "E4M3Rows",
    "HighSpeedSwap",
    "HsswapError",
    "LayerGroup",
    "ModelDims",
    "ModelError",
    "OutOfBlocks",
    "OutOfSlots",
    "OutOfSpace",
    "PredictorConfig",
    "Rope",
    "Sequence",
    "SharedBlock",
    "StaleBlockId",
    "StoreLocked",
    "SwapConfig",
    "SwapStatistics",
    "Tensor",
    "TopK",
    "blocking",
]

_HOME = {
    "ArgumentError": "errors",
    "AttendResult": "attending",
    "BadDraft": "errors",
    "BlockIOError": "errors",
    "CaptureError": "errors",
    "BlockingSequence": "sync",
    "BlockingSwap": "sync",
    "ClosedError": "errors",
    "ConfigError": "errors",
    "CorruptBlock": "errors",
    "DeviceError": "errors",
    "DiagnosticSummary": "diagnostics",
    "E4M3Rows": "e4m3",
    "HighSpeedSwap": "swap",
    "HsswapError": "errors",
    "LayerGroup": "config",
    "ModelDims": "config",
    "ModelError": "errors",
    "OutOfBlocks": "errors",
    "OutOfSlots": "errors",
    "OutOfSpace": "errors",
    "PredictorConfig": "config",
    "Rope": "rope",
    "Sequence": "sequence",
    "SharedBlock": "errors",
    "StaleBlockId": "errors",
    "StoreLocked": "errors",
    "SwapConfig": "config",
    "SwapStatistics": "metrics",
    "Tensor": "driver.tensor",
    "TopK": "topk",
    "blocking": "sync",
}


_MODULES = ("bf16", "rope", "rounds")


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(f"hsswap.{name}")
    if name in _HOME:
        return getattr(import_module(f"hsswap.{_HOME[name]}"), name)
    raise AttributeError(f"module 'hsswap' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
