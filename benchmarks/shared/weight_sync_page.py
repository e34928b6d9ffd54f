"""The page of weight_sync.py: its text, its tables, and what the product promises of a weight sync."""

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

PAGE = """# What a weight sync costs

```bash
{command} --out weight_sync.md
```

That command writes this page. Every mode has a vLLM server and a trainer process of its own; a sync is one
fused AdamW step and what the bridge does to have the result served.

Model: {model}. Machine: {machine}; {load}.
Limits of the machine, in the same run: {limits}.

Median (worst) in ms; under load {clients} generations are in flight:

| mode | load | update | transfer | stall | apply | served after | MB moved |
|---|---|---|---|---|---|---|---|
{times}

`legacy` is the mode `none`, also called restart. Update: the optimizer step, part of the stall for single copy only.
Transfer: bytes travel, or files are written, and generation continues. Stall: generation is paused. Apply: the part of
it in which the weights change. Served after: from the end of update and transfer until the trainer knows that the new
version is served.

| mode | server alone | both | at the end | weights in memory files | peak extra | files, threads | requests, failed |
|---|---|---|---|---|---|---|---|
{memory}

Memory is PSS in MB over all processes of server and trainer, in which pages that several share count once; "both" is
after the first step, so with gradients and moments, and "peak extra" is what one more sync takes above that. At the
end vLLM also holds the packed copies of its weights that it makes while it generates (none beside a single copy), its
KV cache, and what else its requests have touched. The memory files hold vLLM's live weights, which a single-copy
trainer has no copy of, and the staging of a broadcast. Open files and threads are those after the first step and at
the end.

| goal | measured | limit | |
|---|---|---|---|
{goals}

Parity is the root mean square of the differences of log-probabilities between trainer and vLLM on one prompt, the
larger one of after the first and after the last sync.
Not shown: NCCL and GPUs, more than one machine.
"""

Result = dict[str, Any]  # of one mode: settings, reports, sizes
Modes = dict[str, Result]
GATHERED, DIRECT = "broadcast_2_ranks_gathered", "broadcast_2_ranks_direct"
KINDS = ("idle", "under load")  # of timed syncs
PARTS = ("update_s", "transfer_s", "stall_s", "apply_s", "served_after_s")


def written_page(described: Mapping[str, str], figures: Modes, limits: dict[str, float], parity: float) -> str:
    """The page, whole. `described` are the command, the model, the machine, its load and the clients; `parity` is the
    limit in nats.
    """
    return PAGE.format(
        **described,
        limits=", ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in limits.items()),
        times="\n".join(_times(figures)),
        memory="\n".join(_memory(figures)),
        goals="\n".join(
            f"| {what} | {measured} | {limit} | {'met' if met else '**missed**'} |"
            for what, measured, limit, met in _goals(figures, limits, parity)
        ),
    )


def _times(figures: Modes) -> Iterator[str]:
    for name, result in figures.items():
        for kind in KINDS:
            if reports := result["reports"][kind]:
                cells = " | ".join(_median_and_worst([report[part] for report in reports]) for part in PARTS)
                yield f"| {name} | {kind} | {cells} | {reports[-1]['bytes_moved'] / 1e6:.1f} |"


def _memory(figures: Modes) -> Iterator[str]:
    for name, result in figures.items():
        alone = "" if result["server_alone"] is None else f"{result['server_alone'] / 1e6:.0f}"
        extra = max(0, result["peak"] - result["steady"])
        held = " | ".join(
            f"{nbytes / 1e6:.0f}" for nbytes in (result["steady"], result["end"], result["weights"], extra)
        )
        counts = " → ".join(f"{files}, {threads}" for files, threads in result["counts"])
        yield f"| {name} | {alone} | {held} | {counts} | {result['served']}, {result['failed']} |"


def _goals(  # noqa: C901  one goal after the other
    figures: Modes, limits: dict[str, float], parity: float
) -> Iterator[tuple[str, str, str, bool]]:
    """Yield what the product promises: goal, figure (medians), limit, whether it is met."""

    def at_most(what: str, measured: float, limit: float) -> tuple[str, str, str, bool]:
        return what, f"{measured * 1e3:.1f} ms", f"{limit * 1e3:.1f} ms", measured <= limit

    def medians(mode: str, part: str) -> Iterator[tuple[str, float]]:
        for kind in KINDS:
            if mode in figures and (reports := figures[mode]["reports"][kind]):
                yield kind, statistics.median(report[part] for report in reports)

    for kind, stall in medians("broadcast", "stall_s"):
        yield at_most(f"broadcast, {kind}: stall ≤ 1.5 memcpy + 60 ms", stall, 1.5 * limits["memcpy"] + 0.060)
    for kind, stall in medians("single_copy", "stall_s"):
        yield at_most(
            f"single copy, {kind}: stall ≤ update + 60 ms",
            stall,
            dict(medians("single_copy", "update_s"))[kind] + 0.060,
        )
    if "single_copy" in figures:
        moved = sum(
            report["bytes_moved"] for reports in figures["single_copy"]["reports"].values() for report in reports
        )
        yield "single copy: bytes moved", str(moved), "0", moved == 0
    for kind, served_after in medians("lora", "served_after_s"):
        yield at_most(f"LoRA, {kind}: served after its file is written", served_after, 0.5)
    if {"legacy", "broadcast"} <= set(figures):
        ratio = dict(medians("legacy", "stall_s"))["idle"] / dict(medians("broadcast", "stall_s"))["idle"]
        yield "legacy stall / broadcast stall, idle", f"{ratio:.0f}", "at least 100", ratio >= 100
    for name, limit in {GATHERED: 2.5, DIRECT: 1.2}.items():
        if {"broadcast", name} <= set(figures):
            ratio = dict(medians(name, "transfer_s"))["idle"] / dict(medians("broadcast", "transfer_s"))["idle"]
            yield f"{name}: transfer / transfer by one rank, idle", f"{ratio:.2f}", f"at most {limit}", ratio <= limit
    for name, result in figures.items():
        yield f"{name}: parity", f"{result['parity']:.1e}", f"{parity:.0e}", result["parity"] <= parity


def _median_and_worst(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.1f} ({max(seconds) * 1e3:.1f})"
