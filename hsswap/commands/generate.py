"""``hsswap generate``: a real model decodes with its KV cache in slots and on disk."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import numpy as np

from hsswap.captured import MOST_ROWS
from hsswap.commands.decoding import Decoder, Model, Run, SwapAttention, count_agreeing, dims_of
from hsswap.commands.generate_args import GenerateOptions, prompt_name, read_prompt
from hsswap.commands.interrupts import Interrupts
from hsswap.commands.output import TextOutput, say
from hsswap.commands.planning import Plan, make_plan
from hsswap.commands.plot import check_plot, draw
from hsswap.commands.progress import Progress
from hsswap.commands.report import Report
from hsswap.commands.speculating import HostSpeculativeDecoder, Speculation
from hsswap.commands.verify import AttentionVerifier
from hsswap.driver import open_device
from hsswap.driver.base import Device
from hsswap.errors import ArgumentError, DeviceError, VerifyError
from hsswap.fitting import LESSON_SPAN
from hsswap.io.manifest import MANIFEST_NAME
from hsswap.models import (
    GgufFile,
    Llama,
    TextStream,
    Tokenizer,
    default_model_path,
    open_gguf,
    read_config,
    read_rope_factors,
)
from hsswap.sync import BlockingSequence, BlockingSwap, blocking


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be run, all of it checked: the model's file, the prompt and the plan."""

    options: GenerateOptions
    file: GgufFile
    tokenizer: Tokenizer
    prompt: list[int]
    plan: Plan

    @classmethod
    def of(cls, options: GenerateOptions) -> Job:
        """Read the model's header and the prompt, and plan the slots.

        Raises ArgumentError or ConfigError for a prompt, places or slots that cannot work,
        ModelError for a model that cannot be read, PlotError without matplotlib.
        """
        if options.plot is not None:
            check_plot(options.plot)
            if options.tokens == 1:
                raise ArgumentError("--plot needs 2 or more tokens: the first one is prefill's")
        if options.persist and options.directory is None:
            raise ArgumentError("--persist needs --dir, the folder that the cache stays in")
        place = options.directory
        if not options.persist and place is not None and (place / MANIFEST_NAME).is_file():
            raise ArgumentError(
                f"--dir {place} holds a persistent store: give --persist, or name another folder"
            )
        if options.persist and options.io == "memory":
            raise ArgumentError("--io memory keeps nothing; leave --persist out, or --io")
        if options.persist and options.verify:
            raise ArgumentError("--verify compares with K and V of one run; leave --persist out")
        if options.speculate is not None:
            check_speculation(options)
        text = read_prompt(options.prompt_file)
        file = open_gguf(options.model or default_model_path())
        config = read_config(file)
        tokenizer = Tokenizer.from_gguf(file)
        prompt = tokenizer.encode(text)
        if not prompt:
            raise ArgumentError(
                f"{prompt_name(options.prompt_file)} has no text that the model's vocabulary knows"
            )
        tokens = len(prompt) + options.tokens
        if tokens > config.context_tokens:
            raise ArgumentError(
                f"the prompt of {len(prompt)} tokens and {options.tokens} generated ones exceed "
                f"the model's context of {config.context_tokens}; shorten the prompt or lower "
                "--tokens"
            )
        plan = make_plan(
            options,
            dims_of(config, rope_factors=read_rope_factors(file), kv_dtype=options.kv_dtype),
            tokens,
            capacity_tokens=config.context_tokens if options.persist else None,
            fingerprint=file_hash(file.path) if options.persist else "",
        )
        return cls(options, file, tokenizer, prompt, plan)

    @property
    def model_name(self) -> str:
        """The model's file; the names inside such files are those of training runs."""
        return self.file.path.stem


def check_speculation(options: GenerateOptions) -> None:
    """Raise ArgumentError for what speculation is not made for."""
    if options.mode != "exact":
        raise ArgumentError("--speculate needs --mode exact")
    if options.device != "host" and options.draft >= MOST_ROWS:
        raise ArgumentError(
            f"--draft is {options.draft}; a round on a GPU verifies {MOST_ROWS} rows at most, so "
            f"give 1 to {MOST_ROWS - 1}"
        )


def main(parsed: argparse.Namespace, interrupts: Interrupts) -> int:
    """Run the command. Raises HsswapError or Interrupted."""
    options = GenerateOptions.of(parsed)
    job = Job.of(options)
    if options.device != "host":
        open_device(options.device).close()  # raises DeviceError before the model is loaded
    say(f"loading {job.file.path.name}", sys.stderr)
    model = load_model(job.file, options.device)
    text_to = None if options.json else sys.stdout
    report, failures = run_job(job, model, interrupts, text_to=text_to)
    say(report.as_table(), sys.stderr)
    if options.json:
        say(json.dumps(report.as_json(), ensure_ascii=False, allow_nan=False), sys.stdout)
    try:
        if options.plot is not None:
            draw(options.plot, report.run.steps, title_of(report))
            say(f"picture: {options.plot}", sys.stderr)
    finally:  # a wrong result matters more than a picture that could not be drawn
        if failures:
            assert report.verified is not None
            more = report.verified.failures - 1
            suffix = f" ({more} more calls failed)" if more else ""
            raise VerifyError(f"{failures[0]}{suffix}")
    return 0


def load_model(file: GgufFile, device: str) -> Model:
    """The model for a device: NumPy's for the host, torch's for a GPU.

    Raises DeviceError where torch is missing or sees no such GPU, and ModelError.
    """
    if device == "host":
        return Llama.from_gguf(file)
    try:
        import torch

        from hsswap.models.torch_llama import STEP_ROWS, TorchLlama
    except ImportError as error:
        raise DeviceError(
            f"--device {device} runs the model in torch, which is not installed: "
            "pip install 'hsswap[torch]', or give --device host"
        ) from error
    if not torch.cuda.is_available():
        raise DeviceError(
            f"--device {device}: torch {torch.__version__} sees no GPU; install one built for "
            "CUDA, or give --device host"
        )
    # Its own stream for this thread: the legacy default stream waits for all others.
    torch.cuda.set_device(device)
    torch.cuda.set_stream(torch.cuda.Stream(device))
    return TorchLlama.from_gguf(file, device, least_rows=STEP_ROWS)


def run_job(
    job: Job,
    model: Model,
    interrupts: Interrupts,
    *,
    text_to: TextIO | None = None,
    progress_to: TextIO | None = None,
    device: Device | None = None,
) -> tuple[Report, list[VerifyError]]:
    """Decode through a swap of its own; the report, and the first calls that failed to verify.

    Text goes to ``text_to`` as it is made, progress to ``progress_to`` (None: stderr). ``device``
    as in :func:`hsswap.blocking`. Raises what the swap raises, OutputError and Interrupted.
    """
    options = job.options
    run = Run(len(job.prompt))
    verifier = AttentionVerifier(job.plan.config.dims) if options.verify else None
    progress_to = progress_to or sys.stderr
    progress = Progress(progress_to)
    stream = TextStream(job.tokenizer)
    text = TextOutput(text_to)
    try:
        with (
            interrupts.held(),
            blocking(job.plan.config, device=device) as swap,
            open_sequence(swap, job) as sequence,
        ):
            run.prefix_tokens = sequence.length
            attention = SwapAttention(
                sequence, arrays=model.arrays, verifier=verifier, checkpoint=interrupts.check
            )
            decoder = make_decoder(options, model, swap, sequence, attention, verifier, interrupts)
            for token in decoder.tokens(
                run,
                job.prompt,
                options.tokens,
                stop_ids=job.tokenizer.stop_ids,
                progress=progress.update,
            ):
                if text_to is not None and len(run.tokens) == 1:
                    say("--- continuation ---", progress_to)
                text.show(stream.push(token))
            if options.persist:
                sequence.commit([*job.prompt, *run.tokens[:-1]])
        text.show(stream.finish())
        text.finish()
    except BaseException:
        progress.close()
        text.leave_line()
        raise
    agree = None
    if verifier is not None:
        agree = count_agreeing(model, job.prompt, run.tokens)
    assert run.statistics is not None
    report = Report(
        job.model_name,
        text.text,
        run,
        job.plan,
        run.statistics,
        None if verifier is None else verifier.summary,
        agree,
    )
    return report, [] if verifier is None else verifier.failures


def make_decoder(
    options: GenerateOptions,
    model: Model,
    swap: BlockingSwap,
    sequence: BlockingSequence,
    attention: SwapAttention,
    verifier: AttentionVerifier | None,
    interrupts: Interrupts,
) -> Decoder:
    """One that makes a token at a time, or one that speculates."""
    if options.speculate is None:
        return Decoder(model, swap, attention, verifier=verifier, checkpoint=interrupts.check)
    make: Callable[..., Decoder] = HostSpeculativeDecoder
    if not isinstance(model, Llama):
        from hsswap.commands.speculating_torch import TorchSpeculativeDecoder

        make = TorchSpeculativeDecoder
    return make(
        *(model, swap, sequence, attention),
        Speculation(options.speculate, options.draft, options.rounds),
        verifier=verifier,
        checkpoint=interrupts.check,
    )


def open_sequence(swap: BlockingSwap, job: Job) -> BlockingSequence:
    """A sequence for the prompt, with what is stored of it; at least one token is left to run, and
    of top-k the last rows, which it learns from.
    """
    top_k, prompt = job.plan.top_k, job.prompt
    if not job.options.persist:
        return swap.sequence(top_k=top_k)
    left = LESSON_SPAN if top_k is not None and top_k.stand_in else 1
    stored = prompt[: max(1, len(prompt) - left)]
    return swap.open_prefix(np.array(stored, np.int64), top_k=top_k)


def file_hash(path: Path) -> str:
    """What a file is, whatever its name."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def title_of(report: Report) -> str:
    """The picture's title: what ran, its context and its slots."""
    config, run, share = report.plan.config, report.run, report.share_of_slots
    mode = "exact" if report.plan.top_k is None else f"top {report.plan.top_k.k} blocks"
    ahead = "" if config.look_ahead else ", look-ahead off"
    return (
        f"{report.model_name}, {run.context_tokens} tokens of context, {mode}{ahead}\n"
        f"{config.device_slots} device and {config.host_slots} host slots: {share}; "
        f"{run.tokens_per_s:.1f} tokens/s, {report.statistics.path}"
    )
