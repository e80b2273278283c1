"""`python -m benchmarks [NAME ...] [--json]`: measure, and print each ratio beside its aim.

Every ratio is against a limit or a peer that is measured in the same run, taking turns with vime, so that other work on
the machine slows both. A missed aim is shown, and does not change the exit code: a busy machine is no failure.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from importlib import import_module
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.row import Row
from vime.supervise.commands import thread_counts

NAMES = ("training_step", "rollout", "weight_transfer", "logprob_memory", "buffer", "trl", "routes", "routing_replay")
QUIET = {
    "PYTHONWARNINGS": "ignore",  # Megatron-core says in every process that it runs without Apex
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TOKENIZERS_PARALLELISM": "false",
}
BUSY = 0.5
"""Load average a core from which other work is worth a remark."""


def main() -> int:
    """Run the named benchmarks, all by default."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--json", action="store_true", help="print what was measured as JSON instead of a table")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in NAMES]
    if unknown:
        parser.error(f"there is no benchmark {unknown[0]!r}; there are {', '.join(NAMES)}")
    # This process does what a generator does, with a generator's one thread. Set before torch is imported.
    os.environ.update(QUIET | thread_counts(None))
    notes = Console(stderr=True)
    machine = {"cores": len(os.sched_getaffinity(0)), "load_before": os.getloadavg()[0]}
    results: dict[str, Any] = {}
    lines: dict[str, list[Row]] = {}
    remarks: dict[str, tuple[str, ...]] = {}
    for name in arguments.names or NAMES:
        notes.print(f"[dim]{name} ...[/dim]")
        started = time.monotonic()
        module = import_module(f"benchmarks.{name}")
        measured = module.measure()
        seconds = time.monotonic() - started
        results[name] = {"benchmark_seconds": round(seconds, 1), "measured": measured}
        lines[name] = module.rows(measured)
        remarks[name] = getattr(module, "NOTES", ())
        notes.print(f"[dim]{name}: {seconds:.0f} s[/dim]")
    if arguments.json:
        print(json.dumps({"machine": machine, "benchmarks": results}, indent=2))
        return 0
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(_table(lines, {name: result["benchmark_seconds"] for name, result in results.items()}))
    for name, texts in remarks.items():
        for text in texts:
            console.print(f"{name}: {text}.")
    console.print("A ratio above 1 is faster than the limit, or for memory larger. Speeds are medians of turns taken.")
    if machine["load_before"] > BUSY * machine["cores"]:
        console.print(
            f"The machine was busy: load average {machine['load_before']:.1f} on {machine['cores']} cores before."
            " Ratios hold up better than speeds."
        )
    return 0


def _table(lines: dict[str, list[Row]], seconds: dict[str, float]) -> Table:
    table = Table(title="vime against limits measured in the same run", title_justify="left")
    for column in ("benchmark", "what", "vime", "limit"):
        table.add_column(column, overflow="fold")
    for column in ("ratio", "aim"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, rows in lines.items():
        for i, row in enumerate(rows):
            style = {True: "green", False: "bold red", None: ""}[row.met]
            first = f"{name}\n[dim]{seconds[name]:.0f} s[/dim]" if i == 0 else ""
            ratio = f"{row.ratio:.3g}"
            cells = (first, row.what, row.ours, row.limit, f"[{style}]{ratio}[/]" if style else ratio, row.aim)
            table.add_row(*cells, end_section=i == len(rows) - 1)
    return table


if __name__ == "__main__":
    sys.exit(main())
