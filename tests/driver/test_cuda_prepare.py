"""What is prepared is what is launched: launch code runs here against a GPU that only listens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsswap import PredictorConfig, ptx
from hsswap.config import LayerGroup
from hsswap.driver import cuda_attention
from hsswap.driver.base import Stream
from hsswap.driver.choice_operations import FetchWork
from hsswap.driver.cuda_attention import enqueue_attend
from hsswap.driver.cuda_attention_decode import CLUSTERS, PORTABLE_CLUSTER
from hsswap.driver.cuda_attention_params import unit_bytes_of
from hsswap.driver.cuda_modules import key_of
from hsswap.driver.cuda_prepare import kernels_of
from hsswap.driver.cuda_seam import Launch, Launcher
from hsswap.driver.cuda_top_k import score, select
from hsswap.driver.host import HostDevice
from hsswap.driver.operations import (
    AttendWork,
    AttentionState,
    BlockPool,
    FinalizeWork,
    ProjectionCodes,
    ScoreWork,
    SelectWork,
    UnitCache,
    UnitPool,
)
from hsswap.driver.preparing import PrepareWork
from hsswap.driver.tensor import Tensor

SPAN = cuda_attention.SPAN_TOKENS
LLAMA, SMOL = LayerGroup(1, 32, 8, 128), LayerGroup(1, 9, 3, 64)
FP8 = LayerGroup(1, 32, 8, 128, kv_dtype="e4m3")
HOPPER, AMPERE, SMALL = ((9, 0), 132, 232448), ((8, 0), 108, 166912), ((12, 0), 24, 101376)


class Listening(Launcher):
    """A GPU of the facts given that notes what is launched on it."""

    def __init__(self, facts: tuple[tuple[int, int], int, int], clusters: int = 0) -> None:
        self.compute_capability, self.sm_count, self.shared_bytes_limit = facts
        self.arch = "sm_{}{}".format(*self.compute_capability)
        self.clusters = clusters
        self.launched: set[object] = set()

    def start(self, stream: Stream, launch: Launch) -> None:
        """Note it."""
        self.launched.add(key_of(launch.kernel, launch.constants))

    def max_active_clusters(self, launch: Launch) -> int:
        """To ask loads the kernel as well."""
        self.launched.add(key_of(launch.kernel, launch.constants))
        return self.clusters

    def upload(self, stream: Stream, array: Any, *, direct: bool = False) -> int:
        """Somewhere."""
        return 4096

    def copy(self, stream: Stream, target: int, source: int, nbytes: int) -> None:
        """No launch."""

    def keep(self, stream: Stream, name: str, array: Any) -> int:
        """Somewhere."""
        return 4096

    def workspace(self, stream: Stream, nbytes: int) -> int:
        """Somewhere."""
        return 4096


def tensor(dtype: str, shape: tuple[int, ...], *, skip_bytes: int = 0) -> Tensor:
    """A place that nothing reads."""
    item, strides = {"bf16": 2, "u8": 1}.get(dtype, 4), list[int]()
    for size in reversed(shape):
        strides.append(item)
        item *= size
    return Tensor(1 << 20 | skip_bytes, shape, tuple(reversed(strides)), dtype, True, None)


def i32_table(rows: int, columns: int) -> Tensor:
    """As above, of int32."""
    return tensor("i32", (rows, columns))


def attend_work(
    group: LayerGroup, size: int, sizes: tuple[int, int, int], *, ranked: bool, skip_bytes: int
) -> AttendWork:
    """As a swap makes it, over units in device slots."""
    sequences, rows, entries = sizes
    heads, queries = group.kv_heads, group.q_heads
    shape = (sequences, rows, queries)
    state = AttentionState(
        tensor("f32", shape), tensor("f32", shape), tensor("f32", (*shape, group.value_dim))
    )
    lse = tensor("f32", (*shape, entries)) if ranked else None
    mass = tensor("f32", (sequences, heads, entries)) if ranked else None
    slots = np.zeros((sequences, heads, entries), np.int32)
    out = tensor("bf16", (*shape, group.value_dim))
    return AttendWork(
        queries=tensor("bf16", (*shape, group.head_dim), skip_bytes=skip_bytes),
        lengths=np.full(sequences, entries * size, np.int64),
        units=UnitPool(tensor("u8", (4096, unit_bytes_of(group, size))), group, size),
        slots=slots,
        first_block=0,
        positions=slots if ranked else None,
        span_blocks=SPAN // size,
        state=state,
        begin=True,
        block_lse=lse,
        end=FinalizeWork(state, out, block_lse=lse, block_mass=mass),
    )


def fetching(work: AttendWork) -> AttendWork:
    """The same of one sequence, which fetches what it attends first."""
    group, size = work.units.group, work.units.block_size
    assert isinstance(work.units, UnitPool)
    _, heads, entries = work.slots.shape
    places, flags = i32_table(heads, entries), tensor("u8", (heads, entries))
    lists, blocks = tensor("i32", (1, heads, entries)), BlockPool(work.units.memory, group, size)
    brought = FetchWork(
        units=work.units,
        blocks=blocks,
        chosen=places,
        chosen_slots=places,
        missing=flags,
        cache=UnitCache(places, places, places, places),
        host_slots=tensor("i32", (4096,)),
        tail_slots=i32_table(heads, 0),
        tail_positions=tensor("i32", (0,)),
        slots=places,
        positions=places,
        absent=places,
        absent_count=tensor("i32", (heads,)),
    )
    return replace(work, slots=lists, positions=lists, blocks=blocks, fetch=brought)


def check(chip: Listening, prepared: PrepareWork, work: AttendWork) -> None:
    """Launch it, and see that nothing else was launched than what is prepared."""
    enqueue_attend(chip, None, work, work.end)  # type: ignore[arg-type]
    ready = {key_of(kernel, constants) for kernel, constants in kernels_of(chip, prepared)}
    assert chip.launched
    assert chip.launched <= ready, chip.launched - ready


@pytest.fixture(autouse=True)
def _no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """What describes a pool to attend_wide asks the driver's library."""
    monkeypatch.setattr(cuda_attention, "tensor_map", lambda *numbers: bytes(128))


@pytest.mark.parametrize(("length", "rest"), [(4096 + 99, False), (4096 + 98, True), (4000, True)])
def test_what_every_row_sees_leaves_nothing_to_the_second_kernel(length: int, rest: bool) -> None:
    chip = Listening(HOPPER)
    work = attend_work(LLAMA, 16, (1, 100, 256), ranked=False, skip_bytes=0)
    enqueue_attend(chip, None, replace(work, lengths=np.array([length], np.int64)))  # type: ignore[arg-type]
    names = {cast(Any, key)[0] for key in chip.launched}
    assert names == ({"attend_wide", "attend_tile"} if rest else {"attend_wide"})


@pytest.mark.parametrize("facts", [HOPPER, AMPERE, SMALL], ids=["hopper", "ampere", "small"])
@pytest.mark.parametrize("group", [LLAMA, SMOL, FP8], ids=["llama", "smol", "e4m3"])
@pytest.mark.parametrize("ranked", [False, True], ids=["exact", "top-k"])
def test_every_size_of_a_decode_is_prepared(
    facts: tuple[tuple[int, int], int, int], group: LayerGroup, ranked: bool
) -> None:
    most = 300_000
    predictor = PredictorConfig() if ranked else None
    chip = Listening(facts)
    for sequences in (1, 2, 5, 17, 40):
        chip.launched.clear()
        prepared = PrepareWork((group,), 16, most, sequences, predictor)
        for leaves in (*range(1, 70), 127, 128, 129, 200, 1055, 1056, 1057, most // 128):
            for clusters in (0, 999):
                chip.clusters = clusters
                sizes = (sequences, 1, 8 * leaves)
                work = attend_work(group, 16, sizes, ranked=ranked, skip_bytes=0)
                enqueue_attend(chip, None, work, work.end)  # type: ignore[arg-type]
                if ranked and sequences == 1:
                    work = fetching(work)
                    enqueue_attend(chip, None, work, work.end)  # type: ignore[arg-type]
        ready = {key_of(kernel, constants) for kernel, constants in kernels_of(chip, prepared)}
        assert chip.launched <= ready, chip.launched - ready


@st.composite
def groups(draw: st.DrawFn) -> LayerGroup:
    """Any dims, often those that have kernels of their own."""
    heads = draw(st.integers(1, 9))
    dim = draw(st.sampled_from((64, 128, 128)) | st.integers(1, 32).map(lambda n: 8 * n))
    kv_dtype = draw(st.sampled_from(("", "", "e4m3")))
    value_dim = draw(st.sampled_from((dim, dim, dim, 40, 256)))
    return LayerGroup(
        1,
        heads * draw(st.integers(1, 9)),
        heads,
        dim,
        value_dim,
        dtype=draw(st.sampled_from(("bf16", "f16"))),
        window=draw(st.sampled_from((None, None, 100))),
        scale=draw(st.sampled_from((None, None, -1.0))),
        soft_cap=draw(st.sampled_from((None, None, 30.0))),
        aux_bytes=draw(st.sampled_from((0, 0, 8 if kv_dtype else 2, 16))),
        kv_dtype=kv_dtype,
    )


@given(
    facts=st.sampled_from((HOPPER, AMPERE, SMALL)),
    group=groups(),
    size=st.sampled_from((16, 16, 16, 1, 32, 256)),
    sequences=st.integers(1, 160),
    rows=st.sampled_from((1, 1, 2, 16, 17, 64, 700)),
    entries=st.integers(1, 80) | st.integers(1, 1200),
    spare=st.integers(0, 500),
    ranked=st.booleans(),
    skip_bytes=st.sampled_from((0, 0, 2, 8)),
    clusters=st.sampled_from((0, 999)),
)
def test_whatever_is_attended_is_prepared(
    facts: tuple[tuple[int, int], int, int],
    group: LayerGroup,
    size: int,
    sequences: int,
    rows: int,
    entries: int,
    spare: int,
    ranked: bool,
    skip_bytes: int,
    clusters: int,
) -> None:
    """Any dims and sizes, queries that lie anywhere, and lists shorter than the longest."""
    prepared = PrepareWork(
        (LLAMA, group),
        size,
        entries * size + spare,
        sequences + spare % 3,
        PredictorConfig() if ranked else None,
    )
    sizes = (sequences, rows, entries)
    work = attend_work(group, size, sizes, ranked=ranked, skip_bytes=skip_bytes)
    check(Listening(facts, clusters), prepared, work)
    if ranked and sequences == 1:
        check(Listening(facts, clusters), prepared, fetching(work))


@pytest.mark.parametrize("kind", ["codes", "projection", None])
@pytest.mark.parametrize("size", [8, 16])
def test_only_what_the_table_has_and_no_more_than_a_swap_needs(kind: str | None, size: int) -> None:
    predictor = None if kind is None else PredictorConfig(kind=kind)
    work = PrepareWork((LLAMA,), size, 131_072, 1, predictor)
    kernels = kernels_of(Listening(HOPPER), work)
    assert {name for name, _ in kernels} <= set(ptx.KERNELS)
    modules = {
        key_of(ptx.KERNELS[name].file, {k: str(v) for k, v in constants.items()})
        for name, constants in kernels
    }
    decodes = [constants for name, constants in kernels if name == "attend_decode"]
    # One sequence of 8 KV heads: 10 plans up to 64 leaves, one for up to 16 spans, one beyond; with
    # a predictor each of them also with logsumexps of blocks, and with these and a fetch.
    assert len(decodes) == (0 if size != 16 else 12 if kind is None else 36)
    assert not any(int(c["CLUSTER"]) > PORTABLE_CLUSTER for c in decodes)
    assert len(modules) <= 57
    assert ("attend_wide" in dict(kernels)) == (size == 16)
    assert ("select" in dict(kernels)) == (kind is not None)


@given(
    blocks=st.integers(1, 12_000),
    k=st.integers(0, 1500),
    rank=st.integers(1, 128),
    group=groups(),
    size=st.sampled_from((1, 8, 16, 64)),
)
def test_whatever_is_ranked_and_chosen_is_prepared(
    blocks: int, k: int, rank: int, group: LayerGroup, size: int
) -> None:
    chip, heads, count = Listening(HOPPER), group.kv_heads, min(k, blocks)
    places = i32_table(heads, count + 1)
    cache = UnitCache(places, places, tensor("f32", (heads, count + 1)), places)
    scores, chosen = tensor("f32", (heads, blocks)), i32_table(heads, count)
    matrix = tensor("bf16", (group.head_dim, rank))
    codes = ProjectionCodes(tensor("bf16", (blocks, heads, size, rank)), matrix, group)
    queries = tensor("bf16", (group.q_heads, group.head_dim))
    score(chip, None, ScoreWork(codes, queries, np.arange(blocks, dtype=np.int32), scores))  # type: ignore[arg-type]
    work = SelectWork(
        scores=scores,
        shares=scores,
        k=k,
        pinned=np.empty(0, np.int32),
        cache=cache,
        step=0,
        decay=0.9,
        last_chosen=None,
        last_mass=None,
        chosen=chosen,
        chosen_slots=chosen,
        missing=tensor("u8", (heads, count)),
        left_out=tensor("f32", (heads,)),
    )
    select(chip, None, work)  # type: ignore[arg-type]
    predictor = PredictorConfig(kind="projection", rank=rank)
    prepared = kernels_of(chip, PrepareWork((group,), size, blocks * size, 1, predictor))
    assert chip.launched <= {key_of(kernel, constants) for kernel, constants in prepared}


def test_short_lists_and_few_sequences_need_few() -> None:
    chip = Listening(HOPPER)
    short = kernels_of(chip, PrepareWork((LLAMA,), 16, 128, 1))
    assert len([name for name, _ in short if name == "attend_decode"]) == 1
    assert "merge_spans" not in dict(short)
    few_heads = PrepareWork((LayerGroup(1, 4, 1, 128),), 16, 131_072, 1)
    decodes = [c for name, c in kernels_of(chip, few_heads) if name == "attend_decode"]
    assert max(CLUSTERS) in {int(constants["CLUSTER"]) for constants in decodes}


def test_the_host_device_has_everything() -> None:
    with HostDevice() as device:
        device.prepare(PrepareWork((LLAMA,), 16, 1000, 1))
