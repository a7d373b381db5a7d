"""Speculative rounds of one sequence in plain Python, written apart from the kernels."""

from __future__ import annotations

from dataclasses import dataclass, field

NONE, FREE = 0xFFFFFFFF, 0xFFFFFFFE
OVERFLOW, BAD_TOKEN, STOPPED, CAPACITY, BAD_DRAFT = 1, 2, 4, 8, 16


@dataclass
class Sequence:
    """What the device holds of a sequence between two kernels."""

    k: int
    vocab: int
    pend: int = NONE
    pos: int = 0
    flags: int = 0
    ring: list[int] = field(default_factory=list)
    room: int = 1 << 30
    stops: frozenset[int] = frozenset()
    rows: list[int] = field(default_factory=list)
    used: int = 0

    @property
    def base(self) -> int:
        """1 with a pending token."""
        return 0 if self.pend == NONE else 1

    def assemble(
        self,
        drafts: list[tuple[int, float]],
        *,
        p_min: float = 0.0,
        first: bool = False,
        table: list[int] | None = None,
        depth: int | None = None,
        capacity: int | None = None,
    ) -> None:
        """Make ``rows`` and ``used``."""
        if self.base and self.pend >= self.vocab:
            self.flags |= BAD_TOKEN
        if capacity is not None and self.pos + self.base > capacity:
            self.flags |= CAPACITY
        limits = [self.k, self.k if depth is None else depth]
        if capacity is not None:
            limits.append(capacity - self.pos - self.base)
        taken: list[int] = []
        halted = self.flags != 0
        while not halted and len(taken) < min(limits):
            token, p = drafts[len(taken)]
            exempt = not taken and not (first and self.base)
            unsure = p_min > 0 and not p >= p_min
            if token == NONE or (unsure and not exempt):
                break
            if table is not None:
                token = table[token] if token < len(table) else FREE
            if token >= self.vocab:
                self.flags |= BAD_DRAFT
                break
            taken.append(token)
        head = [self.pend if self.pend < self.vocab else 0] if self.base else []
        self.rows = (head + taken + [0] * (self.k + 1))[: self.k + 1]
        self.used = len(taken)

    def accept(self, preds: list[int], last_pred: int) -> tuple[int, int]:
        """What ``acc`` becomes."""
        if self.flags:
            return 0, NONE
        drafts = self.rows[self.base : self.base + self.used]
        choices = preds if self.base else [last_pred, *preds]
        emitted: list[int] = []
        for i, choice in enumerate(choices[: self.used + 1]):
            if len(self.ring) + len(emitted) == self.room:
                self.flags |= OVERFLOW
                break
            if choice >= self.vocab:
                self.flags |= BAD_TOKEN
                break
            emitted.append(choice)
            if choice in self.stops:
                self.flags |= STOPPED
                break
            if i < self.used and choice != drafts[i]:
                break
        return (len(emitted) - 1, emitted[-1]) if emitted else (0, NONE)

    def commit(self, acc: tuple[int, int]) -> None:
        """Move position, ring and pending token."""
        accepted, following = acc
        if following == NONE:
            return
        self.ring += [*self.rows[self.base : self.base + accepted], following]
        self.pos += self.base + accepted
        self.pend = following


def find(known: list[int], count: int, shortest: int, longest: int) -> list[int] | None:
    """Drafts after the last earlier place of the last tokens."""
    for n in range(longest, shortest - 1, -1):
        for i in range(len(known) - n - 1, -1, -1):
            if known[i : i + n] == known[len(known) - n :]:
                whole = list(known)
                for _ in range(count):
                    whole.append(whole[i + n + len(whole) - len(known)])
                return whole[len(known) :]
    return None
