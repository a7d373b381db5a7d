"""Block masses: both kernels that write them add a group's shares in one order.

Which one runs follows from how many sequences there are, and top-k chooses by masses: other bits
could choose other blocks. No GPU: the C++ compiler runs both kernels, a thread for each lane.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hsswap import ptx

COMPILER = shutil.which("g++") or shutil.which("clang++")
ENTRIES = 5

AROUND = """
#include <barrier>
#include <cmath>
#include <thread>
#include <vector>
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(n)
#define __grid_constant__
using u8 = unsigned char;
using u16 = unsigned short;
using i64 = long long;
struct float2 { float x, y; };
struct Index { unsigned x, y, z; };
static Index blockIdx;
static thread_local Index threadIdx;
static float lanes[32];
static std::barrier warp(32);
static float __shfl_xor_sync(unsigned, float x, int apart) {
  const int lane = threadIdx.x & 31;
  lanes[lane] = x;
  warp.arrive_and_wait();
  const float other = lanes[lane ^ apart];
  warp.arrive_and_wait();
  return other;
}
static float __fadd_rn(float a, float b) { return a + b; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static float exp2_of(float x) { return exp2f(x); }
static int rank_of() { return 0; }
static int head_of() { return 0; }
#define NOTHING (-INFINITY)
#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453f
#define WARPS 1
#define GROUP @GROUP@
#define KV_HEADS 1
#define TOGETHER 1
#define UNITS 8
#define BLOCKS 1
#define THREADS 32
@CODE@
template <typename Work>
static void on_a_warp(Work work) {
  std::vector<std::thread> threads;
  for (unsigned lane = 0; lane < 32; lane++)
    threads.emplace_back([=] { threadIdx.x = lane; work(lane); });
  for (auto& thread : threads) thread.join();
}
extern "C" void masses(const float* maximum, const float* total, float* block_lse,
                       const float* sinks, int entries, float* apart, float* fused) {
  FinalizeParams end = {};
  end.maximum = maximum;
  end.total = total;
  end.block_lse = block_lse;
  end.block_mass = apart;
  end.sinks = sinks;
  end.sequences = end.rows = end.kv_heads = 1;
  end.q_heads = GROUP;
  end.entries = entries;
  for (int entry = 0; entry < entries; entry++) {
    blockIdx.x = entry;
    on_a_warp([&](int) { block_masses(end); });
  }
  float lse[GROUP];
  for (int head = 0; head < GROUP; head++) {
    const End e = end_of(maximum[head], total[head], sinks, head);
    lse[head] = lse_of(e.reference, e.total);
  }
  float kept[UNITS * GROUP] = {};
  for (int entry = 0; entry < entries; entry++)
    for (int head = 0; head < GROUP; head++)
      kept[entry * GROUP + head] = block_lse[head * entries + entry];
  AttendParams attend = {};
  attend.block_mass = fused;
  attend.entries = entries;
  on_a_warp([&](int) { write_masses(attend, kept, lse); });
}
"""

PARTS = {
    "attention.cuh": (
        r"struct AttendParams \{.*?\n\};",
        r"__device__ __forceinline__ float lse_of\(.*?\n\}",
        r"struct End \{.*?\n\};",
        r"__device__ __forceinline__ End end_of\(.*?\n\}",
    ),
    "block_mass.cuh": (
        r"__device__ __forceinline__ float sum_of_group\(.*?\n\}",
        r"__device__ __forceinline__ void write_masses\(.*?\n\}",
    ),
    "finalize.cu": (
        r"__device__ __forceinline__ float warp_sum\(.*?\n\}",
        r"struct FinalizeParams \{.*?\n\};",
        r'extern "C" __global__ void \S+\(32 \* WARPS\) block_masses\(.*?\n\}',
    ),
}


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], ctypes.CDLL]:
    """Makes both kernels for a group, as a library."""
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    compiler, code = COMPILER, list[str]()
    for file, parts in PARTS.items():
        for part in parts:
            found = re.search(part, ptx.source(file), re.DOTALL)
            assert found, part
            code.append(found[0])
    folder: Path = tmp_path_factory.mktemp("masses")

    def made(group: int) -> ctypes.CDLL:
        source, library = folder / f"{group}.cc", folder / f"{group}.so"
        text = AROUND.replace("@GROUP@", str(group)).replace("@CODE@", "\n".join(code))
        source.write_text(text)
        options = ["-std=c++20", "-shared", "-fPIC", "-O1", "-w", "-pthread", "-ffp-contract=off"]
        command = [compiler, *options, str(source), "-o", str(library)]
        subprocess.run(command, check=True, timeout=60)
        return ctypes.CDLL(str(library))

    return made


@pytest.mark.parametrize("group", [1, 3, 4, 7, 8])
def test_a_block_s_mass_has_the_same_bits_from_both_kernels(
    build: Callable[[int], ctypes.CDLL], group: int
) -> None:
    rng = np.random.default_rng(group)
    block_lse = rng.normal(0, 2, (group, ENTRIES)).astype(np.float32)
    block_lse[:, 1] = -np.inf  # unseen
    maximum = rng.normal(4, 1, group).astype(np.float32)
    total = rng.uniform(1, 9, group).astype(np.float32)
    sinks = rng.normal(0, 1, group).astype(np.float32)
    sinks[0] = -np.inf
    got = np.full((2, ENTRIES), np.nan, np.float32)
    pointers = [a.ctypes.data_as(ctypes.c_void_p) for a in (maximum, total, block_lse, sinks)]
    apart, fused = (row.ctypes.data_as(ctypes.c_void_p) for row in got)
    build(group).masses(*pointers, ENTRIES, apart, fused)
    assert got[0].tobytes() == got[1].tobytes()
    logs = np.log(np.exp2(maximum.astype(float)) * total + np.exp(sinks.astype(float)))
    wanted = np.exp(block_lse.astype(float) - logs[:, None]).mean(0)
    np.testing.assert_allclose(got[0], wanted, rtol=1e-5)
