"""SentencePiece's BPE (arXiv 1808.06226): pieces merged by score, and bytes for what has no piece.

Spaces are written ``▁``. A text begins as its characters; of all neighbours that together are a
piece, those of the greatest score are joined, of equals the first, until none are.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from hsswap.errors import ModelError
from hsswap.models.gguf_file import GgufFile

SPACE = "▁"
# llama.cpp's numbers of token types.
_NORMAL, _UNKNOWN, _USER_DEFINED, _BYTE = 1, 2, 4, 6


class PieceEncoder:
    """Text to ids. ``tokens``, ``scores``, ``kinds`` ``[vocab_size]`` as in a GGUF file."""

    def __init__(
        self, tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int]
    ) -> None:
        of_text = (_NORMAL, _USER_DEFINED)
        self._ids = {
            t: i for i, (t, k) in enumerate(zip(tokens, kinds, strict=True)) if k in of_text
        }
        self._scores = scores
        self._bytes = {
            int(token[3:5], 16): index
            for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind == _BYTE
        }
        self._unknown = next((i for i, kind in enumerate(kinds) if kind == _UNKNOWN), None)

    @classmethod
    def from_gguf(cls, file: GgufFile, tokens: Sequence[str], kinds: Sequence[int]) -> PieceEncoder:
        """Raises ``ModelError`` for scores that do not fit, and for a prefix, which is not done."""
        if file.metadata.get("tokenizer.ggml.add_space_prefix", True):
            raise ModelError(
                f"{file.path}: a tokenizer that puts a space before every text is not supported; "
                "name another model"
            )
        scores: list[float] = file.get_list("tokenizer.ggml.scores", float)
        if len(scores) != len(tokens):
            raise ModelError(
                f"{file.path} has {len(tokens)} tokens and {len(scores)} scores; "
                "convert the model again"
            )
        return cls(tokens, scores, kinds)

    def encode(self, text: str) -> list[int]:
        """The ids of ``text``."""
        parts: list[str] = list(text.replace(" ", SPACE))
        following = [*range(1, len(parts)), -1]
        before = [*range(-1, len(parts) - 1)]
        heap: list[tuple[float, int, str, str]] = []

        def offer(left: int, right: int) -> None:
            if left < 0 or right < 0:
                return
            found = self._ids.get(parts[left] + parts[right])
            if found is not None:
                heapq.heappush(heap, (-self._scores[found], left, parts[left], parts[right]))

        for left in range(len(parts) - 1):
            offer(left, left + 1)
        while heap:
            _, left, one, other = heapq.heappop(heap)
            right = following[left]
            if right < 0 or parts[left] != one or parts[right] != other:
                continue  # one of them was joined with another meanwhile
            parts[left], parts[right] = one + other, ""
            following[left] = following[right]
            if following[right] >= 0:
                before[following[right]] = left
            offer(before[left], left)
            offer(left, following[left])
        return [token_id for part in parts if part for token_id in self._ids_of(part)]

    def _ids_of(self, part: str) -> list[int]:
        known = self._ids.get(part)
        if known is not None:
            return [known]
        spelled = [self._bytes.get(byte, self._unknown) for byte in part.encode()]
        return [token_id for token_id in spelled if token_id is not None]


def bytes_of_pieces(tokens: Sequence[str], kinds: Sequence[int]) -> list[bytes]:
    """What each token stands for."""
    spelled = []
    for token, kind in zip(tokens, kinds, strict=True):
        if kind == _BYTE:
            spelled.append(bytes([int(token[3:5], 16)]))
        elif kind in (_NORMAL, _USER_DEFINED):
            spelled.append(token.replace(SPACE, " ").encode())
        else:
            spelled.append(token.encode())
    return spelled
