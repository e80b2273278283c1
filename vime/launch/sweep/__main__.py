"""`python -m vime.launch.sweep SWEEP.yaml [cluster=NAME] [recipe=NAME] [dotted.key=value ...]` shows a sweep.

It prints the sbatch command for it as a job array (`vime.launch.sweep.array`). With `--task N` it makes task N ready
inside its allocation and prints the script to go on with; sbatch/sweep.sbatch does that.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from vime.errors import UserError
from vime.launch.arguments import OptionParser, read_settings
from vime.launch.sweep.array import LAYOUT, array_command, array_tasks, prepare_task
from vime.launch.sweep.file import read_sweep
from vime.launch.sweep.members import members, show


def main(arguments: Sequence[str]) -> int:
    """See the module. Exit code 2 when the input is wrong."""
    parser = OptionParser()
    parser.add_argument("--task", nargs="?", const="")
    try:
        options, rest = parser.read(arguments)
        given = read_settings(rest, ("cluster", "recipe", "sweep.parallel"))
        names = given.names
        task = None if options.task is None else _number("--task", options.task)
        parallel = _number("sweep.parallel", names["sweep.parallel"]) if "sweep.parallel" in names else None
        if not given.words:
            raise UserError("the sweep's file is missing")
        if len(given.words) > 1:
            raise UserError(f"{given.words[1]!r} is not dotted.key=value")
        sweep = read_sweep(Path(given.words[0]), names.get("cluster"), names.get("recipe"), given.overrides)
        if task is not None:
            script = prepare_task(sweep, task, os.environ, rest)
            if script is not None:
                print(script)
            return 0
        found = members(sweep, LAYOUT)
        show(found, Console(highlight=False))
        if found[0].config.cluster.scheduler == "slurm":
            again = [argument for argument in rest if not argument.startswith("sweep.parallel=")]
            print(shlex.join(array_command(found, array_tasks(found, parallel or sweep.parallel), again)))
    except UserError as error:
        print(f"vime.launch.sweep: {error}", file=sys.stderr)
        return 2
    return 0


def _number(what: str, text: str) -> int:
    with contextlib.suppress(ValueError):
        return int(text)
    raise UserError(f"{what} needs a whole number, not {text!r}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
