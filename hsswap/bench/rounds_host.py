"""The engine of ``hsswap bench rounds`` on the host device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from hsswap.bench.rounds_arms import PLAIN, Idle, Setting, Way
from hsswap.commands.decoding import SwapAttention, dims_of
from hsswap.commands.speculating import SwappedSequence
from hsswap.config import SPAN_TOKENS, SwapConfig
from hsswap.driver import open_device
from hsswap.models import Llama
from hsswap.rounds import Drafter, NgramDrafter, SequenceStart, Target
from hsswap.rounds.host_target import EarlyExitDrafter, HostTarget
from hsswap.sync import blocking


class HostEngine(ExitStack):
    """See :class:`hsswap.bench.rounds_arms.Engine`: a NumPy Llama, ``prompts`` prefilled in a swap
    that holds everything in memory.
    """

    def __init__(self, model: Llama, prompts: Sequence[Sequence[int]], tokens: int, k: int) -> None:
        super().__init__()
        self._model, self._prompts, self._tokens, self._k = model, prompts, tokens, k
        dims = dims_of(model.config)
        longest = max(map(len, prompts)) + tokens + k + 1
        blocks = dims.layers * len(prompts) * (dims.blocks_of(longest) + 1)
        ring = 2 * SPAN_TOKENS // dims.block_size
        config = SwapConfig(
            dims,
            len(prompts) * dims.blocks_of(longest) * 2 * dims.block_size,
            device_slots=blocks + ring,
            host_slots=blocks + ring,
            max_sequences=len(prompts),
            tile_tokens=SPAN_TOKENS,
            io="memory",
        )
        swap = self.enter_context(blocking(config))
        self._device = self.enter_context(open_device("host"))
        self._stream = self.enter_context(self._device.stream())
        self._sequences: list[SwappedSequence] = []
        self._attentions: list[SwapAttention] = []
        self._firsts: list[int] = []
        for prompt in prompts:
            sequence = self.enter_context(swap.sequence())
            attention = SwapAttention(sequence)
            self._firsts.append(int(model.prefill(prompt, attention).argmax()))
            self._attentions.append(attention)
            self._sequences.append(SwappedSequence(model, sequence, attention))

    def starts(self, way: Way) -> list[SequenceStart]:
        """See Engine."""
        made = []
        for sequence, prompt, first in zip(
            self._sequences, self._prompts, self._firsts, strict=True
        ):
            sequence.truncate(len(prompt))
            made.append(SequenceStart(prompt, first, len(prompt) + self._tokens))
        return made

    async def plain(self) -> list[list[int]]:
        """See Engine."""
        made: list[list[int]] = []
        for start, attention in zip(self.starts(PLAIN), self._attentions, strict=True):
            assert start.pending is not None
            tokens = [start.pending]
            for position in range(len(start.tokens), start.capacity):
                tokens.append(self._model.decode(tokens[-1], position, attention))
            made.append(tokens[1:])
        return made

    @contextmanager
    def watched(self, way: Way) -> Iterator[Callable[[], Idle | None]]:
        """See Engine: a worker is not watched."""
        yield lambda: None

    def setting(self, way: Way) -> Setting:
        """See Engine."""
        target: Target = self.enter_context(
            HostTarget(
                self._device, self._sequences, k=self._k, vocab_size=self._model.config.vocab_size
            )
        )
        drafter: Drafter = NgramDrafter(self._device)
        if way.drafter == "early-exit":
            drafter = EarlyExitDrafter(self._sequences)
        history = max(map(len, self._prompts)) + self._tokens + 1
        return Setting(
            *(self._device, self._stream, target, drafter, self._k, len(self._prompts), history)
        )
