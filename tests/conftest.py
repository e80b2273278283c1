"""What several folders of tests share: one real engine and router a session, because vLLM takes a while to start."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, settings

from tests.workers import (  # noqa: F401  # hooks
    end_worker_once,
    pytest_collection_modifyitems,
    pytest_sessionfinish,
    pytest_unconfigure,
    pytest_xdist_make_scheduler,
)
from vime.buffer.control import Control
from vime.config import Cluster, Config, Data, Evaluation, Model, Rollout, TinyModel, Training, Weights
from vime.config.compose import dump_resolved
from vime.models.tiny import make_tiny
from vime.run.directory import RunDir
from vime.run.role import Role
from vime.run.tokens import engine_token, router_token

STARTUP = 300.0


def pytest_configure() -> None:
    """What holds for all tests."""
    # SIGTERM ends them as Ctrl-C does: the fixtures end the runs and engines that they started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if "PYTEST_XDIST_WORKER" in os.environ:
        end_worker_once()
    # How long an example takes says what else the machine does.
    settings.register_profile("vime", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("vime")


@dataclass
class EngineStack:
    """A running engine and router, as a run has them, and what a test needs to speak to them."""

    config: Config
    role: Role
    run_dir: RunDir
    control: Control
    engine: subprocess.Popen[bytes]
    engine_url: str
    router_url: str

    @property
    def model(self) -> Path:
        """The Hugging Face folder that the engine was started with."""
        return self.role.model

    @property
    def headers(self) -> dict[str, str]:
        """The engine's token as a request carries it."""
        return {"Authorization": f"Bearer {engine_token(self.role.token, 0)}"}

    @property
    def router_headers(self) -> dict[str, str]:
        """As `headers`, for the router."""
        return {"Authorization": f"Bearer {router_token(self.role.token)}"}

    def post(self, path: str, body: Any = None, **query: Any) -> Any:
        """POST to the engine, not through the router; the answer's JSON."""
        answer = httpx.post(self.engine_url + path, json=body, params=query, headers=self.headers, timeout=120)
        answer.raise_for_status()
        return answer.json()

    def complete(self, prompt: list[int], **more: Any) -> dict[str, Any]:
        """One completion request to the engine; its first choice."""
        body = {"model": "policy", "prompt": prompt, "logprobs": 0, "return_token_ids": True, "max_tokens": 16, **more}
        choice: dict[str, Any] = self.post("/v1/completions", body)["choices"][0]
        return choice


def stack_config(path: Path) -> Config:
    """A small run: float32 on the CPU, a model made by `make_tiny`, sums of one-digit numbers."""
    return Config(
        recipe="test",
        cluster=Cluster(name="local", startup_timeout=STARTUP),
        model=Model(path=path),
        data=Data(
            task_args={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
            template="{expression} =",
            size=200,
        ),
        rollout=Rollout(
            dtype="float32",
            prompts_per_step=4,
            samples_per_prompt=4,
            max_response_tokens=8,
            context=128,
            kv_cache_gb=0.25,
        ),
        training=Training(ranks=2, steps=2, dtype="float32", max_tokens_per_microbatch=1024),
        weights=Weights(backend="gloo"),
        evaluation=Evaluation(prompts=4),
    )


def start_role(role: Role, module: str) -> subprocess.Popen[bytes]:
    """Starts a role as the supervisor does: a process group of its own, no input, a log in the run directory."""
    log = RunDir(role.run_dir).log(role.name, role.rank, role.attempt)
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", module],
            env=os.environ | role.environment() | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def end_role(process: subprocess.Popen[bytes]) -> int:
    """Asks a role to stop; whatever is left of its group after 15 s is killed. Returns its exit code."""
    process.terminate()
    try:
        return process.wait(15)
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


@pytest.fixture(scope="session")
def model_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """VIME_CACHE of the runs that begin with a warm-up, whose model takes two minutes: the first of them makes it.

    The same in all workers.
    """
    base = tmp_path_factory.getbasetemp()
    cache = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache"
    cache.mkdir(exist_ok=True)
    return cache


SERVED = TinyModel(family="qwen2", context=128, initializer_range=0.08)
"""The model of the shared engine. Qwen3's are in every run of tiny_grpo, with experts in test_moe_transfer."""


@pytest.fixture(scope="session")
def engine_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineStack]:
    """One engine and one router of a tiny random model, real ones, for all slow tests of the session.

    Tests that change its weights put the old ones back; tests that kill it start their own.
    """
    folder = tmp_path_factory.mktemp("stack")
    model = folder / "model"
    make_tiny(SERVED, model)
    config = stack_config(model)
    run_dir = RunDir.create(folder, "run", "test")
    run_dir.config.write_text(dump_resolved(config))
    token = secrets.token_hex(16)
    control, port = Control.serve("127.0.0.1", 1, token)
    role = Role(run_dir.path, "127.0.0.1", port, "engine", 1, token, 0, 1, "127.0.0.1", model)
    engine = start_role(role, "vime.rollout.engine.engine")
    router = start_role(replace(role, name="router"), "vime.rollout.router.router")
    try:
        address = control.engine(0, STARTUP)
        router_url = control.router(60)
        yield EngineStack(config, role, run_dir, control, engine, address.url, router_url)
    finally:
        codes = end_role(router), end_role(engine)
    assert codes == (0, 0)
