"""A3: one top-k step of a layer against dense attention over the same tokens.

Score, select, attend with its fetch, output and block masses, launched again from a graph, with a
set part of the chosen units missing from device slots. Two queries take turns in every set of
inputs: their chosen blocks differ by what is to be missing, and the unit cache has room for what
one of them chooses, so that each step finds exactly so many units missing and fetches them from
pinned memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from hsswap.bench.cases import BLOCK_SIZE, Case, make_inputs, tensor_from
from hsswap.bench.figures import SLICES_MIN, Interval
from hsswap.bench.planted_codes import PLANES, make_codec, make_codes, make_queries
from hsswap.config import LayerGroup
from hsswap.driver.base import Device, Graph, Stream
from hsswap.driver.choice_operations import FetchWork
from hsswap.driver.codes_operations import (
    Attended,
    LayerCodes,
    Resident,
    ScoreCodesWork,
    ScoreMemory,
)
from hsswap.driver.operations import (
    AttendWork,
    AttentionState,
    BlockPool,
    FinalizeWork,
    SelectWork,
    UnitCache,
    UnitPool,
    unit_bytes_of,
)
from hsswap.driver.tensor import Tensor, tensor_in

GROUP = LayerGroup(1, 32, 8, 128)
PINNED = 9
"""The first block and the last 128 tokens."""

LINK_BYTES_PER_US = 51.2e3
"""What a gather of scattered units reaches over this host's link (measured as S1)."""

COLD_FLOOR_US = 15.0
SET_BYTES = 320 << 20
"""What the sets of a row read together, at least: five times the second-level cache of an H200."""


@dataclass(frozen=True, slots=True)
class Row:
    """``k`` of the blocks of ``tokens`` tokens, ``missing`` of them in no device slot (None: all).

    ``floor``: the step's time over dense attention's; None: link time and 15 us.
    """

    tokens: int
    k: int
    missing: int | None
    floor: float | None

    @property
    def name(self) -> str:
        """As in tables."""
        part = "cold" if self.missing is None else f"{self.missing} of {self.k} missing"
        return f"A3 top-k step, {self.tokens} tokens, {part}"

    @property
    def absent(self) -> int:
        """Blocks of each head to be fetched in a step."""
        return self.k if self.missing is None else self.missing


ROWS = tuple(
    Row(tokens, k, missing, floor)
    for tokens, k, near in ((32768, 64, 0.55), (131072, 256, 0.35))
    for missing, floor in ((0, None), (2 * k // 64, near), (13 * k // 64, None), (None, None))
)


class Step:
    """One set of inputs: a layer whose two queries choose different blocks."""

    def __init__(self, device: Device, row: Row, seed: int, keep: list[Any]) -> None:
        import torch

        self._device, self._row, self._torch, self._keep = device, row, torch, keep
        random = np.random.default_rng(seed)
        generator = torch.Generator("cuda").manual_seed(seed)
        blocks = row.tokens // BLOCK_SIZE
        free = 1 + random.permutation(blocks - PINNED)[: row.k + row.absent]
        same = free[: row.k - row.absent]
        self.chosen = [
            np.sort(np.r_[0, same, only, np.arange(blocks - PINNED + 1, blocks)])
            for only in np.split(free[row.k - row.absent :], 2)
        ]
        codec = make_codec(GROUP.head_dim, random)
        planted = (same, *np.split(free[row.k - row.absent :], 2))
        codes = make_codes(GROUP, codec, blocks, planted, generator, keep)
        queries = make_queries(codec, GROUP.q_heads, random)
        self.queries = torch.from_numpy(queries).cuda().to(torch.bfloat16)
        self._make_pools(random, generator, blocks)
        self._make_tables(codes, blocks)

    def _make_pools(self, random: np.random.Generator, generator: Any, blocks: int) -> None:
        """Host slots of all blocks that are chosen, and device slots for those of one query."""
        torch, heads = self._torch, GROUP.kv_heads
        unit = unit_bytes_of(GROUP, BLOCK_SIZE)
        wanted = np.union1d(*self.chosen)
        held = self._device.allocate_host(len(wanted) * heads * unit)
        self._keep.append(held)
        memory = tensor_in(held, "u8", (len(wanted), heads * unit))
        self.content = torch.randn(
            (len(wanted), heads, 2, BLOCK_SIZE, GROUP.head_dim),
            dtype=torch.bfloat16,
            device="cuda",
            generator=generator,
        )
        memory.array()[...] = (
            self.content.view(torch.uint8).view(len(wanted), heads * unit).cpu().numpy()
        )
        self.blocks = BlockPool(memory, GROUP, BLOCK_SIZE)
        self.host_slot = np.full(blocks, -1, np.int32)
        self.host_slot[wanted] = random.permutation(len(wanted)).astype(np.int32)
        ordered = np.empty_like(memory.array())
        ordered[self.host_slot[wanted]] = memory.array()
        memory.array()[...] = ordered
        self.places = self._row.k + PINNED
        slots = heads * self.places
        self.units = UnitPool(self._zeros("u8", slots, unit), GROUP, BLOCK_SIZE)
        self.slots = random.permutation(slots).reshape(heads, self.places).astype(np.int32)

    def _make_tables(self, codes: LayerCodes, blocks: int) -> None:
        heads, count = GROUP.kv_heads, self.places
        i32 = self._i32
        cache = UnitCache(
            i32(self.slots),
            self._zeros("i32", heads, count),
            self._zeros("f32", heads, count),
            self._zeros("i32", heads, count),
        )
        chosen = i32(np.full((heads, count), -1))
        entries = count + 1
        pinned = i32(np.r_[0, np.arange(blocks - PINNED + 1, blocks)])
        resident = Resident(self.units, cache, pinned, np.zeros(heads, np.int32), 0)
        remembered = [self._zeros("f32", GROUP.q_heads, blocks) for _ in range(2)]
        # K and V are random and say nothing of codes: NaN corrects nothing, and is read as usual.
        shown = self._torch.full((GROUP.q_heads, count), float("nan"), device="cuda")
        self._keep.append(shown)
        self.scores = [
            ScoreCodesWork(
                codes=codes,
                queries=tensor_from(self.queries[turn], "bf16"),
                code_index=i32(np.arange(blocks)),
                resident=resident,
                memory=ScoreMemory(*remembered),
                first=False,
                last=Attended(chosen, tensor_from(shown, "f32")),
                scores=self._zeros("f32", heads, blocks),
                uncorrected=self._zeros("f32", heads, blocks),
            )
            for turn in range(2)
        ]
        mass = self._zeros("f32", 1, heads, entries)
        self.select = SelectWork(
            scores=self.scores[0].scores,
            shares=self.scores[0].uncorrected,
            k=self._row.k,
            pinned=pinned,
            cache=cache,
            step=i32(np.zeros(heads)),
            decay=0.9,
            last_chosen=chosen,
            last_mass=Tensor(
                mass.address, (heads, count), (4 * entries, 4), "f32", mass.on_device, mass
            ),
            chosen=chosen,
            chosen_slots=self._zeros("i32", heads, count),
            missing=self._zeros("u8", heads, count),
            left_out=self._zeros("f32", heads),
        )
        self.fetch = FetchWork(
            units=self.units,
            blocks=self.blocks,
            chosen=chosen,
            chosen_slots=self.select.chosen_slots,
            missing=self.select.missing,
            cache=cache,
            host_slots=i32(self.host_slot),
            tail_slots=i32(np.full((heads, 1), -1)),
            tail_positions=i32(np.array([blocks])),
            slots=self._zeros("i32", heads, entries),
            positions=self._zeros("i32", heads, entries),
            absent=self._zeros("i32", heads, count),
            absent_count=self._zeros("i32", heads),
        )
        self._make_attention(mass)

    def _make_attention(self, mass: Tensor) -> None:
        i32, entries = self._i32, self.places + 1
        rows = (1, 1, GROUP.q_heads)
        state = AttentionState(
            self._zeros("f32", *rows), self._zeros("f32", *rows), self._zeros("f32", *rows, 128)
        )
        out = self._torch.zeros((2, *rows, 128), dtype=self._torch.bfloat16, device="cuda")
        self.out = out
        block_lse = self._zeros("f32", *rows, entries)
        self.attends = [
            AttendWork(
                queries=tensor_from(self.queries[turn], "bf16").as_batch().as_batch(),
                lengths=i32(np.array([self._row.tokens])),
                units=self.units,
                slots=self.fetch.slots.as_batch(),
                first_block=0,
                positions=self.fetch.positions.as_batch(),
                span_blocks=self._device.span_tokens(self._row.tokens) // BLOCK_SIZE,
                state=state,
                begin=True,
                block_lse=block_lse,
                blocks=self.blocks,
                end=FinalizeWork(
                    state,
                    tensor_from(out[turn], "bf16"),
                    block_lse=block_lse,
                    block_mass=mass,
                ),
                fetch=self.fetch,
            )
            for turn in range(2)
        ]

    def calls(self, stream: Stream, turn: int) -> dict[str, Callable[[], None]]:
        """The operations of a step, in order."""
        device, scores = self._device, self.scores[turn]
        return {
            "score": lambda: device.score(stream, scores),
            "select": lambda: device.select(stream, self._select_of(turn)),
            "attend": lambda: device.attend(stream, self.attends[turn]),
        }

    def _select_of(self, turn: int) -> SelectWork:
        scored = self.scores[turn]
        return replace(self.select, scores=scored.scores, shares=scored.uncorrected)

    def error(self, turn: int) -> float:
        """Relative L2 error of a turn's output against float64; infinite for other blocks."""
        torch = self._torch
        wanted = np.union1d(*self.chosen)
        part = self.content[torch.from_numpy(np.searchsorted(wanted, self.chosen[turn])).cuda()]
        keys, values = part.double().permute(2, 1, 0, 3, 4).flatten(2, 3)
        queries = self.queries[turn].double().view(8, 4, 128)
        weights = torch.softmax(queries @ keys.transpose(1, 2) * 128**-0.5, -1)
        exact = (weights @ values).view(32, 128)
        off = (self.out[turn, 0, 0].double() - exact).norm() / exact.norm()
        return float(off)

    def _zeros(self, dtype: str, *shape: int) -> Tensor:
        kinds = {"u8": "uint8", "i32": "int32", "f32": "float32"}
        made = self._torch.zeros(shape, dtype=getattr(self._torch, kinds[dtype]), device="cuda")
        self._keep.append(made)
        return tensor_from(made, dtype)

    def _i32(self, values: Any) -> Tensor:
        made = self._torch.from_numpy(np.ascontiguousarray(values, np.int32)).cuda()
        self._keep.append(made)
        return tensor_from(made, "i32")


class Timed:
    """A graph of ours, timed by torch's events."""

    def __init__(self, ours: Stream, stream: Any, calls: list[Callable[[], None]]) -> None:
        import torch

        self._torch, self._ours, self._stream, self._count = torch, ours, stream, len(calls)
        with ours.capture() as graph:
            for call in calls:
                call()
        self.graph: Graph = graph
        self.run_us(1)

    def run_us(self, replays: int) -> float:
        """Device time of one call."""
        begin, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(self._stream)
        for _ in range(replays):
            self.graph.launch(self._ours)
        end.record(self._stream)
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3 / (replays * self._count)


def measure_steps(device: Device, ours: Stream, stream: Any, quick: bool) -> list[dict[str, Any]]:
    """Every row, next to dense attention over as many tokens in the same process."""
    results = []
    for tokens in (32768, 131072):
        dense = _dense(tokens, stream)
        for row in ROWS:
            if row.tokens == tokens:
                results.append(_measure(device, row, ours, stream, dense, quick))
    return results


def _dense(tokens: int, stream: Any) -> tuple[str, Any]:
    """The fastest backend of torch on contiguous K and V, as a graph."""
    from hsswap.bench.attention import baseline_graphs

    case = Case("A3", 1, 1, 32, 8, 128, tokens, 0.0, 0.0)
    sets = make_inputs(case, 1024)
    graphs, _ = baseline_graphs(case, sets, stream)
    best = min(graphs, key=lambda name: sorted(graphs[name].run_us(1) for _ in range(5))[2])
    return best, graphs[best]


def _measure(
    device: Device, row: Row, ours: Stream, stream: Any, dense: tuple[str, Any], quick: bool
) -> dict[str, Any]:
    read = 2 * PLANES * row.tokens * GROUP.kv_heads + row.k * 8 * unit_bytes_of(GROUP, BLOCK_SIZE)
    keep: list[Any] = []
    sets = [Step(device, row, seed, keep) for seed in range(max(2, SET_BYTES // read))]
    steps = [step.calls(ours, turn) for turn in range(2) for step in sets]
    whole = Timed(ours, stream, [_all(calls) for calls in steps])
    whole.run_us(2)
    stream.synchronize()
    error = max(step.error(turn) for step in sets[:2] for turn in range(2))
    found = _missing(sets[0])
    slices = SLICES_MIN + 1 if quick else 2 * SLICES_MIN + 1
    times: dict[str, list[float]] = {"ours": [], "dense": []}
    for i in range(slices):
        for name in ("ours", "dense") if i % 2 else ("dense", "ours"):
            times[name].append((whole if name == "ours" else dense[1]).run_us(2))
    # Alone, select says of units that they came which did not: nothing is read after that. Attend
    # alone fetches what the last step missed, each time.
    parts = {n: Timed(ours, stream, [calls[n] for calls in steps]) for n in steps[0]}
    took, dense_took = Interval.of(times["ours"]), Interval.of(times["dense"])
    ratio = Interval.of([o / d for o, d in zip(times["ours"], times["dense"], strict=True)])
    unit = unit_bytes_of(GROUP, BLOCK_SIZE)
    link = row.absent * GROUP.kv_heads * unit / LINK_BYTES_PER_US
    floor = row.floor
    if row.missing is None:
        floor = (link + COLD_FLOOR_US) / dense_took.median
    correct = error <= 1.5 * 2.6e-3 and found == row.absent * GROUP.kv_heads
    result = {
        "id": "A3",
        "name": row.name,
        **asdict(row),
        "ours_us": took._asdict(),
        "best": dense[0],
        "baseline_us": dense_took._asdict(),
        "ratio": ratio._asdict(),
        "link_us": link,
        "parts_us": {name: sorted(t.run_us(2) for _ in range(5))[2] for name, t in parts.items()},
        "slices": slices,
        "floor": floor,
        "missing_units": found,
        "error": error,
        "baseline_error": None,
        "correct": correct,
        "passed": correct and (floor is None or ratio.high <= floor),
    }
    for timed in (whole, *parts.values()):
        timed.graph.close()
    stream.synchronize()
    for held in keep:
        if hasattr(held, "close"):
            held.close()
    return result


def _all(calls: dict[str, Callable[[], None]]) -> Callable[[], None]:
    def step() -> None:
        for call in calls.values():
            call()

    return step


def _missing(step: Step) -> int:
    """Units that the last select found missing."""
    import torch

    flags = torch.zeros(step.select.missing.shape, dtype=torch.uint8, device="cuda")
    held = step.select.missing.owner
    assert isinstance(held, torch.Tensor)
    flags.copy_(held)
    return int(flags.sum())
