"""`python -m benchmarks.initial_policy RECIPE FOLDER`: make the policy that the recipe starts from, print its folder.

A process of its own, because it blocks signals as a supervisor does.
"""

from __future__ import annotations

import sys
from pathlib import Path

from vime.config.compose import compose
from vime.run.directory import RunDir
from vime.supervise.stop_signals import StopSignals
from vime.supervise.supervisor import initial_policy

if __name__ == "__main__":
    signals = StopSignals()
    recipe, folder = sys.argv[1:]
    run = RunDir.create(Path(folder), "initial", recipe)
    print(initial_policy(compose("local", recipe), run, signals))
