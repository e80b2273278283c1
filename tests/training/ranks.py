"""Real gloo ranks for tests: processes of this machine that run a function with Megatron set up for the CPU.

Importing Megatron takes seconds, so one process imports it, and ranks are forks of that. They live as long as the test
session and take one job after another. A job that fails ends them all; the next one starts new ones.
"""

from __future__ import annotations

import contextlib
import gc
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import CellType
from typing import Any

import torch
import torch.multiprocessing as mp

from vime.config import Cluster, Config, Model, TinyModel

JOB_TIMEOUT = 300.0


def tiny_config(tiny: TinyModel | None = None, **sections: Any) -> Config:
    """A float32 configuration of a tiny model on the local CPU cluster."""
    base: dict[str, Any] = {
        "recipe": "test",
        "cluster": Cluster(name="local"),
        "model": Model(tiny=tiny or TinyModel()),
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 2, "dtype": "float32"},
        "training": {"dtype": "float32"},
    }
    for name, values in sections.items():
        base[name] = {**base[name], **values} if isinstance(base.get(name), dict) else values
    return Config.model_validate(base)


class Ranks:
    """Up to `size` rank processes, started when first needed."""

    def __init__(self, size: int, folder: Path) -> None:
        self._size = size
        self._folder = folder
        self._workers: list[tuple[Any, Connection]] = []
        self._jobs = 0

    def run(self, world_size: int, target: Callable[..., Any], *args: Any) -> list[Any]:
        """`target(rank, store, world_size, *args)` on ranks 0 to world_size - 1; their results in order.

        Raises AssertionError with the tracebacks of the ranks that failed or did not answer in time.
        """
        while len(self._workers) < world_size:
            self._start()
        self._jobs += 1
        store = self._folder / f"store-{self._jobs}"
        workers = self._workers[:world_size]
        for rank, (_, pipe) in enumerate(workers):
            pipe.send((target, rank, world_size, str(store), args))
        answers: dict[int, Any] = {}
        errors: list[str] = []
        deadline = time.monotonic() + JOB_TIMEOUT
        while len(answers) < world_size and (left := deadline - time.monotonic()) > 0:
            waiting = {pipe: rank for rank, (_, pipe) in enumerate(workers) if rank not in answers}
            ready = wait(list(waiting), left)
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                try:
                    good, value = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    good, value = False, "the process ended"
                answers[rank] = value
                if not good:
                    errors.append(f"rank {rank}: {value}")
                    deadline = min(deadline, time.monotonic() + 5.0)  # the others wait for it in vain, or fail too
            if errors and not ready:
                break
        silent = [rank for rank in range(world_size) if rank not in answers]
        if silent and not errors:
            errors.append(f"ranks {silent}: no answer in time")
        results = [answers.get(rank) for rank in range(world_size)]
        if errors:
            self.close()
            raise AssertionError("\n".join(errors))
        return results

    def close(self) -> None:
        """End the processes."""
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
            process.join()
        self._workers.clear()

    def _start(self) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["tests.training.warm"])
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        self._workers.append((process, ours))


def _serve(pipe: Connection) -> None:
    import tests.training.warm  # noqa: F401
    from vime.training import parallel

    with contextlib.suppress(EOFError):
        while True:
            target, rank, world_size, path, args = pipe.recv()
            try:
                store = torch.distributed.FileStore(path, world_size)
                answer = (True, target(rank, store, world_size, *args))
            except BaseException:  # noqa: BLE001  # the parent reports it
                answer = (False, traceback.format_exc())
            finally:
                parallel.shutdown()
                _forget_models()
            pipe.send(answer)


def _forget_models() -> None:
    """Free what a job left: its process groups are some fifty threads, which would add up over a session.

    The hooks of Megatron's data-parallel wrapper hold the wrapper, in a cycle through autograd that is never collected.
    """
    from megatron.core.distributed import DistributedDataParallel

    for thing in gc.get_objects():
        if isinstance(thing, DistributedDataParallel):
            for cell in gc.get_referrers(thing):
                if isinstance(cell, CellType):
                    del cell.cell_contents
    gc.collect()
