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

from vime.config.compose import refuse_repeated
from vime.errors import UserError
from vime.launch.sweep.array import LAYOUT, array_command, array_tasks, prepare_task
from vime.launch.sweep.file import read_sweep
from vime.launch.sweep.members import members, show


def main(arguments: Sequence[str]) -> int:
    """See the module. Exit code 2 when the input is wrong."""
    names: dict[str, str] = {}
    given: list[str] = []
    task: int | None = None
    parallel: int | None = None
    remaining = iter(arguments)
    try:
        for argument in remaining:
            key, equals, value = argument.partition("=")
            if argument == "--task":
                task = _number("--task", next(remaining, ""))
            elif argument.startswith("-"):
                raise UserError(f"unknown option {argument}")
            elif not equals and "file" not in names:
                names["file"] = argument
            elif key in ("cluster", "recipe"):
                names[key] = value
            elif key == "sweep.parallel":
                parallel = _number(key, value)
            elif equals:
                given.append(argument)
            else:
                raise UserError(f"{argument!r} is not dotted.key=value")
        if "file" not in names:
            raise UserError("the sweep's file is missing")
        refuse_repeated(given)
        sweep = read_sweep(Path(names["file"]), names.get("cluster"), names.get("recipe"), given)
        if task is not None:
            script = prepare_task(sweep, task, os.environ, _without_task(arguments))
            if script is not None:
                print(script)
            return 0
        found = members(sweep, LAYOUT)
        show(found, Console(highlight=False))
        if found[0].config.cluster.scheduler == "slurm":
            given = [argument for argument in arguments if not argument.startswith("sweep.")]
            print(shlex.join(array_command(found, array_tasks(found, parallel or sweep.parallel), given)))
    except UserError as error:
        print(f"vime.launch.sweep: {error}", file=sys.stderr)
        return 2
    return 0


def _without_task(arguments: Sequence[str]) -> list[str]:
    """The arguments that a person gave to sweep.sbatch."""
    at = arguments.index("--task")
    return [*arguments[:at], *arguments[at + 2 :]]


def _number(what: str, text: str) -> int:
    with contextlib.suppress(ValueError):
        return int(text)
    raise UserError(f"{what} needs a whole number, not {text!r}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
