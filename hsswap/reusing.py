"""Prefixes: blocks that outlive their sequence, found again by the tokens that led to them."""

from __future__ import annotations

from numpy.typing import ArrayLike

from hsswap.coding import code_blocks
from hsswap.errors import ArgumentError
from hsswap.io.keys import as_tokens
from hsswap.reshaping import Reshaping
from hsswap.tiers import I64


class Reusing(Reshaping):
    """The calls of :class:`hsswap.Sequence` on prefixes."""

    async def commit(self, tokens: ArrayLike) -> int:
        """Store the first blocks under these tokens, for :meth:`HighSpeedSwap.open_prefix`.

        ``tokens`` ``[n]``, whole numbers: what the first n tokens of every layer are; the full
        blocks among them are stored. They stay when the sequence is closed, until room is needed,
        and with ``SwapConfig(persist=True)`` they are there after a loss of power once this
        returned. Returns how many of the tokens are in full blocks.

        Raises ArgumentError for other tokens than that, or more than a layer has; BlockIOError when
        a block cannot be written, CorruptBlock for one that came back from disk as something else.
        """
        self._swap.check_loop()
        with self._exclusive("commit"):
            given = as_tokens(tokens)
            shortest = min(cache.length for cache in self._layers)
            if len(given) > shortest:
                raise ArgumentError(
                    f"{len(given)} tokens are to be committed and a layer has {shortest}"
                )
            size = self._swap.config.dims.block_size
            full = len(given) // size
            await self._swap.commit_ids(given, self.ids[:full])
            return full * size

    async def adopt(self, ids: I64) -> None:
        """Begin with full blocks that are stored, whose references are the sequence's from now on.

        For the swap, while the sequence is empty. In top-k mode they are read once, for the codes,
        and those of the first 1,024 tokens before, where there is no basis yet: raises BlockIOError
        then.
        """
        with self._exclusive("open_prefix"):
            self._set_ids(ids)
            if self.top_k is not None and self._swap.calibration is not None:
                await self._swap.calibration.basis_of_stored(self._indices)
            for cache in self._layers:
                cache.grow(len(ids) + 1)
                cache.length = len(ids) * cache.pool.block_size
                if self.top_k is not None:
                    stream = self._swap.stream_of(None)
                    with self._ordered(stream):
                        await code_blocks(self._swap, stream, cache, self._indices, scan=True)
