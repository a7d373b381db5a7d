"""An engine in torch: K, V, queries and outputs are torch's own tensors, on a GPU or on the CPU.

Random rows stand for a model's: a prompt in chunks, then tokens one by one, with a quarter of the
cache in memory and the rest in files. On a GPU everything is enqueued on torch's current stream, so
whatever the engine launches next may read the output; nothing waits. At the end the last outputs
are compared with torch's own attention over all of K and V.

    python examples/torch_engine.py --device cuda:0

needs the extra torch, and cuda for a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses

import torch

from hsswap import HighSpeedSwap, ModelDims, SwapConfig

DIMS = ModelDims.uniform(layers=4, q_heads=8, kv_heads=2, head_dim=64)
GROUP = DIMS.groups[0]
CHUNK = 512

Rows = list[torch.Tensor]


def config_for(device: str, tokens: int, directory: str | None) -> SwapConfig:
    """An eighth of the cache in device slots, and one in host slots."""
    part = DIMS.blocks_of(tokens) * DIMS.id_bytes // 8
    where = "host" if device == "cpu" else device
    config = SwapConfig.plan(DIMS, tokens, part, part, device=where)
    return dataclasses.replace(config, directory=directory)


async def run(device: str, tokens: int, steps: int, directory: str | None = None) -> float:
    """``tokens`` of a prompt and ``steps`` more. The last outputs' error over torch's own."""
    on_gpu = device != "cpu"
    stream = torch.cuda.current_stream(device).cuda_stream if on_gpu else None

    def rows_of(rows: int, heads: int) -> torch.Tensor:
        """What a projection of the model gives: ``[rows, heads, head_dim]``."""
        return torch.randn(rows, heads, GROUP.head_dim, device=device).to(torch.bfloat16)

    keys: list[Rows] = [[] for _ in range(DIMS.layers)]
    values: list[Rows] = [[] for _ in range(DIMS.layers)]
    last: Rows = [torch.empty(0)] * DIMS.layers
    outs: Rows = [torch.empty(0)] * DIMS.layers
    config = config_for(device, tokens + steps, directory)
    async with HighSpeedSwap.open(config) as swap, swap.sequence() as sequence:
        for rows in [CHUNK] * (tokens // CHUNK) + [1] * steps:
            for layer in range(DIMS.layers):
                k, v = rows_of(rows, GROUP.kv_heads), rows_of(rows, GROUP.kv_heads)
                q = rows_of(rows, GROUP.q_heads)
                out = torch.empty_like(q)
                await sequence.append(layer, k, v, stream=stream)
                result = await sequence.attend(layer, q, out, stream=stream)
                if not on_gpu:  # the CPU's torch knows no streams
                    await result.done()
                keys[layer].append(k)
                values[layer].append(v)
                last[layer], outs[layer] = q, out
        errors = [
            error_of(outs[layer], last[layer], torch.cat(keys[layer]), torch.cat(values[layer]))
            for layer in range(DIMS.layers)
        ]
        read = swap.statistics().bytes_read
        print(f"{sequence.length} tokens, {read / 1e6:.0f} MB read, {swap.statistics().path}")
    return max(errors)


def error_of(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> float:
    """Relative L2 error of the output of one row over torch's own attention in float64."""
    over = [tensor.double().transpose(0, 1) for tensor in (q, k, v)]
    wanted = torch.nn.functional.scaled_dot_product_attention(*over, enable_gqa=True)
    wanted = wanted.transpose(0, 1)
    return float((out.double() - wanted).norm() / wanted.norm())


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--device", default="cpu", help="cpu or cuda:N (cpu)")
    add("--tokens", type=int, default=8192, help=f"of the prompt, a multiple of {CHUNK} (8192)")
    add("--steps", type=int, default=16, help="tokens after the prompt (16)")
    add("--dir", help="where the cache's files are (a new folder in the temporary folder)")
    given = parser.parse_args()
    if given.device != "cpu":
        torch.cuda.set_stream(torch.cuda.Stream(given.device))
    error = asyncio.run(run(given.device, given.tokens, given.steps, given.dir))
    print(f"error over torch's attention in float64: {error:.1e}")


if __name__ == "__main__":
    main()
