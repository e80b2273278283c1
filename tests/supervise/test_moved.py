"""A job that was submitted before modules moved starts again: its pickle and its plan name the old ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.supervise.job import REPOSITORY, config_in
from vime.plan.plan import Plan, make_plan
from vime.run.directory import RunDir
from vime.supervise.lifecycle import prepare

WAS = {
    "vime.supervise.supervisor": "vime.launch.supervisor",
    "vime.training.trainer": "vime.training.main",
    "vime.rollout.engine.engine": "vime.rollout.engine",
    "vime.rollout.router.router": "vime.rollout.router",
}
"""Where programs are -> where they were."""
# What pickle wrote for Guard(supervisor=(python, "-m", "vime.launch.supervisor")) when Guard was in vime.launch too.
PICKLE = "cvime.launch.guardian\nGuard\n)\x81}}Vsupervisor\n(V{python}\nV-m\nVvime.launch.supervisor\ntsb."
LOAD_AND_CALL = "import pickle, sys; pickle.load(sys.stdin.buffer)(sys.argv[1])"  # as submitit does


def as_before(plan: Plan) -> dict[str, Any]:
    """plan.json as it was written: the old modules, and `part` for the node of an engine."""
    data = json.loads(plan.model_dump_json())
    for role in data["roles"]:
        role["module"] = WAS.get(role["module"], role["module"])
        for process in role["processes"]:
            process["part"] = process.pop("engine_node")
    return data


def test_an_old_plan_says_where_the_programs_are_now(tmp_path: Path) -> None:
    plan = make_plan(config_in(tmp_path, "rollout.engines=2"))
    engine = plan.role("engine")
    assert engine is not None
    spanning = engine.model_copy(
        update={
            "processes": tuple(
                one.model_copy(update={"engine_node": node}) for node, one in enumerate(engine.processes)
            )
        }
    )
    plan = plan.model_copy(update={"roles": tuple(spanning if role is engine else role for role in plan.roles)})
    before = as_before(plan)
    assert {role["module"] for role in before["roles"]} >= set(WAS.values())
    assert [process["part"] for process in before["roles"][2]["processes"]] == [0, 1]
    assert Plan.model_validate_json(json.dumps(before)) == plan


def test_an_old_job_starts_the_programs_where_they_are_now(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    prepare(run, config, make_plan(config))
    before = as_before(make_plan(config))
    supervisor, trainer = before["roles"][:2]
    trainer["module"] = "vime.rollout.engine"  # it reads the model folder sooner than the trainer's program does
    before["roles"] = [supervisor, trainer]
    run.plan.write_text(json.dumps(before))
    done = subprocess.run(
        [sys.executable, "-c", LOAD_AND_CALL, str(run.path)],
        input=PICKLE.format(python=sys.executable).encode("latin-1"),
        cwd=REPOSITORY,
        capture_output=True,
        timeout=120,
        check=False,
    )
    # The folder in place of a model is empty, so the program ends; but it was found, and it looked there.
    assert b"RunEnded" in done.stderr, done.stderr.decode()
    status = run.read_status()
    assert status.failure is not None, run.log("supervisor", 0, 1).read_text()
    assert (status.state, status.failure.role) == ("failed", "trainer"), status
    assert "config.json" in "\n".join(status.failure.tail)
