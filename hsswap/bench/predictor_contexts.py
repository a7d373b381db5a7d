"""The texts of ``hsswap bench predictor``: prose, source code, planted facts, and a file.

All but the file come with every Python: the language reference in ``pydoc_data.topics`` and the
standard library's own sources. They differ a little between Python versions, which a report names.
"""

from __future__ import annotations

import inspect
import random
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pydoc_data.topics import topics
from typing import Protocol

from hsswap.errors import ArgumentError

# Mostly prose, where the alphabet's first topics are mostly grammar. The rest follows by name.
FIRST_TOPICS = ("objects", "naming", "exceptions", "execmodel")
SOURCES = ("asyncio.base_events", "tarfile")
OTHER_SOURCES = ("typing", "doctest", "pydoc")
"""For calibration alone: no context is made of them."""

FACTS_PLANTED, FACTS_RECITED, FACTS_LISTED = 24, 7, 10
PLACES = (
    "Lisbon", "Oslo", "Vienna", "Madrid", "Dublin", "Athens", "Prague", "Warsaw", "Berlin", "Rome",
    "Paris", "London", "Moscow", "Cairo", "Tokyo", "Delhi", "Lima", "Boston", "Denver", "Dallas",
    "Seattle", "Toronto", "Sydney", "Geneva",
)  # fmt: skip


class Encoder(Protocol):
    """What is needed of a tokenizer."""

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        """The token ids of ``text``."""


@dataclass(frozen=True)
class Context:
    """A text as tokens: ``length`` inputs and the token after them.

    ``digits``: those indices of ``tokens`` at which a digit of a planted fact stands in its
    recital; the model has to find it, for it stood once only before.
    """

    name: str
    tokens: tuple[int, ...]
    digits: frozenset[int] = frozenset()


def reference_text() -> str:
    """All topics of ``pydoc_data.topics``, in an order that does not depend on the dictionary."""
    first = [name for name in FIRST_TOPICS if name in topics]
    rest = sorted(set(topics) - set(first))
    return "\n\n".join(topics[name].strip() for name in first + rest)


def source_text(modules: tuple[str, ...] = SOURCES) -> str:
    """Modules of the standard library, one after the other."""
    return "\n\n".join(inspect.getsource(import_module(name)) for name in modules)


def plain_context(name: str, text: str, encoder: Encoder, length: int) -> Context:
    """The first ``length`` tokens of ``text``, and one. Raises ArgumentError if it is too short."""
    tokens = encoder.encode(text[: 12 * length])  # no text here has 12 characters a token
    if len(tokens) <= length:
        raise ArgumentError(
            f"the text of the context {name} has {len(tokens)} tokens and {length + 1} are "
            "needed; name a longer one"
        )
    return Context(name, tuple(tokens[: length + 1]))


def file_context(path: Path, encoder: Encoder, length: int) -> Context:
    """The beginning of a text file. Raises ArgumentError: unreadable, not UTF-8, too short."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"--text {path} cannot be read as UTF-8 text ({error})") from error
    return plain_context(path.name, text, encoder, length)


@dataclass(frozen=True)
class _Recital:
    """How the facts are said again at the end."""

    opening: str
    line: str
    count: int


SENTENCES = _Recital(
    "\n\nThe access codes again.\n", "The access code of {} is {}.\n", FACTS_RECITED
)
LIST = _Recital("\n\nA list of all the access codes follows.\n", "{}: {}\n", FACTS_LISTED)


def needles_context(
    name: str, encoder: Encoder, length: int, *, seed: int, recital: _Recital = SENTENCES
) -> Context:
    """24 facts of five digits planted in prose, some of them said again at its very end.

    The prose begins elsewhere for every seed; facts stand at even distances in random order.
    """
    draw = random.Random(seed)
    places = draw.sample(PLACES, FACTS_PLANTED)
    codes = {place: f"{draw.randrange(10_000, 100_000)}" for place in places}
    facts = [
        encoder.encode(f"\n\nThe access code of {place} is {codes[place]}.\n\n", add_bos=False)
        for place in places
    ]
    end = encoder.encode(recital.opening, add_bos=False)
    marks: list[int] = []
    for place in draw.sample(places, recital.count):
        line = encoder.encode(recital.line.format(place, codes[place]), add_bos=False)
        first = _find(line, encoder.encode(codes[place], add_bos=False))
        marks += range(len(end) + first, len(end) + first + len(codes[place]))
        end += line
    prose_count = length + 1 - len(end) - sum(map(len, facts))
    if prose_count < FACTS_PLANTED:
        raise ArgumentError(f"{length} tokens hold no {FACTS_PLANTED} facts; more are needed")
    text = reference_text()
    start = text.index("\n\n", 50_000 + 40_000 * (seed % 8))
    prose = encoder.encode(text[start : start + 12 * length])[:prose_count]
    tokens: list[int] = []
    pieces = FACTS_PLANTED + 1
    for index in range(pieces):
        tokens += prose[index * prose_count // pieces : (index + 1) * prose_count // pieces]
        tokens += facts[index] if index < FACTS_PLANTED else []
    base = len(tokens)
    return Context(name, tuple(tokens + end), frozenset(base + mark for mark in marks))


def _find(line: list[int], part: list[int]) -> int:
    """Where ``part`` begins in ``line``; each digit is a token of its own in all models here."""
    for first in range(len(line) - len(part) + 1):
        if line[first : first + len(part)] == part:
            return first
    raise ArgumentError("the model's tokenizer joins digits with other characters; name another")


def standard_contexts(encoder: Encoder, length: int) -> list[Context]:
    """Prose, source code, planted facts twice, and a long list of them."""
    return [
        plain_context("docs", reference_text(), encoder, length),
        plain_context("code", source_text(), encoder, length),
        needles_context("needles-a", encoder, length, seed=1),
        needles_context("needles-b", encoder, length, seed=2),
        needles_context("recite-many", encoder, length, seed=3, recital=LIST),
    ]


def adapter_context(encoder: Encoder, length: int) -> Context:
    """Half prose and half source code that no other context has: for methods that learn offline."""
    prose = encoder.encode(reference_text()[-12 * length :])[-(length // 2) :]
    code = encoder.encode(source_text(OTHER_SOURCES)[: 12 * length])
    return Context("adapter", tuple((prose + code)[: length + 1]))
