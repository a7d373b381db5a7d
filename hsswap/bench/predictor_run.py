"""What ``hsswap bench predictor`` runs: pieces that are each some rows of a table, in processes.

A piece depends on nothing but its context's trace (and those of the texts that methods learn
from), so that any number of processes may make them side by side. Finished ones are kept as they
come; only those of the same commit are taken for a report.
"""

from __future__ import annotations

import math
import multiprocessing
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hsswap.bench.predictor_contexts import Context
from hsswap.bench.predictor_ours import Codes
from hsswap.bench.predictor_rows import (
    FIGURES_VERSION,
    KS,
    POOL_RATIO,
    PRODUCT_HASH,
    Method,
    Row,
    RowFile,
    end_to_end_ks,
    end_to_end_rows,
    left_out_rows,
    methods,
    reads_rows,
    selection_rows,
    statistics_row,
)
from hsswap.bench.predictor_selectors import Oracle
from hsswap.bench.predictor_sparse import compare_logits
from hsswap.bench.predictor_swap import swap_row
from hsswap.bench.predictor_traces import Sizes, Trace, trace_of
from hsswap.models import Llama, open_gguf

TABLES = ("contexts", "selection", "end_to_end", "left_out", "reads", "loss", "through_swap")
SWAPPED = ("docs", "needles-a", "needles-b")
"""Contexts of ``--through-swap``: loss on the first, digits on the others."""

ORDER = ("through_swap", "selection", "loss", "contexts", "end_to_end", "left_out", "reads")
"""Of tables, in which their pieces are begun."""

MOST_WAIT_S = 1e6
Say = Callable[[str], None]


@dataclass(frozen=True)
class Task:
    """What is to be run; travels to processes. ``model_key`` names the weights, ``folder`` keeps
    traces. ``adapter``: the text that KVSwap learns from.
    """

    model_path: Path
    model_key: str
    sizes: Sizes
    folder: Path
    contexts: tuple[Context, ...]
    adapter: Context
    is_quick: bool
    through_swap: bool


@dataclass(frozen=True)
class Piece:
    """Rows of one table and context, kept under ``key``."""

    table: str
    context: str
    key: str
    make: Callable[[], Sequence[Row]]


def all_rows(
    task: Task, model: Llama, jobs: int, commit: str, say: Say, limit_s: float | None = None
) -> Row:
    """Every table of the report, and ``not_run``: pieces that were not begun within ``limit_s``."""
    deadline = time.monotonic() + (math.inf if limit_s is None else limit_s)
    kept = RowFile(task.folder / f"rows-{FIGURES_VERSION}-{commit or 'unknown'}.jsonl")
    with ExitStack() as stack:
        pool = None
        if jobs > 1:
            # A fork would take over locks of BLAS' and others' threads.
            apart = multiprocessing.get_context("spawn")
            pool = stack.enter_context(ProcessPoolExecutor(jobs, apart, _begin, (task,)))
            for name in pool.map(_make_trace, range(len(task.contexts) + 1)):
                say(f"trace of {name}")
        pieces = list(pieces_of(task, model, stack, say))
        if pool is not None:
            _make_apart(pool, pieces, kept, deadline, say)
        found: Row = {name: [] for name in TABLES}
        found["not_run"] = []
        for piece in pieces:
            if not kept.has(piece.key) and time.monotonic() > deadline:
                found["not_run"].append(piece.key)
            else:
                found[piece.table] += kept.rows(piece.key, piece.make)
    return found


def _make_apart(
    pool: ProcessPoolExecutor, pieces: list[Piece], kept: RowFile, deadline: float, say: Say
) -> None:
    """Have what is missing made by processes, as long as the deadline is not over."""
    made = {
        pool.submit(_make_piece, at): pieces[at]
        for at in begin_order(pieces)
        if not kept.has(pieces[at].key)
    }
    try:
        for done, future in enumerate(
            as_completed(made, timeout=max(0, min(deadline - time.monotonic(), MOST_WAIT_S)))
        ):
            kept.put(made[future].key, future.result())
            say(f"{done + 1} of {len(made)}: {made[future].key}")
    except TimeoutError:
        for future in made:
            future.cancel()
        for future, piece in made.items():
            if not future.cancelled() and not kept.has(piece.key):
                kept.put(piece.key, future.result())


def begin_order(pieces: Sequence[Piece]) -> list[int]:
    """Places of pieces, those that take longest first, and of end to end the first methods of all
    contexts before the next: what a limit leaves out is then the last methods.
    """
    ranks: list[tuple[int, int]] = []
    count: Counter[tuple[str, str]] = Counter()
    for piece in pieces:
        own = piece.table, piece.context
        ranks.append((ORDER.index(piece.table), count[own]))
        count[own] += 1
    return sorted(range(len(pieces)), key=ranks.__getitem__)


class _Worker:
    """A process' own model, and the pieces once one was asked for."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.model = Llama.from_gguf(open_gguf(task.model_path))
        self.pieces: list[Piece] | None = None


_workers: list[_Worker] = []  # one, in processes of a pool


def _begin(task: Task) -> None:
    _workers.append(_Worker(task))


def _make_trace(number: int) -> str:
    """Make a context's trace, or the adapter's, which is the first."""
    (worker,) = _workers
    context = (worker.task.adapter, *worker.task.contexts)[number]
    _trace(worker.task, worker.model, context).close()
    return context.name


def _make_piece(number: int) -> Sequence[Row]:
    (worker,) = _workers
    if worker.pieces is None:
        # Traces stay open as long as the process runs.
        worker.pieces = list(pieces_of(worker.task, worker.model, ExitStack(), lambda _: None))
    return worker.pieces[number].make()


def _trace(task: Task, model: Llama, context: Context) -> Trace:
    return trace_of(model, task.model_key, context, task.sizes, task.folder)


def pieces_of(task: Task, model: Llama, stack: ExitStack, say: Say) -> Iterator[Piece]:
    """Every piece, always in the same order. ``stack`` closes the traces."""

    def opened(context: Context) -> Trace:
        say(f"trace of {context.name}")
        trace = _trace(task, model, context)
        stack.callback(trace.close)
        return trace

    adapted = opened(task.adapter)
    traces = [opened(context) for context in task.contexts]
    names = [one.context.name for one in traces]
    for number, trace in enumerate(traces):
        # A basis from the wrong kind of text: prose for code, code for everything else.
        wrong = "docs" if trace.context.name == "code" else "code"
        other = traces[names.index(wrong)] if wrong in names else adapted
        say(f"{trace.context.name} ({number + 1} of {len(traces)})")
        compared = methods(adapted, other)
        yield from _end_to_end(task, model, trace, compared)
        yield from _of_layers(model, trace, compared)
        if task.through_swap and trace.context.name in SWAPPED:
            plans = ((False, 32),) if task.is_quick else ((False, 32), (True, 32), (True, 16))
            for most, codes in plans:  # of short texts they are alike
                about = f"{', most' if most else ''}{', 1/16' if codes == 16 else ''}"
                key = f"{trace.name} through the swap{about} {PRODUCT_HASH}"
                make = partial(_swapped, task, model, trace, say, most=most, codes=codes)
                yield Piece("through_swap", trace.context.name, key, make)


def _end_to_end(task: Task, model: Llama, trace: Trace, compared: list[Method]) -> Iterator[Piece]:
    for one in compared:
        ks = one.ks[:1] if task.is_quick else end_to_end_ks(one)
        method = Method(one.selector, ks)
        key = f"{trace.name} end to end {one.selector.name} {ks}"
        key += f" {PRODUCT_HASH}" if one.is_ours else ""
        make = partial(end_to_end_rows, model, trace, method, task.sizes.tested)
        yield Piece("end_to_end", trace.context.name, key, make)


def _of_layers(model: Llama, trace: Trace, compared: list[Method]) -> Iterator[Piece]:
    name = trace.context.name
    yield Piece("contexts", name, f"{trace.name} statistics", lambda: [_about(trace)])
    for is_ours in (False, True):
        alike = [one for one in compared if one.is_ours == is_ours]
        key = f"{trace.name} selection of {len(alike)}{f' {PRODUCT_HASH}' if is_ours else ''}"
        yield Piece("selection", name, key, partial(selection_rows, trace, alike))
    yield Piece(
        "left_out", name, f"{trace.name} left out {PRODUCT_HASH}", lambda: left_out_rows(trace)
    )
    yield Piece("reads", name, f"{trace.name} reads {PRODUCT_HASH}", lambda: reads_rows(trace))
    if not trace.context.digits:
        make = partial(_loss_rows, model, trace)
        yield Piece("loss", name, f"{trace.name} loss {PRODUCT_HASH}", make)


def _swapped(
    task: Task, model: Llama, trace: Trace, say: Say, *, most: bool, codes: int
) -> list[Row]:
    rows = task.sizes.window if trace.context.name == "docs" else task.sizes.tested
    with tempfile.TemporaryDirectory(prefix="hsswap-bench-", dir=task.folder) as folder:
        return [swap_row(model, trace, rows, Path(folder), say, most=most, codes=codes)]


def _about(trace: Trace) -> Row:
    """The context as the dense model sees it."""
    dense = compare_logits(trace, trace.logits()[-trace.sizes.tested :])
    return {
        **statistics_row(trace),
        "dense_nats": dense.nats,
        "dense_digits_right": dense.digits_right,
        "digits": dense.digits,
    }


def _loss_rows(model: Llama, trace: Trace) -> list[Row]:
    """Nats a token over the whole window: dense, best possible, ours."""
    dense = compare_logits(trace, trace.logits())
    rows: list[Row] = [{"context": trace.context.name, "method": "full", "nats": dense.nats}]
    for selector in (Oracle(), Codes(POOL_RATIO), Codes(1 / 16)):
        for row in end_to_end_rows(model, trace, Method(selector, KS[:1]), trace.sizes.window):
            rows.append({name: row[name] for name in ("context", "method", "k", "nats", "kl")})
    return rows
