"""The command `python -m vime.report`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.report.run_maker import make_completed, make_failed, make_run
from vime.report.__main__ import main
from vime.report.compare import Comparison
from vime.report.summary import Summary
from vime.run.directory import RunDir

REPOSITORY = Path(__file__).parents[2]


def test_exit_code_is_0_whatever_became_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(make_failed(tmp_path).path)]) == 0
    assert "was ended by SIGKILL" in capsys.readouterr().out


def test_json_is_the_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_completed(tmp_path)
    assert main([str(run.path), "--json"]) == 0
    summary = Summary.model_validate_json(capsys.readouterr().out)
    assert (summary.run, summary.steps.done) == (run.path.name, 60)


def test_a_typo_gets_one_line_with_the_nearest_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path)
    assert main([str(tmp_path / "tiny_grpo-20261129-194308-1a2c")]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == f"vime.report: no run at {run.path.parent / run.path.name[:-1]}c; did you mean {run.path}?\n"


def test_no_run_folder_and_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.touch()
    assert main([str(tmp_path)]) == 2
    assert main([str(file)]) == 2
    assert main([str(tmp_path / "a" / "b")]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert [e.split(": ", 1)[1] for e in errors] == [
        f"{tmp_path} is neither a run directory nor a folder of them: no status.json or config.yaml in it",
        f"{file} is a file; give the run's folder",
        f"no run at {tmp_path / 'a' / 'b'}",
    ]


def test_a_name_is_looked_up_below_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "runs", name="mine")
    monkeypatch.chdir(tmp_path)
    assert main(["mine"]) == 0
    assert main(["mime"]) == 2
    assert capsys.readouterr().err == "vime.report: no run at mime; did you mean runs/mine?\n"


def test_a_sweep_is_compared_best_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_completed(tmp_path, name="b", learning_rate="1.0e-3")
    make_failed(tmp_path, name="c", learning_rate="1.0e-2")
    make_completed(tmp_path, name="a", learning_rate="5.0e-4")
    make_run(tmp_path, name="d", learning_rate="1.0e-4")
    evaluation = {"event": "evaluation", "version": 80, "accuracy": 0.9, "dataset": "chain_sum", "samples": 128}
    RunDir(tmp_path / "b").events.open("a").write(json.dumps(evaluation) + "\n")

    assert main([str(tmp_path), "--json"]) == 0
    comparison = Comparison.model_validate_json(capsys.readouterr().out)
    assert comparison.varied == ["training.learning_rate"]
    assert [(row.summary.run, row.settings["training.learning_rate"]) for row in comparison.runs] == [
        ("b", 1e-3),
        ("a", 5e-4),
        ("c", 1e-2),
        ("d", 1e-4),
    ]

    assert main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["run", "learning_rate", "held-out", "reward", "steps", "state"]
    assert lines[3].split() == ["b", "0.001", "0.9000", "0.8141", "60/60", "completed"]
    assert lines[6].split() == ["d", "0.0001", "0/60", "pending"]


def test_as_a_program_it_needs_no_torch_and_survives_a_closed_pipe(tmp_path: Path) -> None:
    run = make_completed(tmp_path)
    code = (
        "import sys, vime.report.__main__ as m; code = m.main([sys.argv[1], '--json']);"
        "assert not {'torch', 'vllm', 'megatron'} & set(sys.modules); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, run.path], cwd=REPOSITORY, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    piped = f"set -o pipefail; {sys.executable} -m vime.report {run.path} --json | head -c 1"
    done = subprocess.run(["bash", "-c", piped], cwd=REPOSITORY, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"{", b"")


def test_sbatch_script_writes_the_report_beside_the_run(tmp_path: Path) -> None:
    run = make_completed(tmp_path)
    script = REPOSITORY / "sbatch" / "report.sbatch"
    environment = {"VIME_VENV": sys.prefix, "PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(["bash", script, run.path], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "60 of 60" in done.stdout
    assert Summary.model_validate_json((run.path / "report.json").read_text()).steps.done == 60
    done = subprocess.run(
        ["bash", script, tmp_path / "none"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "no run at" in done.stderr
