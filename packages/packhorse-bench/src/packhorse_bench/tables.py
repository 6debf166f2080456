"""The tables of `packhorse bench encode` and `packhorse bench modes`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from packhorse.reports.tables import Table, milliseconds, rate, times

if TYPE_CHECKING:
    from packhorse_bench.encode import EncodeRow
    from packhorse_bench.kernel_profile import KernelProfile
    from packhorse_bench.modes import ModeRow


def encode_table(rows: Sequence[EncodeRow]) -> Table:
    """Measured engines; those with a problem are for `problems`."""
    columns = (
        "engine",
        "dtype",
        "order",
        "seq/s",
        "slowest to fastest",
        "tokens/s",
        "x hf sorted",
        "x hf arrival",
        "min cosine",
        "mean cosine",
    )
    return Table.of(
        columns,
        [
            (
                row.engine if row.limited else f"{row.engine} (not limited)",
                row.dtype,
                row.order,
                rate(row.sequences_per_second),
                f"{rate(row.slowest)} to {rate(row.fastest)}",
                rate(row.tokens_per_second),
                times(row.over_sorted),
                times(row.over_arrival),
                f"{row.cosine_min:.5f}",
                f"{row.cosine_mean:.5f}",
            )
            for row in rows
            if row.problem is None
        ],
    )


def kernel_table(profile: KernelProfile) -> tuple[str, Sequence[str], list[list[object]]]:
    """Title, columns and rows of the kernels of a batch."""
    ceilings = profile.ceilings
    title = (
        f"Kernels of {profile.sequences:,} sequences, {profile.tokens:,} tokens: "
        f"{profile.milliseconds:.2f} ms (copy {ceilings.bytes / 1e12:.2f} TB/s, products "
        f"{ceilings.bf16 / 1e12:.0f} TFLOP/s in bf16, {ceilings.float8 / 1e12:.0f} in float8)"
    )
    columns = ("kernel", "role", "launches", "µs each", "bound µs", "MB", "share")
    rows: list[list[object]] = [
        [
            row.name,
            row.role,
            f"{row.launches:.0f}",
            f"{row.microseconds:.1f}",
            "" if row.bound is None else f"{row.bound:.1f}",
            "" if row.megabytes is None else f"{row.megabytes:.0f}",
            f"{row.share:.1%}",
        ]
        for row in profile.rows
    ]
    return title, columns, rows


def modes_table(rows: Sequence[ModeRow]) -> Table:
    """Modes and padded peers; those with a problem are for `problems`."""
    columns = (
        "mode",
        "kernel",
        "req/s",
        "best",
        "x padded",
        "best x",
        "with packing",
        "fill",
        "max diff",
        "batch ms",
        "closed p50/p90/p99 ms",
        "open req/s",
        "open p50/p90/p99 ms",
    )
    return Table.of(
        columns,
        [
            (
                row.name,
                row.kernel or "-",
                rate(row.throughput),
                rate(row.best_throughput),
                times(row.ratio_to_padded),
                times(row.best_ratio_to_padded),
                rate(row.throughput_with_packing),
                f"{row.fill:.1%}",
                f"{row.largest_difference:.1e}",
                milliseconds(row.batch_ms),
                milliseconds(row.p50_ms, row.p90_ms, row.p99_ms),
                "-" if row.open_rate is None else rate(row.open_rate),
                milliseconds(row.open_p50_ms, row.open_p90_ms, row.open_p99_ms),
            )
            for row in rows
            if row.problem is None
        ],
    )
