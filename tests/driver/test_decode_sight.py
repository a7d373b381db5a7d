"""Which tokens of a leaf a warp of attend_decode sees: the kernel's own function, lane by lane.

It takes matrix steps by what the function says, and a warp takes such a step as one: where lanes
disagree it never ends, or ends with other bits. No GPU: the C++ compiler runs it.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hsswap import ptx

COMPILER = shutil.which("g++") or shutil.which("clang++")
UNITS, BLOCK, LANES = 8, 16, 32
WHOLE = 0xFFFF

# A warp lane by lane: first what each would vote, then with all votes known.
AROUND = """
#define __device__
#define __forceinline__ inline
#define ALL 0xffffffffu
#define UNITS 8
#define BLOCK 16
using u8 = unsigned char;
using u32 = unsigned int;
struct Entry { const u8* unit; int first; };
struct Sight { int start, end; };
static const Entry* warp;
static bool voting, votes;
static bool __all_sync(u32, bool mine) {
  if (voting) votes = votes && mine;
  return voting || votes;
}
static int __shfl_sync(u32, int, int lane) { return warp[lane].first; }
static bool is_in(int at, Sight see) { return at >= see.start && at < see.end; }
%s
extern "C" void seen(const int* first, int start, int end, u32* out) {
  Entry entries[32];
  for (int lane = 0; lane < 32; lane++) entries[lane] = {nullptr, lane < 8 ? first[lane] : 0};
  warp = entries;
  votes = true;
  for (int pass = 0; pass < 2; pass++) {
    voting = pass == 0;
    for (int lane = 0; lane < 32; lane++)
      out[lane] = seen_tokens(entries[lane], {start, end}, lane >> 2, lane);
  }
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The function of the kernel, as a library."""
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    text = ptx.source("decode_parts.cuh")
    found = re.search(r"__device__ __forceinline__ u32 seen_tokens\(.*?\n}\n", text, re.DOTALL)
    assert found
    folder: Path = tmp_path_factory.mktemp("sight")
    source, built = folder / "seen.cc", folder / "seen.so"
    source.write_text(AROUND % found[0])
    command = [
        COMPILER,
        "-shared",
        "-fPIC",
        "-O1",
        "-w",
        str(source),
        "-o",
        str(folder / "seen.so"),
    ]
    subprocess.run(command, check=True, timeout=60)
    return ctypes.CDLL(str(built))


def test_every_lane_of_a_warp_knows_whether_a_leaf_is_seen_whole(library: ctypes.CDLL) -> None:
    """Every start and end within a leaf, and a leaf with a gap."""
    out = (ctypes.c_uint32 * LANES)()
    firsts = [256 + BLOCK * u for u in range(UNITS)]
    with_gap = [*firsts[:3], 1 << 30, *firsts[4:]]
    for first in (firsts, with_gap):
        given = (ctypes.c_int * UNITS)(*first)
        for start, end in [(0, e) for e in range(255, 386)] + [(s, 999) for s in range(255, 386)]:
            library.seen(given, start, end, out)
            whole = all(start <= f and f + BLOCK <= end for f in first)
            for lane in range(LANES):
                assert (out[lane] == WHOLE) == whole
                for bit in range(2 * UNITS):
                    token = first[bit // 2] + lane // 4 + bit % 2 * 8
                    assert (out[lane] >> bit & 1) == (start <= token < end)
