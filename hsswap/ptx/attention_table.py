"""The kernels of attend, finalize and learn, for the table."""

from __future__ import annotations

from hsswap.ptx.kernel import Constants, Kernel

_LLAMA: Constants = {"HEAD_DIM": 128, "VALUE_DIM": 128, "GROUP": 4, "KV_HEADS": 8, "BLOCK": 16}
_SMOL: Constants = {"HEAD_DIM": 64, "VALUE_DIM": 64, "GROUP": 3, "KV_HEADS": 3, "BLOCK": 16}
_HALF: Constants = {**_LLAMA, "FP16": 1}
_FP8: Constants = {**_LLAMA, "E4M3": 1}
_ODD: Constants = {"HEAD_DIM": 24, "VALUE_DIM": 40, "GROUP": 5, "KV_HEADS": 2, "BLOCK": 1}
_WIDE: Constants = {"HEAD_DIM": 256, "VALUE_DIM": 256, "GROUP": 17, "KV_HEADS": 1, "BLOCK": 256}


def _decode(
    dims: Constants,
    cluster: int,
    warps: int,
    leaf_warps: int,
    stages: int,
    *,
    spans: int = 0,
    lse: int = 0,
    fetch: int = 0,
) -> Constants:
    return {
        **dims,
        "CLUSTER": cluster,
        "WARPS": warps,
        "LEAF_WARPS": leaf_warps,
        "STAGES": stages,
        "WHOLE_SPANS": spans,
        "BLOCKS_A_SM": 2 if stages == 2 else 1,
        "BLOCK_LSE": lse,
        "FETCH": fetch,
    }


def _tile(dims: Constants, wide: int, apart: int, transform: int) -> Constants:
    return {**dims, "WIDE": wide, "APART": apart, "TRANSFORM": transform}


ATTENTION_KERNELS: dict[str, Kernel] = {
    "attend_decode": Kernel(
        "attention.cu",
        "attend_decode",
        no_spills=True,
        examples=(
            _decode(_LLAMA, 0, 8, 1, 2),
            _decode(_LLAMA, 0, 8, 1, 4),
            _decode(_LLAMA, 1, 4, 1, 2, spans=1),
            _decode(_LLAMA, 8, 16, 8, 8),
            _decode(_LLAMA, 8, 16, 8, 8, lse=1),
            _decode(_LLAMA, 8, 16, 8, 8, lse=1, fetch=1),
            _decode(_LLAMA, 8, 8, 4, 8),
            _decode(_LLAMA, 8, 10, 2, 8, lse=1, fetch=1),
            _decode(_LLAMA, 8, 8, 1, 4),
            _decode(_LLAMA, 8, 8, 1, 4, lse=1),
            _decode(_LLAMA, 8, 8, 1, 4, lse=1, fetch=1),
            _decode(_LLAMA, 0, 8, 1, 2, lse=1, fetch=1),
            _decode(_HALF, 8, 16, 4, 8),
            _decode(_SMOL, 16, 16, 4, 8),
            _decode(_SMOL, 16, 12, 4, 8, lse=1),
            _decode(_SMOL, 16, 12, 4, 8, lse=1, fetch=1),
            _decode(_SMOL, 0, 8, 1, 4),
        ),
    ),
    "attend_decode_e4m3": Kernel(
        "attend_decode_e4m3.cu",
        "attend_decode_e4m3",
        True,
        ({**_FP8, "WARPS": 8}, {**_SMOL, "E4M3": 1, "WARPS": 8}, {**_FP8, "FP16": 1, "WARPS": 8}),
    ),
    "merge_decode": Kernel("merge_decode.cu", "merge_decode", True, (_LLAMA, _SMOL)),
    "attend_tile": Kernel(
        "attend_tile.cu",
        "attend_tile",
        examples=(
            _tile(_LLAMA, 1, 1, 0),
            _tile(_ODD, 0, 1, 1),
            _tile(_WIDE, 1, 0, 2),
            _tile(_HALF, 1, 1, 0),
            {**_tile(_LLAMA, 1, 1, 0), "PAGES": 1},
            _tile(_FP8, 1, 1, 0),
            {**_tile({**_FP8, "FP16": 1}, 0, 1, 0), "PAGES": 1},
            {**_tile(_ODD, 1, 1, 2), "E4M3": 1},
        ),
    ),
    "attend_wide": Kernel(
        "attend_wide.cu",
        "attend_wide",
        True,
        ({**_LLAMA, "TRANSFORM": 0}, {**_HALF, "TRANSFORM": 0}),
    ),
    "merge_spans": Kernel("finalize.cu", "merge_spans", True, ({**_LLAMA, "TRANSFORM": 0},)),
    "block_logsumexp": Kernel(
        "finalize.cu",
        "block_logsumexp",
        True,
        (
            {**_LLAMA, "TRANSFORM": 2},
            {**_FP8, "TRANSFORM": 0},
            {**_FP8, "TRANSFORM": 0, "PAGES": 1},
        ),
    ),
    "finalize": Kernel("finalize.cu", "finalize", True),
    "block_masses": Kernel("finalize.cu", "block_masses", True),
    "make_up": Kernel("finalize.cu", "make_up", True),
    "learn": Kernel("learn.cu", "learn", True),
}
