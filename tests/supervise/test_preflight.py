from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from vime.supervise import preflight_node
from vime.supervise.preflight import NodeProblem, shared_fault, skewed, unequal
from vime.supervise.preflight_node import NodeReport, look, read_node_report
from vime.supervise.step_rank import INTERFACE


def _environ(folder: Path, checks: str, **more: str) -> dict[str, str]:
    return {
        preflight_node.CHECKS: checks,
        preflight_node.FOLDER: str(folder),
        INTERFACE: "lo",
        "SLURMD_NODENAME": "n1",
        "PATH": os.environ["PATH"],
        **more,
    }


def test_a_good_node_has_no_problems_and_says_its_versions(tmp_path: Path) -> None:
    (tmp_path / preflight_node.ASKED).write_text("token")
    report = look(_environ(tmp_path, "gpus,nvlink,files,ports,versions,clock"))
    assert (report.node, report.problems) == ("n1", [])
    assert report.versions["submitit"].count(".") == 2
    assert abs(report.time - time.time()) < 5
    assert (tmp_path / "n1.txt").read_text() == "token"
    assert read_node_report(report.line()) == report
    assert read_node_report("srun: error: something else") is None
    assert read_node_report(f"{preflight_node.PREFIX}{{") is None


def test_only_the_checks_that_are_asked_for_are_made(tmp_path: Path) -> None:
    report = look(_environ(tmp_path, "ports"))
    assert (report.problems, report.versions, list(tmp_path.iterdir())) == ([], {}, [])


def test_what_is_wrong_with_a_node_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight_node, "FILE_TIMEOUT", 0.3)
    environ = _environ(tmp_path, "gpus,files,ports", **{preflight_node.GPUS: "4", "PATH": "", INTERFACE: "nope0"})
    monkeypatch.setenv("PATH", str(tmp_path))
    files, ports = look(environ).problems
    assert look(environ).unchecked == ["gpus: nvidia-smi is not there"]
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert look(environ).problems[0] == "gpus: nvidia-smi does not answer; 4 GPUs are wanted"
    assert files.endswith("supervisor.txt, which the supervisor wrote, did not show within 0.3 s")
    assert "cluster.interface=nope0 has no IPv4 address" in ports


def _nvidia_smi(folder: Path, gpus: int, busy: str) -> None:
    script = folder / "nvidia-smi"
    script.write_text(
        "#!/bin/sh\ncase $1 in\n"
        f"--query-gpu*) for i in $(seq {gpus}); do echo $i, H200; done;;\n"
        f"--query-compute*) printf '{busy}';;\n"
        "nvlink) echo 'Link 0: 26.5 GB/s'; echo 'Link 1: <inactive>';;\nesac\n"
    )
    script.chmod(0o755)


def test_gpus_that_are_missing_or_taken_and_links_that_are_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    _nvidia_smi(tmp_path, 3, "4711, 1024 MiB")
    problems = look(_environ(tmp_path, "gpus,nvlink", **{preflight_node.GPUS: "4"})).problems
    assert problems == [
        "gpus: 3 GPUs of the 4 wanted",
        "gpus: GPUs are used by other processes: 4711, 1024 MiB",
        "nvlink: 1 NVLinks are inactive: Link 1: <inactive>",
    ]
    _nvidia_smi(tmp_path, 4, "")
    assert look(_environ(tmp_path, "gpus", **{preflight_node.GPUS: "4"})).problems == []


def test_the_node_that_differs_is_named() -> None:
    reports = {
        name: NodeReport(name, [], [], {"torch": version, **extra})
        for name, version, extra in (("a", "2.1", {}), ("b", "2.1", {}), ("c", "2.0", {"vllm": "1"}))
    }
    assert unequal(reports) == [
        NodeProblem("c", "versions: torch is 2.0, elsewhere 2.1"),
        NodeProblem("c", "versions: vllm is 1, elsewhere none"),
    ]
    assert skewed({"a": -0.2, "b": 70.0, "c": -40.0}, 10) == [
        NodeProblem("b", "clock: 70 s ahead of the supervisor's node"),
        NodeProblem("c", "clock: 40 s behind the supervisor's node"),
    ]


HOSTS = {"trainer": ("t0", "t1", "t2", "t3"), "rollout": ("r0",)}


@pytest.mark.parametrize(
    ("nodes", "fault"),
    [
        (("t0", "t2", "t3"), "3 of 4 nodes of the trainer component: ports: eth0 has no IPv4 address on t0"),
        (("t0", "t1", "t2", "r0"), "3 of 4 nodes of the trainer component: ports: eth0 has no IPv4 address on t0"),
        (("t0", "t1"), None),
        (("r0",), None),
        (("t0", "t1", "r0"), "3 of 5 nodes of the job: ports: eth0 has no IPv4 address on t0"),
    ],
)
def test_what_most_nodes_have_wrong_is_the_run_s(nodes: tuple[str, ...], fault: str | None) -> None:
    problems = [NodeProblem(node, f"ports: eth0 has no IPv4 address on {node}") for node in nodes]
    assert shared_fault([*problems, NodeProblem("t1", "clock: 40 s behind")], HOSTS) == fault
