"""A swap in one record, for a log line every so often."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hsswap.metrics import SwapStatistics
from hsswap.tiers import SlotState

if TYPE_CHECKING:
    from hsswap.swap import HighSpeedSwap


@dataclass(frozen=True, slots=True)
class DiagnosticSummary:
    """Over all layers and sequences, at one moment.

    ``active_disk_blocks`` of ``disk_block_capacity`` ids are held, ``kept_blocks`` more are there
    to be found by their prefix. ``scratch_pool_resident`` device slots hold something,
    ``scratch_pool_free`` do not. ``host_slots`` counts the host tier's slots by state. Now under
    way: ``callers_waiting`` for slots, ``reads_in_flight`` (submissions), ``writes_pending``
    (blocks). Since the start: ``io_errors`` of blocks, ``checksum_failures`` among them, and
    ``statistics``. ``left_out_mass_mean``: the predicted attention mass that top-k left out, a head
    and step on average; None before the first. ``device``, ``path`` and ``path_reason`` say what
    runs where, and why when ``io`` was ``"auto"``.
    """

    num_layers: int
    sequences: int
    active_disk_blocks: int
    disk_block_capacity: int
    kept_blocks: int
    scratch_pool_resident: int
    scratch_pool_free: int
    host_slots: dict[str, int]
    callers_waiting: int
    reads_in_flight: int
    writes_pending: int
    io_errors: int
    checksum_failures: int
    left_out_mass_mean: float | None
    device: str
    path: str
    path_reason: str
    statistics: SwapStatistics


def summary_of(swap: HighSpeedSwap) -> DiagnosticSummary:
    """Take stock. From any thread."""
    with swap.lock:
        statistics, store = swap.statistics(), swap.store_statistics()
        counters = swap.counters
        states = [pool.tier.state for pool in swap.pool]
        steps = counters.top_k_attends
        return DiagnosticSummary(
            num_layers=swap.config.dims.layers,
            sequences=swap.sequence_count,
            active_disk_blocks=swap.config.capacity_blocks - statistics.free_blocks,
            disk_block_capacity=swap.config.capacity_blocks,
            kept_blocks=store.kept_blocks,
            scratch_pool_resident=statistics.device_slots_used,
            scratch_pool_free=sum(pool.slots.free_count for pool in swap.pool),
            host_slots={
                state.name.lower(): sum(int((each == state).sum()) for each in states)
                for state in SlotState
            },
            callers_waiting=swap.prefetcher.waiting_count,
            reads_in_flight=swap.prefetcher.reading_count,
            writes_pending=swap.writes.pending,
            io_errors=store.errors,
            checksum_failures=store.checksum_failures,
            left_out_mass_mean=counters.left_out_mass / steps if steps else None,
            device=swap.device.name,
            path=statistics.path,
            path_reason=swap.path_reason,
            statistics=statistics,
        )
