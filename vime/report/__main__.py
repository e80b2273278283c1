"""`python -m vime.report RUN [--json]`: what came of a run, or how a sweep's runs compare."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from vime.config.file_kind import is_file, is_folder
from vime.errors import UserError, nearest
from vime.report.compare import compare, is_run, render_comparison, runs_in
from vime.report.render import render
from vime.report.summary import summarize
from vime.run.directory import RunDir


def main(arguments: list[str] | None = None) -> int:
    """Print the report. Exit code 0 whatever became of the run; 2 when there is no such run."""
    parser = argparse.ArgumentParser(prog="python -m vime.report", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "run", metavar="RUN", type=Path, help="a run directory, its name under runs/, or a folder of runs"
    )
    parser.add_argument("--json", action="store_true", help="print the same as one JSON object")
    options = parser.parse_args(arguments)
    try:
        folder = find_run(options.run)
    except UserError as error:
        print(f"vime.report: {error}", file=sys.stderr)
        return 2
    from rich.console import Console

    console = Console(highlight=False)
    if is_run(folder):
        summary = summarize(RunDir(folder))
        if options.json:
            print(summary.model_dump_json(indent=2, ensure_ascii=True))
        else:
            render(summary, console)
        return 0
    comparison = compare(folder)
    if options.json:
        print(comparison.model_dump_json(indent=2, ensure_ascii=True))
    else:
        render_comparison(comparison, console)
    return 0


def find_run(given: Path, root: Path = Path("runs")) -> Path:
    """The folder meant: `given` itself, or that name under `root`. Raises UserError naming the nearest one there is."""
    candidates = [given] if given.is_absolute() else [given, root / given]
    for folder in candidates:
        if is_folder(folder) and (is_run(folder) or runs_in(folder)):
            return folder
    if is_folder(given):
        raise UserError(f"{given} is neither a run directory nor a folder of them: no status.json or config.yaml in it")
    if is_file(given):
        raise UserError(f"{given} is a file; give the run's folder")
    nearby = {name: parent / name for parent in {given.parent, root} for name in _names(parent)}
    meant = nearest(given.name, nearby)
    hint = f"; did you mean {nearby[meant]}?" if meant is not None else ""
    raise UserError(f"no run at {given}{hint}")


def _names(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in folder.iterdir() if is_run(entry)]
    except (OSError, ValueError):
        return []


if __name__ == "__main__":
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)
