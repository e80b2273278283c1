"""One vLLM process: the command line that starts it, its readiness, and the end of all that it started.

It is a server, or the ranks of an engine on a further node (`vime.rollout.engine.headless`).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from vime.config import Config
from vime.errors import UserError, WaitTimeout
from vime.rollout.engine.multinode import EngineNodes, Rendezvous
from vime.run.http_client import Client, RequestRefused, Unavailable
from vime.run.network import ReservedPort
from vime.run.role import die_with_parent
from vime.run.tokens import engine_token, generation_token

SERVED_NAME = "policy"
"""The model name that requests carry."""
MIDDLEWARE = "vime.rollout.engine.middleware.EngineMiddleware"
READY_PATH = "/weight_info"
"""Asked for readiness: guarded by the token, open at the gate, answered without a forward pass."""

LONGEST_FOLDER = 50
"""Characters of a temporary folder: vLLM adds 37 to it, and `mkdtemp` 14."""
TRACKER_SECONDS = 2.0
"""A resource tracker gets so long to clean up behind processes that were killed."""

OWN_ARGUMENTS = frozenset(
    {
        "host",
        "port",
        "model",
        "middleware",
        "seed",
        "api_key",
        "served_model_name",
        "weight_transfer_config",
        "logprobs_mode",
        "enable_return_routed_experts",
        "distributed_executor_backend",
        "nnodes",
        "node_rank",
        "master_addr",
        "master_port",
        "headless",
    }
)
"""Server arguments that vime needs for itself: rollout.engine_args may not name them."""


def server_command(config: Config, model: Path, address: ReservedPort, index: int, context: int) -> list[str]:
    """The command line of engine `index`. The token is not on it. Raises UserError for an argument that vime needs."""
    arguments = {"host": address.host, "port": address.port, **_engine_arguments(config, model, index, context)}
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *_flags(arguments)]


def headless_command(config: Config, model: Path, index: int, context: int) -> list[str]:
    """The command line of the ranks of engine `index` on a further node. Raises UserError as `server_command`."""
    arguments = _engine_arguments(config, model, index, context)
    return [sys.executable, "-m", "vime.rollout.engine.headless", *_flags(arguments)]


def span_flags(nodes: EngineNodes, rendezvous: Rendezvous | None) -> list[str]:
    """What either command line needs besides for an engine that spans nodes; nothing without a meeting."""
    if rendezvous is None:
        return []
    return _flags(
        {
            "distributed_executor_backend": "mp",
            "nnodes": nodes.count,
            "node_rank": nodes.node,
            "master_addr": rendezvous.host,
            "master_port": rendezvous.port,
        }
    )


def _engine_arguments(config: Config, model: Path, index: int, context: int) -> dict[str, Any]:
    rollout, cpu = config.rollout, config.cluster.device == "cpu"
    arguments: dict[str, Any] = {
        "model": str(model),
        "served_model_name": SERVED_NAME,
        "middleware": MIDDLEWARE,
        # Two engines of one seed would answer unseeded requests alike.
        "seed": config.run.seed + index,
        "dtype": rollout.dtype,
        "max_model_len": context,
        "tensor_parallel_size": rollout.tensor_parallel,
        "weight_transfer_config": {"backend": config.weights_backend},
        # Of the distribution that was sampled from, so that trainer and engine agree at any temperature.
        "logprobs_mode": "processed_logprobs",
        # A model's generation_config.json may set top_k or top_p, which would then hold for every request silently.
        "generation_config": "vllm",
        "enforce_eager": cpu,
        "disable_log_stats": True,
        "disable_uvicorn_access_log": True,
        "no_enable_log_requests": True,
        "enable_return_routed_experts": config.algorithm.routing_replay,
    }
    if cpu:
        arguments["kv_cache_memory_bytes"] = int(rollout.kv_cache_gb * 2**30)
        # A prompt that is prefilled in two pieces makes vLLM 0.30 rewind the request's random generator, which a CPU
        # generator cannot do: the engine dies ("CPU Generator does not use offset").
        arguments["no_enable_chunked_prefill"] = True
    else:
        arguments["gpu_memory_utilization"] = rollout.memory_fraction
    for name, value in rollout.engine_args.items():
        key = name.replace("-", "_")
        if key in OWN_ARGUMENTS:
            raise UserError(f"rollout.engine_args.{name}: vime sets this argument itself")
        arguments[key] = value
    return arguments


def _flags(arguments: dict[str, Any]) -> list[str]:
    flags: list[str] = []
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            flags.append(flag)
        elif value is False or value is None:
            continue
        else:
            flags += [flag, json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return flags


def server_environment(config: Config, host: str, token: str, index: int, gated: bool) -> dict[str, str]:
    """This process's environment, with what vLLM needs to run in private, off the network, and with the RL routes.

    host: the address of this node. token: the run's, of which engine `index` is told what is derived for it alone.
    """
    environment = {name: value for name, value in os.environ.items() if name != "VIME_RUN_TOKEN"}
    environment |= {
        "VIME_ENGINE_TOKEN": engine_token(token, index),
        "VIME_GENERATION_TOKEN": generation_token(token),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VIME_ENGINE_GATED": "1" if gated else "0",
    }
    if config.cluster.device == "cpu":
        # Pinning threads to cores would fight with the trainer ranks, which share the machine's cores with the engines.
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        # Threads that spin at a barrier wait for one that another process has pushed off its core: on two shared cores
        # that cost nine tenths of the speed.
        environment.setdefault("OMP_WAIT_POLICY", "passive")
        if config.rollout.tensor_parallel == 1:
            # Runs the worker inside the engine core: one process and one import of vLLM (7 s) less.
            environment.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    if config.nodes_per_engine > 1:
        # torch's word for a rendezvous store that none of the ranks hosts: `multinode` does. Left to
        # rank 0, it would listen on every interface, on a port that was told before it was bound.
        environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    environment.setdefault("GLOO_SOCKET_IFNAME", config.cluster.interface)
    # Without it vLLM takes the address of the default route for its message queues, and binds there.
    environment.setdefault("VLLM_HOST_IP", host)
    return environment


@dataclass(frozen=True)
class Server:
    """A running vLLM and its address; a node without a server has none."""

    process: subprocess.Popen[bytes]
    url: str
    token: str
    sockets: Path
    """The folder of its Unix sockets, which it does not remove."""

    @classmethod
    def start(cls, command: list[str], environment: dict[str, str], url: str) -> Server:
        """Starts it in this process's group; it dies with this process."""
        sockets = _socket_folder()
        process = subprocess.Popen(
            command,
            env={**environment, "VLLM_RPC_BASE_PATH": str(sockets)},
            stdin=subprocess.DEVNULL,
            # The plugin asks for the same, but only once vLLM is imported, some ten seconds later.
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
        return cls(process, url, environment["VIME_ENGINE_TOKEN"], sockets)

    def wait_ready(self, timeout: float, stopping: Callable[[], bool]) -> bool:
        """Waits until the server answers with the token.

        Returns False when it ended first or `stopping()` became true. Raises WaitTimeout after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        with closing(Client()) as client:
            while time.monotonic() < deadline:
                if self.process.poll() is not None or stopping():
                    return False
                try:
                    client.ask("GET", self.url + READY_PATH, self.token, timeout=5)
                    return True
                except (Unavailable, RequestRefused) as error:
                    if error.status not in (None, 502, 503):
                        raise RuntimeError(f"{self.url}{READY_PATH} answered {error.status}; expected 200") from error
                except TimeoutError:
                    pass  # listening, and busy
                time.sleep(0.2)
        raise WaitTimeout(f"waited {timeout:g} s for the vLLM server at {self.url} to answer")

    def kill_tree(self, grace: float) -> None:
        """Ends the server and everything below this process: SIGTERM, `grace` seconds, SIGKILL.

        A vLLM whose API server was killed leaves its engine core behind; this process is their subreaper, so they are
        found here. Python's resource trackers are killed last: they end by themselves when those they track have, and
        remove the semaphores that those have left.
        """
        tree = psutil.Process().children(recursive=True)
        for process in tree:
            _signal(process.terminate)
        _, alive = psutil.wait_procs(tree, timeout=grace)
        left = {*alive, *psutil.Process().children(recursive=True)}
        trackers = {process for process in left if _tracks_resources(process)}
        for process in left - trackers:
            _signal(process.kill)
        _, alive = psutil.wait_procs(list(left - trackers), timeout=10)
        _, waiting = psutil.wait_procs(list(trackers), timeout=TRACKER_SECONDS)
        for process in waiting:
            _signal(process.kill)
        self.process.poll()
        shutil.rmtree(self.sockets, ignore_errors=True)
        if alive:
            raise WaitTimeout(f"waited 10 s for vLLM's killed processes {[p.pid for p in alive]} to end")


def _socket_folder() -> Path:
    """A new private folder, of a name that leaves room for a socket's, which may have 107 characters in all."""
    folder = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="vime-", dir=folder if len(folder) <= LONGEST_FOLDER else "/tmp"))


def _tracks_resources(process: psutil.Process) -> bool:
    try:
        return "multiprocessing.resource_tracker" in " ".join(process.cmdline())
    except psutil.Error:
        return False


def _signal(send: Callable[[], None]) -> None:
    try:
        send()
    except psutil.NoSuchProcess:
        pass
