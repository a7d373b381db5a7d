"""Tokenizers rebuilt from a GGUF file's metadata: byte-level BPE, and SentencePiece's BPE.

For the first, text is split by the regular expressions that ``tokenizer.ggml.pre`` names, each
piece is written in GPT-2's byte alphabet and merged by the ``tokenizers`` package, imported on
first use; the second is :mod:`hsswap.models.pieces`. The way back needs no package: a token is a
fixed string of bytes.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from hsswap.errors import ArgumentError, ModelError
from hsswap.models.gguf_file import GgufFile
from hsswap.models.pieces import PieceEncoder, bytes_of_pieces

if TYPE_CHECKING:
    import tokenizers

# GPT-2's own split (Radford et al. 2019, encoder.py).
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _Split(NamedTuple):
    """Expressions applied in turn, each splitting further; and whether whole words skip merging."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False


# As llama.cpp's llm_tokenizer_bpe (src/llama-vocab.cpp) names and defines them.
_SPLITS = {
    "smollm": _Split((r"\p{N}", _GPT2)),
    "gpt-2": _Split((_GPT2,)),
    "gpt2": _Split((_GPT2,)),
    "default": _Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "llama-bpe": _Split((_LLAMA3,), ignore_merges=True),
}
_KINDS = ("gpt2", "llama")
# llama.cpp's numbers of token types; 2, 5 and 6 do not occur in byte-level vocabularies.
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4


def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, other bytes are shifted past 255."""
    own = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in own]
    shifted = {chr(256 + index): byte for index, byte in enumerate(others)}
    return {chr(byte): byte for byte in own} | shifted


class Tokenizer:
    """Text to token ids and back. Made by ``Tokenizer.from_gguf``; safe to use from any thread.

    Attributes: ``vocab_size``; ``bos_id`` and ``eos_id`` (None if the file has none); ``stop_ids``,
    the ids that end a generated text; ``adds_bos``, whether prompts begin with ``bos_id``.
    """

    def __init__(
        self,
        encode_text: Callable[[str], list[int]],
        token_bytes: Sequence[bytes],
        control: dict[str, int],
        always: dict[str, int],
        ids: _SpecialIds,
    ) -> None:
        self._encode_text = encode_text
        self._bytes = token_bytes
        self._control = frozenset(control.values())
        self._always_ids = always
        self._special_ids = control | always
        self._always = _any_of(always)
        self._special = _any_of(self._special_ids)
        self.vocab_size = len(token_bytes)
        self.bos_id = ids.bos
        self.eos_id = ids.eos
        self.stop_ids = ids.stop
        self.adds_bos = ids.adds_bos

    @classmethod
    def from_gguf(cls, file: GgufFile) -> Tokenizer:
        """Build the tokenizer that ``file`` describes.

        Raises ``ModelError`` if the file has none, if it is of another kind or splits text in an
        unknown way (named), or if the ``tokenizers`` package is not installed.
        """
        model = file.get_str("tokenizer.ggml.model")
        if model not in _KINDS:
            raise ModelError(
                f"{file.path} has a tokenizer of kind {model!r}, and only {', '.join(_KINDS)} are "
                "supported; name another model"
            )
        split = _split_of(file) if model == "gpt2" else None
        tokens: list[str] = file.get_list("tokenizer.ggml.tokens", str)
        kinds: list[int] = file.get_list("tokenizer.ggml.token_type", int, [_NORMAL] * len(tokens))
        if len(kinds) != len(tokens) or not tokens:
            raise ModelError(
                f"{file.path} has {len(tokens)} tokens and {len(kinds)} token types; "
                "convert the model again"
            )
        special = {kind: _of_kind(tokens, kinds, kind) for kind in (_CONTROL, _USER_DEFINED)}
        encode: Callable[[str], list[int]]
        if split is None:
            encode = PieceEncoder.from_gguf(file, tokens, kinds).encode
            spelled = bytes_of_pieces(tokens, kinds)
        else:
            engine = _build_engine(file, tokens, split)
            encode = partial(_encode_by, engine)
            spelled = _bytes_of_tokens(file, tokens, kinds)
        return cls(
            encode,
            spelled,
            special[_CONTROL],
            special[_USER_DEFINED],
            _read_special_ids(file, len(tokens)),
        )

    def encode(
        self, text: str, *, parse_special: bool = False, add_bos: bool | None = None
    ) -> list[int]:
        """The token ids of ``text``.

        ``parse_special``: names of control tokens in ``text`` become those tokens; leave it off for
        text that is not trusted. ``add_bos``: begin with ``bos_id``; None does as the file asks.
        Bytes for which the vocabulary has no token are left out, as llama.cpp leaves them out.

        Raises ``ArgumentError`` if ``text`` has lone surrogates, or a BOS is asked for without one.
        """
        ids: list[int] = []
        if self.adds_bos if add_bos is None else add_bos:
            if self.bos_id is None:
                raise ArgumentError("the model has no BOS token; encode with add_bos=False")
            ids.append(self.bos_id)
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ArgumentError(
                f"the text has a lone surrogate at character {error.start}; "
                "decode the input as UTF-8 with errors='replace'"
            ) from error
        pattern = self._special if parse_special else self._always
        special_ids = self._special_ids if parse_special else self._always_ids
        for piece in pattern.split(text) if pattern else [text]:
            special_id = special_ids.get(piece)
            if special_id is not None:
                ids.append(special_id)
            elif piece:
                ids.extend(self._encode_text(piece))
        return ids

    def token_bytes(self, token_id: int, *, special: bool = False) -> bytes:
        """The bytes one token stands for; a control token's are empty unless ``special``.

        Raises ``ArgumentError`` if ``token_id`` is not in the vocabulary.
        """
        if not 0 <= token_id < self.vocab_size:
            raise ArgumentError(f"token id {token_id} is not in 0..{self.vocab_size - 1}")
        if token_id in self._control and not special:
            return b""
        return self._bytes[token_id]

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """The text of ``ids``; bytes that are not UTF-8 become U+FFFD.

        ``special``: write control tokens by name instead of leaving them out. Raises
        ``ArgumentError`` if an id is not in the vocabulary.
        """
        data = b"".join(self.token_bytes(token_id, special=special) for token_id in ids)
        return data.decode("utf-8", errors="replace")


class TextStream:
    """Text of tokens as they come: characters whose bytes span tokens are held back until whole.

    All returned strings joined equal ``tokenizer.decode`` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Take one more token; the text that is now complete, which may be empty.

        Raises ``ArgumentError`` if the id is not in the vocabulary; nothing is changed then.
        """
        return self._decoder.decode(self._tokenizer.token_bytes(token_id, special=self._special))

    def finish(self) -> str:
        """What was held back, as U+FFFD if it is no whole character. The stream can be reused."""
        return self._decoder.decode(b"", final=True)


class _SpecialIds(NamedTuple):
    bos: int | None
    eos: int | None
    stop: frozenset[int]
    adds_bos: bool


def _split_of(file: GgufFile) -> _Split:
    pre = file.get_str("tokenizer.ggml.pre", "default")
    if pre not in _SPLITS:
        raise ModelError(
            f"{file.path} has the pre-tokenizer {pre!r}, and only {', '.join(_SPLITS)} are "
            "supported; name another model"
        )
    return _SPLITS[pre]


def _encode_by(engine: tokenizers.Tokenizer, piece: str) -> list[int]:
    ids: list[int] = engine.encode(piece, add_special_tokens=False).ids
    return ids


def _any_of(names: Iterable[str]) -> re.Pattern[str] | None:
    """A splitting pattern that keeps the names, the longest first; None without names."""
    ordered = sorted(names, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, ordered)) + ")") if ordered else None


def _of_kind(tokens: Sequence[str], kinds: Sequence[int], kind: int) -> dict[str, int]:
    pairs = zip(tokens, kinds, strict=True)
    return {token: index for index, (token, own) in enumerate(pairs) if own == kind and token}


def _bytes_of_tokens(file: GgufFile, tokens: Sequence[str], kinds: Sequence[int]) -> list[bytes]:
    byte_of = _byte_of_char()
    spelled: list[bytes] = []
    for token, kind in zip(tokens, kinds, strict=True):
        try:
            as_is = kind != _NORMAL
            spelled.append(token.encode() if as_is else bytes([byte_of[char] for char in token]))
        except KeyError as error:
            raise ModelError(
                f"{file.path}: token {token!r} is not in the byte-level alphabet; "
                "name a model with a byte-level BPE tokenizer"
            ) from error
    return spelled


def _read_special_ids(file: GgufFile, token_count: int) -> _SpecialIds:
    def find(name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        if key not in file.metadata:
            return None
        token_id = file.get_int(key)
        if not 0 <= token_id < token_count:
            raise ModelError(f"{file.path}: {key} = {token_id} is not a token; convert it again")
        return token_id

    bos, eos = find("bos"), find("eos")
    stop = frozenset(token_id for token_id in (eos, find("eot")) if token_id is not None)
    adds_bos = file.metadata.get("tokenizer.ggml.add_bos_token") is True and bos is not None
    return _SpecialIds(bos, eos, stop, adds_bos)


def _build_engine(file: GgufFile, tokens: Sequence[str], split: _Split) -> tokenizers.Tokenizer:
    try:
        import tokenizers
        from tokenizers import models, pre_tokenizers
    except ImportError as error:
        raise ModelError(
            "reading models needs the package 'tokenizers'; run: pip install hsswap[demo]"
        ) from error
    lines: list[str] = file.get_list("tokenizer.ggml.merges", str)
    merges = [(left, right) for left, _, right in (line.partition(" ") for line in lines)]
    vocab = {token: index for index, token in enumerate(tokens)}
    try:
        engine = tokenizers.Tokenizer(
            models.BPE(vocab=vocab, merges=merges, ignore_merges=split.ignore_merges)
        )
    except Exception as error:  # the package raises plain Exception for a merge it cannot place
        raise ModelError(
            f"{file.path}: its BPE merges do not fit its tokens ({error}); convert the model again"
        ) from error
    # isolated: a match and what lies between matches each become a piece of their own.
    stages = [
        pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in split.patterns
    ]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    engine.pre_tokenizer = pre_tokenizers.Sequence([*stages, letters])
    return engine
