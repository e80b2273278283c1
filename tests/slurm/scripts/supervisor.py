"""The real supervisor with the programs of programs.json beside the run: {role: [arguments of role.py, ...]}."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

# A job has none of its submitter's PYTHONPATH: this checkout's vime, whichever is installed.
sys.path.insert(0, str(Path(__file__).parents[3]))

from vime.config import Config
from vime.plan.plan import Plan
from vime.slurm.allocation import Allocation
from vime.supervise.commands import Command, step_commands
from vime.supervise.supervisor import main

SLURM = Path(__file__).with_name("role.py")
LOCAL = Path(__file__).parents[2] / "supervise" / "scripts" / "role.py"


def commands(config: Config, plan: Plan) -> Sequence[Command]:
    table = json.loads((Path(sys.argv[1]).parent / "programs.json").read_text())
    programs = {
        role: (sys.executable, str(SLURM), *argv) if argv[0] == "train" else (sys.executable, "-S", str(LOCAL), *argv)
        for role, argv in table.items()
    }
    return step_commands(config, plan, Allocation.from_environment(os.environ, plan), programs)


if __name__ == "__main__":
    main(sys.argv[1:], commands)
