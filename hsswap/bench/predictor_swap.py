"""The command's own path: what ``hsswap generate --mode topk`` runs, with the tokens given.

Prefill is exact and goes through a swap whose device and host slots together are an eighth of the
cache; then one token at a time is decoded in top-k mode with the context's own next token as input,
so that its loss can be told. Nothing here selects or attends: that is all the swap's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hsswap.bench.predictor_sparse import compare_logits
from hsswap.bench.predictor_traces import Trace
from hsswap.commands.decoding import SwapAttention, dims_of
from hsswap.commands.generate_args import GenerateOptions, add_arguments
from hsswap.commands.planning import CACHE_SHARE, Plan, make_plan
from hsswap.config import SPAN_TOKENS, ModelDims
from hsswap.models import Llama
from hsswap.sync import blocking

Row = dict[str, Any]


def swap_row(
    model: Llama,
    trace: Trace,
    rows: int,
    folder: Path,
    say: Callable[[str], None],
    *,
    most: bool,
    codes: int,
) -> Row:
    """Loss, KL and digits of the last ``rows`` tokens, and what they read. ``folder``: the store's;
    ``most``: with the largest k for which that many slots are enough, in place of the default;
    ``codes``: the command's ``--codes``.

    Takes minutes at 8,192 tokens, nearly all of it prefill.
    """
    length, tokens = trace.sizes.length, trace.context.tokens
    dims = dims_of(model.config, rope_factors=model.weights.rope_factors)
    plan = eighth_plan(dims, length, folder, most=most, codes=codes)
    first = length - rows
    with blocking(plan.config) as swap, swap.sequence(top_k=plan.top_k) as sequence:
        attention = SwapAttention(sequence, arrays=model.arrays)
        attention.exact = True
        model.prefill(tokens[:first], attention)
        say(f"{trace.context.name}: {first} tokens are in the swap")
        attention.exact = None
        before = swap.statistics()
        logits = [model.forward(tokens[at : at + 1], at, attention) for at in range(first, length)]
        after = swap.statistics()
    found = compare_logits(trace, np.stack(logits))
    dense = compare_logits(trace, trace.logits()[-rows:])
    assert plan.top_k is not None
    assert plan.config.predictor is not None
    cache = dims.layers * dims.blocks_of(length)
    slots = plan.config.device_slots + plan.config.host_slots
    return {
        "context": trace.context.name,
        "rows": rows,
        "k": plan.top_k.k,
        "predictor": plan.config.predictor.kind,
        "metadata_ratio": plan.config.predictor.metadata_ratio,
        "slots_of_cache": round(slots / cache, 4),
        "blocks_read_a_token": (after.blocks_read - before.blocks_read) / rows,
        "predicted_left_out": float(np.mean([part.mean() for part in attention.left_out])),
        "dense_nats": dense.nats,
        "dense_digits_right": dense.digits_right,
        **found._asdict(),
    }


def eighth_plan(dims: ModelDims, tokens: int, folder: Path, *, most: bool, codes: int = 32) -> Plan:
    """The command's plan for so many tokens, with an eighth of the cache in slots: of the default k
    and the rest for host slots, or with the largest k and the fewest host slots.

    Two tiles in host slots are the least, which short contexts cannot do with an eighth.
    """
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = ["--prompt-file", "-", "--mode", "topk", "--dir", str(folder), "--codes", str(codes)]
    plan = make_plan(GenerateOptions.of(parser.parse_args(words)), dims, tokens)
    eighth = dims.layers * dims.blocks_of(tokens) // CACHE_SHARE
    if most:
        host_slots = 2 * (SPAN_TOKENS // dims.block_size) * len(dims.groups)
        words += ["--slots", str(max(eighth - host_slots, plan.config.device_slots))]
    else:
        least = 2 * plan.config.tile_tokens // dims.block_size
        host_slots = max(eighth - plan.config.device_slots, least)
    words += ["--host-slots", str(host_slots)]
    return make_plan(GenerateOptions.of(parser.parse_args(words)), dims, tokens)
