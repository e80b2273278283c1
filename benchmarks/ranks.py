"""Trainer ranks as processes of this machine, with Megatron set up for the CPU."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

TIMEOUT = 600.0


def run_ranks(world_size: int, folder: Path, target: Callable[..., Any], *args: Any) -> Any:
    """`target(rank, store, world_size, *args)` on every rank, one thread each; rank 0's result.

    folder: where the ranks' store is kept. Raises RuntimeError with the traceback of a rank that failed, or when rank 0
    has not answered after TIMEOUT seconds.
    """
    context = mp.get_context("spawn")
    processes, pipes = [], []
    try:
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            place = (rank, str(folder / "ranks"), world_size)
            process = context.Process(target=_serve, args=(theirs, place, target, args), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        if not pipes[0].poll(TIMEOUT):
            raise RuntimeError(f"waited {TIMEOUT:g} s for rank 0")
        answers = [pipe.recv() for pipe in pipes if pipe.poll(10)]
    except EOFError:
        raise RuntimeError("a rank ended without an answer") from None
    finally:
        for process in processes:
            process.kill()
            process.join()
    for failure, _ in answers:
        if failure:
            raise RuntimeError(failure)
    return answers[0][1]


def _serve(pipe: Connection, place: tuple[int, str, int], target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    from vime.training import cpu, parallel

    torch.set_num_threads(1)
    cpu.enable()
    rank, path, world_size = place
    try:
        result = target(rank, torch.distributed.FileStore(path, world_size), world_size, *args)
    except BaseException:  # noqa: BLE001  # the parent raises it
        pipe.send((traceback.format_exc(), None))
    else:
        parallel.shutdown()
        pipe.send(("", result))
