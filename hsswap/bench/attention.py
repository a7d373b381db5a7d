"""``hsswap bench attention``: A1, A2, A3, A4 and F8 against every SDPA backend of torch, and S1.

Attention over units in random places against attention over contiguous K and V, in one process:
device time of replayed CUDA graphs, inputs rotated past the second-level cache, at least 20
alternating slices, ratios inside a slice. Results are verified first.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from hsswap.bench.cases import CASES, Case, Inputs, make_inputs, relative_error
from hsswap.bench.figures import SLICES_MIN, Interval, machine
from hsswap.bench.lab import need_gpu, tell
from hsswap.bench.launches import Graph, StaticLauncher
from hsswap.commands.interrupts import Interrupts
from hsswap.commands.option_types import device_name, names_of
from hsswap.commands.output import save, say
from hsswap.commands.places import file_to_write
from hsswap.driver import open_device
from hsswap.driver.cuda_attention import enqueue_attend, enqueue_finalize
from hsswap.errors import ArgumentError, DeviceError

TOLERANCE = 1.5 * 2.6e-3
"""Promise 1: 1.5 times the usual kernel's error, which is at most 2.6e-3 on these inputs."""

SLICE_US = 4000.0
NUMBERS = ("A1", "A2", "A3", "A4", "F8", "S1")
CLOSE = 1.3
"""Backends within this factor of the fastest are measured in alternation; others once."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Everything ``hsswap bench attention`` takes."""
    add = parser.add_argument
    add("--json", action="store_true", help="print one JSON object on stdout and nothing else")
    add("--quick", action="store_true", help="short slices and fewer rows: a check, no figures")
    add("--out", type=file_to_write, metavar="F", help="also write the JSON object to a file")
    add("--device", type=device_name, default="cuda:0", metavar="NAME", help="the GPU (cuda:0)")
    add("--only", metavar="A1,A2", help=f"only rows of these names: {', '.join(NUMBERS)}")


def main(args: argparse.Namespace, _: Interrupts) -> int:
    """Measure. Returns 0, or 1 when a result was wrong or a floor was missed."""
    wanted = names_of(args.only, NUMBERS, "--only")
    if args.device == "host":
        raise ArgumentError("--device host: bench attention compares kernels of a GPU; give cuda:N")
    need_gpu(args.device, "bench attention compares kernels of a GPU and has no other way")
    try:
        import torch
    except ImportError as error:
        raise DeviceError(
            "bench attention needs torch: pip install 'hsswap[bench,torch]'"
        ) from error
    # torch says at length which backends do not take a call; the table says which do.
    warnings.filterwarnings("ignore", category=UserWarning)
    rows: list[dict[str, Any]] = []
    with open_device(args.device) as device:
        torch.cuda.init()
        stream = torch.cuda.Stream()
        launcher = StaticLauncher(device)  # type: ignore[arg-type]
        ours = device.stream(stream.cuda_stream)
        bandwidth = read_bandwidth(stream)
        for case in CASES:
            if case.number in wanted and not (args.quick and case.kv_bytes > 1 << 28):
                row = measure(case, launcher, ours, stream, bandwidth, args.quick)
                rows.append(row)
                show(row)
                torch.cuda.empty_cache()
        if "A3" in wanted:
            from hsswap.bench.top_k_step import measure_steps

            for row in measure_steps(device, ours, stream, args.quick):
                rows.append(row)
                show(row)
        if "S1" in wanted:
            from hsswap.bench.gathering import measure_gather

            for row in measure_gather(device, launcher, ours, stream, args.quick):
                rows.append(row)
                show(row)
        stream.synchronize()
        ours.close()
    result = {
        "bench": "attention",
        "quick": bool(args.quick),
        "machine": machine(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "read_tb_per_s": bandwidth,
        "rows": rows,
    }
    text = json.dumps(result, indent=1)
    if args.out:
        save(text, args.out)
    if args.json:
        say(text, sys.stdout)
    return 0 if all(row["passed"] for row in rows) else 1


def show(row: dict[str, Any]) -> None:
    """A line for people, on stderr."""
    ratio = row["ratio"]
    verdict = "ok" if row["passed"] else "MISSED" if row["correct"] else "WRONG"
    theirs = "" if row["baseline_error"] is None else f" (baseline {row['baseline_error']:.2e})"
    tell(
        f"{row['name']:58} {row['ours_us']['median']:9.2f} us, {row['best']} "
        f"{row['baseline_us']['median']:9.2f} us: {ratio['median']:.3f} "
        f"[{ratio['low']:.3f}, {ratio['high']:.3f}] floor {row['floor']} {verdict}"
        f" error {row['error']:.2e}{theirs}",
    )


def read_bandwidth(stream: Any) -> float:
    """TB/s of summing 4 GiB of float32."""
    import torch

    data = torch.ones(1 << 30, dtype=torch.float32, device="cuda")
    graph = Graph([lambda: data.sum()], stream)
    took = sorted(graph.run_us(1) for _ in range(9))[4]
    return float(data.numel() * 4 / took / 1e6)


def measure(
    case: Case, launcher: StaticLauncher, ours: Any, stream: Any, bandwidth: float, quick: bool
) -> dict[str, Any]:
    """One row: verify, then alternate."""
    import torch

    sets = make_inputs(case, span_tokens=1024)

    def call(inputs: Inputs) -> Callable[[], object]:
        return lambda: enqueue_attend(launcher, ours, inputs.attend, inputs.finalize)

    def call_apart(inputs: Inputs) -> Callable[[], object]:
        def both() -> None:
            enqueue_attend(launcher, ours, inputs.attend)
            enqueue_finalize(launcher, ours, inputs.finalize)

        return both

    graph = Graph([call(x) for x in sets], stream)
    error = relative_error(case, sets[0], sets[0].out)
    first = sets[0].out.clone()
    sets[0].out.fill_(float("nan"))
    apart = Graph([call_apart(x) for x in sets], stream)
    stream.synchronize()
    same = bool(torch.equal(first, sets[0].out))
    baselines, errors = baseline_graphs(case, sets, stream)
    once = {name: _median(g, 3) for name, g in baselines.items()}
    fastest = min(once.values())
    close = [name for name, took in once.items() if took < CLOSE * fastest]
    slices = SLICES_MIN + 1 if quick else 2 * SLICES_MIN + 1
    budget = SLICE_US / (4 if quick else 1)
    times: dict[str, list[float]] = {name: [] for name in ("ours", "apart", *close)}
    graphs = {"ours": graph, "apart": apart, **{name: baselines[name] for name in close}}
    replays = {name: max(1, int(budget / g.total_us())) for name, g in graphs.items()}
    for i in range(slices):
        order = list(graphs) if i % 2 else list(reversed(graphs))
        for name in order:
            times[name].append(graphs[name].run_us(replays[name]))
    best = min(close, key=lambda name: sorted(times[name])[slices // 2])
    ratio = Interval.of([b / o for b, o in zip(times[best], times["ours"], strict=True)])
    took = Interval.of(times["ours"])
    correct = error <= TOLERANCE and same
    return {
        "id": case.number,
        "name": case.name,
        **asdict(case),
        "ours_us": took._asdict(),
        "two_calls_us": Interval.of(times["apart"])._asdict(),
        "best": best,
        "baseline_us": Interval.of(times[best])._asdict(),
        "backends_us": {**once, **{n: Interval.of(times[n]).median for n in close}},
        "backend_errors": errors,
        "ratio": ratio._asdict(),
        "slices": slices,
        "tb_per_s": case.kv_bytes / took.median / 1e6,
        "read_share": case.kv_bytes / took.median / 1e6 / bandwidth,
        "tflop_per_s": flops(case) / took.median / 1e6,
        "error": error,
        "baseline_error": errors[best],
        "fused_equals_two_calls": same,
        "correct": correct,
        "passed": correct and ratio.low >= case.floor,
    }


def flops(case: Case) -> float:
    """Of a call, causal at the end."""
    seen = case.rows * case.tokens - case.rows * (case.rows - 1) / 2
    return 4.0 * case.batch * case.q_heads * case.head_dim * seen


def _median(graph: Graph, count: int) -> float:
    return sorted(graph.run_us(1) for _ in range(count))[count // 2]


def baseline_graphs(
    case: Case, sets: list[Inputs], stream: Any
) -> tuple[dict[str, Graph], dict[str, float | None]]:
    """Every backend that takes the call, captured, and its error.

    Backends that cannot align a causal mask to the end are given none at a prefill: they then do
    up to 3 % more work; ``full`` in their names says so.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right

    group = case.q_heads // case.kv_heads
    graphs: dict[str, Graph] = {}
    errors: dict[str, float | None] = {}
    queries = [x.queries.transpose(1, 2).contiguous() for x in sets]
    kinds = (
        [("full", None)]
        if case.rows == 1
        else [
            ("causal", causal_lower_right(case.rows, case.tokens)),
            ("full", None),
        ]
    )
    names = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION")
    for backend in names if case.rows > 1 else (*names, "MATH"):
        for kind, mask in kinds:
            name = backend.lower().removesuffix("_attention")
            name = name if case.rows == 1 else f"{name} {kind}"

            def call(i: int, backend: str = backend, mask: Any = mask) -> Callable[[], object]:
                def attend() -> object:
                    with sdpa_kernel([getattr(SDPBackend, backend)]):
                        return torch.nn.functional.scaled_dot_product_attention(
                            queries[i],
                            sets[i].keys,
                            sets[i].values,
                            attn_mask=mask,
                            enable_gqa=group > 1,
                        )

                return attend

            try:
                with torch.cuda.stream(stream):
                    out = call(0)()
                stream.synchronize()
                graphs[name] = Graph([call(i) for i in range(len(sets))], stream)
            except RuntimeError:  # this backend does not take such a call
                continue
            errors[name] = (
                relative_error(case, sets[0], out.transpose(1, 2))  # type: ignore[attr-defined]
                if kind == "causal" or case.rows == 1
                else None  # another function: nothing to compare
            )
    return graphs, errors
