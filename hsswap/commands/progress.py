"""Progress of prefill on a stream for people: a bar on a terminal, a few lines elsewhere."""

from __future__ import annotations

from typing import TextIO

from hsswap.commands.output import say

BAR_CHARACTERS = 30
LINES_MAX = 10
"""Lines of a whole prefill where the stream is a file or a pipe."""


class Progress:
    """Tells how many tokens of the prompt are done. Give :meth:`update` to ``Llama.prefill``."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._lines = 0
        self._is_open = False

    def update(self, done: int, total: int) -> None:
        """``done`` of ``total`` tokens went through the model."""
        if self._is_terminal:
            filled = BAR_CHARACTERS * done // total
            bar = "#" * filled + "." * (BAR_CHARACTERS - filled)
            say(f"\rprefill [{bar}] {done}/{total} tokens", self._stream, end="")
            self._is_open = True
            if done == total:
                self.close()
        elif done * LINES_MAX >= total * (self._lines + 1) or self._lines == 0 or done == total:
            self._lines = max(self._lines + 1, done * LINES_MAX // total)
            say(f"prefill {done}/{total} tokens", self._stream)

    def close(self) -> None:
        """End an unfinished bar, so that what follows stands on a line of its own."""
        if self._is_open:
            self._is_open = False
            say("", self._stream)
