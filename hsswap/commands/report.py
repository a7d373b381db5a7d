"""What a run did, as a JSON object and as a table for people."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hsswap.commands.decoding import Run
from hsswap.commands.planning import Plan
from hsswap.commands.verify import VerifySummary
from hsswap.config import BF16_BYTES
from hsswap.metrics import SwapStatistics


@dataclass(frozen=True, slots=True)
class Report:
    """A finished run. ``verified`` and ``tokens_agree`` are None without ``--verify``."""

    model_name: str
    text: str
    run: Run
    plan: Plan
    statistics: SwapStatistics
    verified: VerifySummary | None = None
    tokens_agree: int | None = None

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V of the whole context."""
        return self.run.context_tokens * sum(
            group.layers * group.kv_heads * (group.head_dim + group.value_dim) * BF16_BYTES
            for group in self.plan.config.dims.groups
        )

    @property
    def device_slot_bytes(self) -> int:
        """Bytes of K and V that device slots hold."""
        config, dims = self.plan.config, self.plan.config.dims
        return sum(
            config.device_slots_of(index) * group.kv_heads * dims.unit_bytes(group)
            for index, group in enumerate(dims.groups)
        )

    @property
    def host_slot_bytes(self) -> int:
        """Bytes of the host slots."""
        config, dims = self.plan.config, self.plan.config.dims
        return sum(
            config.host_slots_of(index) * dims.block_bytes(group)
            for index, group in enumerate(dims.groups)
        )

    def as_json(self) -> dict[str, object]:
        """The object that ``--json`` prints; null where nothing was verified, or it was NaN."""
        run, statistics = self.run, self.statistics
        error = None if self.verified is None else self.verified.max_error
        return {
            "text": self.text,
            "tokens": len(run.tokens),
            "tokens_agree": self.tokens_agree,
            "max_rel_err": error if error is not None and math.isfinite(error) else None,
            "tokens_per_s": run.tokens_per_s,
            "context_tokens": run.context_tokens,
            "kv_bytes": self.kv_bytes,
            "slot_bytes": self.device_slot_bytes + self.host_slot_bytes,
            "bytes_read": statistics.bytes_read,
            "bytes_written": statistics.bytes_written,
            "hits": statistics.device_hits + statistics.host_hits,
            "misses": statistics.misses,
            "read_wait_s": statistics.read_wait_s,
            "read_overlap": statistics.read_overlap,
            "left_out_mass": run.left_out_mean,
            "path": statistics.path,
        }

    def as_table(self) -> str:
        """The closing table, one fact a line."""
        rows = [*self._sizes(), *self._speed(), *self._reads(), *self._proof()]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)

    def _sizes(self) -> list[tuple[str, str]]:
        run, config = self.run, self.plan.config
        slot_bytes = self.device_slot_bytes + self.host_slot_bytes
        mode = "exact"
        if self.plan.top_k is not None:
            mode = f"topk, k = {self.plan.top_k.k} blocks a KV head"
        return [
            ("model", self.model_name),
            ("context", f"{run.prompt_tokens} prompt tokens, {len(run.tokens)} generated"),
            ("mode", mode + ("" if config.look_ahead else ", look-ahead off")),
            ("KV cache", _size(self.kv_bytes)),
            (
                "slots",
                f"{_size(slot_bytes)} ({config.device_slots} device, {config.host_slots} host): "
                f"{slot_bytes / self.kv_bytes:.1%} of the cache",
            ),
        ]

    def _speed(self) -> list[tuple[str, str]]:
        run = self.run
        rate = run.prompt_tokens / run.prefill_s if run.prefill_s > 0.0 else 0.0
        note = "" if self.verified is None else ", verification not counted"
        return [
            ("prefill", f"{run.prefill_s:.2f} s, {rate:.0f} tokens/s{note}"),
            ("decode", f"{run.tokens_per_s:.1f} tokens/s{note}"),
        ]

    def _reads(self) -> list[tuple[str, str]]:
        run, statistics = self.run, self.statistics
        hits = statistics.device_hits + statistics.host_hits
        total = hits + statistics.misses
        share = f"{hits / total:.1%}" if total else "-"
        rows = [
            ("read, written", f"{_size(statistics.bytes_read)}, {_size(statistics.bytes_written)}"),
            (
                "exact must read",
                f"{_size(run.must_read_bytes)}: in every pass all full blocks less one a slot"
                + _ratio(statistics.bytes_read, run.must_read_bytes),
            ),
            ("hits, misses", f"{hits}, {statistics.misses} ({share} hits, in blocks)"),
            (
                "read wait",
                f"{statistics.read_wait_s:.2f} s; {statistics.read_overlap:.0%} of the time that "
                "reads took was overlapped",
            ),
            ("path", statistics.path),
        ]
        if statistics.write_errors:
            rows.append(("write errors", f"{statistics.write_errors} blocks stayed in memory"))
        if self.plan.top_k is not None:
            left_out = f"{run.left_out_mean:.4f} on average, {run.left_out_max:.4f} at most"
            rows.append(("mass left out", f"{left_out} (predicted)"))
        return rows

    def _proof(self) -> list[tuple[str, str]]:
        verified = self.verified
        if verified is None:
            return [("verified", "no; --verify compares every attention output with float64")]
        within = "within" if verified.failures == 0 else "BEYOND"
        rows = [
            (
                "largest error",
                f"{verified.max_error:.2e} against float64, {within} promise 1 "
                f"(at most {verified.bound_at_max:.2e})",
            ),
            (
                "verified",
                f"{verified.calls - verified.failures} of {verified.calls} attention calls, "
                f"{verified.rows} rows of all layers",
            ),
        ]
        if verified.max_against_dense is not None:
            rows.append(
                (
                    "against dense",
                    f"{verified.max_against_dense:.2e} at most: the price of leaving blocks out",
                )
            )
        if self.tokens_agree is not None:
            rows.append(
                (
                    "tokens agree",
                    f"{self.tokens_agree} of {len(self.run.tokens)} with plain attention",
                )
            )
        return rows


def _ratio(bytes_read: int, must_read: int) -> str:
    return f" (read {bytes_read / must_read:.2f} times that)" if must_read else ""


def _size(nbytes: int) -> str:
    """Bytes for people, in powers of 1,024."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"
