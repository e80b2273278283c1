"""The command line as a person uses it."""

import io
import json
import os
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

import launch
from tests.models.published import LLAMA31_8B, QWEN25_7B
from vime.errors import UserError

LAUNCH = Path(launch.__file__)
TINY = ("cluster=local", "recipe=tiny_grpo")


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`launch.py` in `folder`, without a process of its own."""
    out, error = io.StringIO(), io.StringIO()
    broken_pipe = signal.getsignal(signal.SIGPIPE)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(error):
        patch.chdir(folder)
        patch.setenv("VIME_CACHE", str(folder / "cache"))
        patch.setenv("COLUMNS", "100")
        try:
            code = launch.main(list(arguments))
        finally:
            signal.signal(signal.SIGPIPE, broken_pipe)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), error.getvalue())


def test_a_process_of_its_own_says_and_returns_the_same(tmp_path: Path) -> None:
    for arguments in ((*TINY, "--dry-run"), (*TINY, "training.lr=1")):
        environment = {**os.environ, "VIME_CACHE": str(tmp_path / "cache"), "COLUMNS": "100"}
        command = [sys.executable, str(LAUNCH), *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        here = run(tmp_path, *arguments)
        assert (done.returncode, done.stderr) == (here.returncode, here.stderr)
        # The run that a dry run shows has a name of its own.
        assert len(done.stdout.splitlines()) == len(here.stdout.splitlines())
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_shows_the_plan_and_writes_nothing(tmp_path: Path) -> None:
    done = run(tmp_path, *TINY, "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    for words in (
        "supervisor",
        "trainer",
        "0-1",
        "engine",
        "router",
        "generator",
        "vime.rollout.generator",
        "127.0.0.1",
    ):
        assert words in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("published", "sizes", "billions"),
    [
        (LLAMA31_8B, {"hidden": 4096, "ffn": 14336, "head_dim": 128}, 8.03),
        (QWEN25_7B, {"hidden": 3584, "ffn": 18944, "head_dim": 128}, 7.62),
    ],
)
def test_a_dry_run_of_a_declared_shape_has_its_own_sizes(
    tmp_path: Path, published: dict[str, object], sizes: dict[str, int], billions: float
) -> None:
    shape = sizes | {
        "family": published["model_type"],
        "layers": published["num_hidden_layers"],
        "heads": published["num_attention_heads"],
        "kv_heads": published["num_key_value_heads"],
        "vocabulary": published["vocab_size"],
        "context": published["max_position_embeddings"],
    }
    model = f"model={json.dumps({'name': 'x', 'shape': shape})}"
    width = ("training.tensor_parallel=1", "training.sequence_parallel=false", "training.ranks=8")
    done = run(tmp_path, "cluster=h200", "recipe=qwen3_4b_grpo", model, *width, "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["memory_gb"]["trainer"]["parameters"] == pytest.approx(2 * billions, rel=1e-3)


def test_a_dry_run_says_who_the_teacher_is(tmp_path: Path) -> None:
    done = run(tmp_path, *TINY, "algorithm.teacher=http://host:8000", "--dry-run")
    assert "\nteacher    the server at http://host:8000, asked by the generator\n" in done.stdout
    done = run(tmp_path, *TINY, f"algorithm.teacher={tmp_path}", "--dry-run")
    assert f"\nteacher    {tmp_path}, loaded by the trainer ranks\n" in done.stdout


def test_a_dry_run_as_data_is_what_a_run_would_use(tmp_path: Path) -> None:
    done = run(tmp_path, *TINY, "training.learning_rate=1e-6", "--dry-run", "--json")
    data = json.loads(done.stdout)
    assert data["config"]["training"]["learning_rate"] == 1e-6
    assert [role["name"] for role in data["plan"]["roles"]] == [
        "supervisor",
        "trainer",
        "engine",
        "router",
        "generator",
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        (*TINY, "--dry-run"),
        ("cluster=gb200", "recipe=glm45_air_grpo", "--dry-run"),
        (*TINY, "training.ranks=3"),
        ("--help", "rollout"),
    ],
)
def test_neither_a_dry_run_nor_an_error_imports_what_is_slow(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    code = (
        "import sys, launch; launch.main(sys.argv[1:]);"
        " print('LOADED', *({'torch', 'vllm', 'numpy', 'transformers', 'megatron', 'submitit'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(LAUNCH.parent)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines()[-1].strip() == "LOADED"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*TINY, "training.lr=1"), "command line: unknown key training.lr; did you mean training.learning_rate?"),
        ((*TINY, "training.steps=ten"), "command line: training.steps=ten must be a whole number"),
        (
            (*TINY, "model.tiny.family=qwen5"),
            "command line: model.tiny.family=qwen5 is not supported (supported: qwen3, qwen3_moe, glm4_moe, llama, q",
        ),
        (
            ("cluster=h200", "recipe=qwen3_4b_grpo", "model.shape.family=lama", "--dry-run"),
            "model.shape.family=lama is not supported (supported: qwen3, qwen3_moe, glm4_moe, llama, qwen2)",
        ),
        ((*TINY, "data.path=missing.jsonl"), "data.path: there is no file"),
        ((*TINY, "training.ranks=3"), "256 samples do not divide over the 3 data-parallel ranks"),
        ((*TINY, "training.tensor_parallel=3"), "training.ranks=2 is not a multiple of"),
        (("cluster=local", "recipe=tiny_grop"), "did you mean tiny_grpo?"),
        (("cluster=local", "recipe=missing.yaml"), "there is no such file"),
        (("recipe=tiny_grpo",), "cluster=NAME is missing"),
        ((*TINY, "recipe=tiny_sft"), "recipe= is given twice"),
        ((*TINY, "--dryrun"), "unknown option --dryrun; did you mean --dry-run?"),
        ((*TINY, "--json"), "it needs --dry-run"),
        ((*TINY, "--wait", "--no-wait"), "exclude each other"),
        ((*TINY, "steps"), "'steps' is not an option or key=value"),
        ((), "cluster=NAME is missing"),
        (("cluster=h200", "recipe=qwen3_4b_grpo"), "model.path is not set: give the folder of Qwen/Qwen3-4B"),
        (("cluster=h200", "recipe=qwen3_4b_grpo", "launch.trainer_nodes=3"), "do not divide over launch.trainer_nodes"),
        (("sweep=missing.yaml", *TINY), "cannot read missing.yaml"),
        (("sweep=missing.yaml", "sweep.parallel=0", *TINY), "sweep.parallel=0 must be a whole number of at least 1"),
        ((*TINY, "sweep.parallel=2"), "it needs sweep=FILE"),
        (
            (*TINY, "training.steps=1", "run.seed=2", "training.steps=3"),
            "training.steps=1 and training.steps=3 set the",
        ),
        ((*TINY, "run.root=/x", "run={root: /y}"), "run.root=/x and run={root: /y} set the same; leave one out"),
        ((*TINY, "run.root=$NOWHERE_AT_ALL/runs"), "the environment has no variable NOWHERE_AT_ALL"),
        ((*TINY, "run.root=~nobody-at-all/runs"), "~nobody-at-all/runs: "),
        (("--resume", "/etc/passwd"), "/etc/passwd is not a run directory"),
        (("sweep=missing.yaml", "--resume", "runs/x"), "--resume continues one run; leave sweep= out"),
        (("--help", "rolout"), "did you mean rollout?"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2_and_writes_nothing(
    tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    done = run(tmp_path, *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("launch.py: ")
    assert words in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_help_documents_every_key_of_a_section(tmp_path: Path) -> None:
    done = run(tmp_path, "--help", "recipe.rollout")
    assert done.returncode == 0
    assert "rollout.engines  [whole number, >= 0, default 1]" in done.stdout
    assert "vLLM servers." in done.stdout
    assert done.stdout == run(tmp_path, "--help", "rollout").stdout
    one = run(tmp_path, "--help", "data.source").stdout
    assert "module:function" in one
    assert "usage:" in run(tmp_path, "--help").stdout


def test_a_dry_run_of_a_slurm_job_ends_with_exactly_the_script_and_its_steps(tmp_path: Path) -> None:
    arguments = ("cluster=gb200", "recipe=glm45_air_grpo", "run.name=first", "run.root=/lustre/runs", "--dry-run")
    done = run(tmp_path, *arguments)
    assert done.returncode == 0
    data = json.loads(run(tmp_path, *arguments, "--json").stdout)
    steps = "".join(f"# {step}\n" for step in data["steps"])
    assert done.stdout.endswith(f"\n{data['script']}\n# What the batch step starts, one step a role:\n{steps}")
    written = (LAUNCH.parent / "tests/golden/gb200-partitioned-glm45_air_grpo.sbatch").read_text()
    assert f"{data['script']}\n{steps}".replace("/first", "/glm45_air_grpo-1").replace(
        "=first", "=glm45_air_grpo-1"
    ) == (written.replace("/opt/vime", str(LAUNCH.parent)))
    assert (data["gpu_hours"], data["node_hours"]) == (128, 32)
    assert len(data["engine_urls"]) == 8
    assert "128 GPU-hours at most" in done.stdout
    assert "http://rollout-3:<port>" in done.stdout
    assert data["warnings"] == []
    assert "checkpoint 1.50 TB; to end a step and write it in 1100 s" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_many_equal_nodes_are_one_line(tmp_path: Path) -> None:
    arguments = ("cluster=gb200", "recipe=qwen3_4b_grpo", "training.ranks=64", "rollout.engines=20", "--dry-run")
    rows = [line.split("  ") for line in run(tmp_path, *arguments).stdout.splitlines() if " trainer-[" in line]
    [row] = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert row == ["trainer", "trainer", "trainer-[0-15]", "0-63, 4 a node", "gpu 0-3", "-"]
    assert "http://rollout-[0-9]:<port>" in run(tmp_path, *arguments).stdout


def test_a_dry_run_of_a_sweep_shows_every_combination(tmp_path: Path) -> None:
    (tmp_path / "lr.yaml").write_text("grid: {training.learning_rate: [1e-6, 2e-6], run.seed: [1, 2]}\n")
    done = run(tmp_path, "sweep=lr.yaml", "cluster=h200", "recipe=qwen3_4b_grpo", "--dry-run", "--json")
    rows = json.loads(done.stdout)["combinations"]
    assert [row["config"]["training"]["learning_rate"] for row in rows] == [1e-6, 1e-6, 2e-6, 2e-6]
    assert [row["config"]["run"]["seed"] for row in rows] == [1, 2, 1, 2]
    assert all(row["start"] in row["script"] for row in rows)
    shown = run(tmp_path, "sweep=lr.yaml", "cluster=h200", "recipe=qwen3_4b_grpo", "--dry-run").stdout
    assert shown.count("learning_rate_2e-6-seed_") == 2
    assert "# all nodes" in shown


def test_waiting_is_asked_for_or_left_to_the_cluster() -> None:
    assert launch.parse([*TINY]).wait is None
    assert launch.parse([*TINY, "--wait"]).wait is True
    assert launch.parse([*TINY, "--no-wait"]).wait is False
    with pytest.raises(UserError):
        launch.parse(["recipe=x"])
