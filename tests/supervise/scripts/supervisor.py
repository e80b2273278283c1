"""The real supervisor with the commands of commands-ALGORITHM.json beside the run.

The file holds [[role, rank, world size, finishes, argv], ...].
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from vime.config import Config
from vime.plan.plan import Plan
from vime.supervise.commands import Command
from vime.supervise.supervisor import main

ROLE = str(Path(__file__).with_name("role.py"))


def commands(config: Config, plan: Plan) -> Sequence[Command]:
    table = json.loads((Path(sys.argv[1]).parent / f"commands-{config.algorithm.name}.json").read_text())
    return [
        Command(role, rank, size, (sys.executable, "-S", ROLE, *argv), finishes)
        for role, rank, size, finishes, argv in table
    ]


if __name__ == "__main__":
    main(sys.argv[1:], commands)
