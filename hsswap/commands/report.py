"""What a run did, as a JSON object and as a table for people."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hsswap.commands.decoding import Run, Speculated, must_read_blocks
from hsswap.commands.planning import Plan
from hsswap.commands.verify import VerifySummary
from hsswap.commands.words import size
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
            group.layers * group.kv_heads * group.token_bytes
            for group in self.plan.config.dims.groups
        )

    @property
    def kv_dtype(self) -> str:
        """What K and V are kept as."""
        return self.plan.config.dims.groups[0].kv_dtype

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

    @property
    def share_of_slots(self) -> str:
        """What part of the cache the slots can hold, in words."""
        config = self.plan.config
        if must_read_blocks(config, self.run.context_tokens) == 0:
            return "the whole cache fits"
        share = (self.device_slot_bytes + self.host_slot_bytes) / self.kv_bytes
        return f"{share:.1%} of the cache"

    def as_json(self) -> dict[str, object]:
        """The object that ``--json`` prints; null where there is nothing to say, or it was NaN."""
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
            "read_overlap": statistics.read_overlap if statistics.bytes_read else None,
            "left_out_mass": run.left_out_mean,
            "path": statistics.path,
            "kv_dtype": self.kv_dtype,
            "kv_rounding": None if self.verified is None else self.verified.rounding,
            "mode": "exact" if self.plan.top_k is None else "topk",
            "k": None if self.plan.top_k is None else self.plan.top_k.k,
            "model": self.model_name,
            "prefill_s": run.prefill_s,
            "prefix_tokens": run.prefix_tokens,
            "verified_calls": None if self.verified is None else self.verified.calls,
            "speculate": None if run.speculated is None else run.speculated.drafter,
            "acceptance": None if run.speculated is None else run.speculated.acceptance.share,
            "tokens_per_round": None
            if run.speculated is None
            else run.speculated.acceptance.tokens_a_round,
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
        rows = [
            ("model", self.model_name),
            ("context", f"{run.prompt_tokens} prompt tokens, {len(run.tokens)} generated"),
            ("mode", mode + ("" if config.look_ahead else ", look-ahead off")),
            ("KV cache", f"{size(self.kv_bytes)}, {self.kv_dtype}"),
            (
                "slots",
                f"{size(slot_bytes)} ({config.device_slots} device, {config.host_slots} host): "
                f"{self.share_of_slots}",
            ),
        ]
        if self.plan.top_k is not None:
            share = config.code_bytes / self.kv_bytes
            rows.append(
                (
                    "codes",
                    f"{size(config.code_bytes)} in device memory, beside the slots: {share:.1%} "
                    "of the cache",
                )
            )
        return rows

    def _speed(self) -> list[tuple[str, str]]:
        run = self.run
        rows = run.prompt_tokens - run.prefix_tokens
        rate = rows / run.prefill_s if run.prefill_s > 0.0 else 0.0
        note = "" if self.verified is None else ", verification not counted"
        stored = f", {run.prefix_tokens} tokens were stored" if run.prefix_tokens else ""
        return [
            ("prefill", f"{run.prefill_s:.2f} s, {rate:.0f} tokens/s{stored}{note}"),
            (
                "decode",
                f"{run.tokens_per_s:.1f} tokens/s{note}{self._learning()}" if run.steps else "-",
            ),
            *([] if run.speculated is None else [("speculation", _speculation(run.speculated))]),
        ]

    def _learning(self) -> str:
        """Of top-k, what the first step took, which learns from the prompt."""
        first, *others = (step.seconds for step in self.run.steps)
        if self.plan.top_k is None or sum(others) == 0.0:
            return ""
        rate = len(others) / sum(others)
        return f"; the first took {first:.1f} s, in which top-k learns, then {rate:.1f} tokens/s"

    def _reads(self) -> list[tuple[str, str]]:
        run, statistics = self.run, self.statistics
        wait = "nothing was read"
        if statistics.bytes_read:
            wait = (
                f"{statistics.read_wait_s:.2f} s, prefill included; {statistics.read_overlap:.0%} "
                "of the time that reads took was overlapped"
            )
        read_written = f"{size(statistics.bytes_read)}, {size(statistics.bytes_written)}"
        rows = [
            ("read, written", f"{read_written}, prefill included"),
            ("least to read", self._least_to_read()),
            ("decode hits", self._decode_hits()),
            ("read wait", wait),
            ("path", statistics.path),
        ]
        if statistics.write_errors:
            rows.append(("write errors", f"{statistics.write_errors} blocks stayed in memory"))
        if self.plan.top_k is not None:
            left_out = f"{run.left_out_mean:.4f} on average, {run.left_out_max:.4f} at most"
            rows.append(("mass left out", f"{left_out} (predicted)"))
        return rows

    def _least_to_read(self) -> str:
        least = self.run.must_read_bytes
        if not least:
            return "nothing in exact mode"
        compare = "" if self.plan.top_k is None else ", for comparison"
        ratio = self.statistics.bytes_read / least
        return f"{size(least)} in exact mode{compare} ({ratio:.2f} times that was read)"

    def _decode_hits(self) -> str:
        steps = self.run.steps
        resident, ahead = sum(s.resident for s in steps), sum(s.ahead for s in steps)
        waited = sum(s.waited for s in steps)
        total = resident + ahead + waited
        if not total:
            return "-"
        return (
            f"{(resident + ahead) / total:.1%} of {total} blocks: {resident} in slots, "
            f"{ahead} read ahead; {waited} waited for"
        )

    def _proof(self) -> list[tuple[str, str]]:
        verified = self.verified
        if verified is None:
            return [("verified", "no; --verify compares every attention output with float64")]
        broken = "" if verified.failures == 0 else ": BROKEN"
        rows = [
            (
                "largest error",
                f"{verified.max_error:.2e} of float64's, {verified.bound_at_max:.2e} allowed "
                f"(1.5 times a usual kernel's){broken}",
            ),
            (
                "verified",
                f"{verified.calls - verified.failures} of {verified.calls} attention calls, "
                f"{verified.rows} rows of all layers",
            ),
        ]
        if verified.rounding:
            rows.append(
                (
                    f"kept as {self.kv_dtype}",
                    f"off by {verified.rounding:.2e} of K and V: the price of half of the bytes",
                )
            )
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


def _speculation(speculated: Speculated) -> str:
    """How drafts fared, in words."""
    fared = speculated.acceptance
    rounds = f"{speculated.rounds} rounds a burst"
    if speculated.why:
        rounds = f"1 round a burst, as {speculated.why}"
    return (
        f"{speculated.drafter}, {speculated.k} drafts: {fared.accepted} of {fared.drafted} "
        f"accepted, {fared.tokens_a_round:.2f} tokens a round; {rounds}"
    )
