"""New weights into a real engine against a raw gloo broadcast of the same bytes between two processes."""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.ranks import run_ranks
from benchmarks.row import Row
from benchmarks.stack import serve
from vime.config import Config, TinyModel
from vime.models.tiny import make_tiny
from vime.run.role import Role

RANKS = 2
MODELS = {
    "tiny": TinyModel(layers=2, hidden=192, heads=6, ffn=512, context=128),
    "50 MB": TinyModel(layers=4, hidden=512, heads=8, kv_heads=4, head_dim=64, ffn=1536, context=128),
}
TRANSFER = "update_weights"
"""The call during which the tensors travel and are loaded."""
FIXED = ("pause", "start_weight_update", "finish_weight_update", "reset_prefix_cache", "resume")
"""The other calls of an update."""


def measure(models: Mapping[str, TinyModel] = MODELS, blocks: int = 2, updates: int = 5) -> dict[str, Any]:
    """Seconds, by model, of whole updates with and without verification, of each HTTP call, and of the raw broadcast.

    The trainer is two data-parallel ranks, of which rank 0 sends. The candidates take turns in `blocks` blocks of
    `updates` each; joining the engine in a transfer group, once a block, is not counted.
    """
    return {label: _measure_model(model, blocks, updates) for label, model in models.items()}


def rows(measured: dict[str, Any]) -> list[Row]:
    """What the raw broadcast's time is of each part of an update: 1 would be as fast as gloo can."""
    lines = []
    for label, result in measured.items():
        sizes, seconds = result["sizes"], result["seconds"]
        raw = f"{_ms(seconds['raw'])} raw broadcast"
        text = f"{label} model, {sizes['tensors']} tensors, {sizes['bytes'] / 1e6:.1f} MB"
        calls = f"{len(FIXED)} other calls, of {_ms(result['calls']['weight_info'])} at least"
        lines += [
            Row(f"transfer and loading, {text}", _ms(result["calls"][TRANSFER]), raw, result["transfer_vs_raw"]),
            Row(f"  update ({calls})", _ms(seconds["update"]), raw, result["update_vs_raw"]),
            Row("  update with verification", _ms(seconds["verified"]), raw, result["verified_vs_raw"]),
        ]
    return lines


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


def _measure_model(tiny: TinyModel, blocks: int, updates: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="vime-bench-") as name:
        model = Path(name) / "model"
        make_tiny(tiny, model)
        with serve(model, Path(name), router=False) as stack:
            role = replace(stack.role, name="trainer", world_size=RANKS)
            answer = run_ranks(RANKS, Path(name), _take_turns, stack.config, role, blocks, updates)
    seconds = {key: median(values) for key, values in answer["seconds"].items()}
    calls = {key: median(values) for key, values in answer["calls"].items()}
    return {
        "sizes": {"bytes": answer["bytes"], "tensors": answer["tensors"], "updates": blocks * updates},
        "seconds": seconds,
        "calls": calls,
        "fixed_seconds": sum(calls[name] for name in FIXED),
        "transfer_vs_raw": seconds["raw"] / calls[TRANSFER],
        "update_vs_raw": seconds["raw"] / seconds["update"],
        "verified_vs_raw": seconds["raw"] / seconds["verified"],
    }


def _take_turns(
    rank: int, store: Any, world_size: int, config: Config, role: Role, blocks: int, updates: int
) -> dict[str, Any]:
    """On each trainer rank; what rank 0 returns counts.

    Candidates: verified and update are WeightSync as a run uses it, with and without verification; export walks the
    policy's tensors and sends them nowhere; raw and raw_tensors are one broadcast of all bytes, and one a tensor, from
    rank 0 to rank 1, until rank 1 has them.
    """
    import torch
    import torch.distributed as dist

    from vime.buffer.control import Control
    from vime.models.hf_folder import torch_dtype
    from vime.training import parallel
    from vime.training.learner import Learner
    from vime.training.weights.hf_export import Exporter
    from vime.training.weights.sync import WeightSync

    parallel.initialize(config, store, rank, world_size)
    learner = Learner(config, role.model)
    control = Control.connect(replace(role, rank=rank), 60.0)
    # Only leading ranks gather; every rank takes part in the raw broadcasts.
    exporter = Exporter(learner.policy, torch_dtype(config.rollout.dtype)) if parallel.is_leading() else ()
    sizes = [[list(meta.shape) for meta in exporter.metadata] if isinstance(exporter, Exporter) else []]
    dist.broadcast_object_list(sizes, src=0)
    tensors = [torch.zeros(size) for size in sizes[0]]
    flat = torch.zeros(sum(tensor.numel() for tensor in tensors))
    seconds: dict[str, list[float]] = defaultdict(list)
    calls: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, action: Any) -> None:
        for turn in range(updates + 1):
            dist.barrier()
            started = time.perf_counter()
            action()
            if turn:  # the first of a block warms up
                seconds[name].append(time.perf_counter() - started)

    for _ in range(blocks):
        for name in ("verified", "update"):
            weights = config.weights.model_copy(update={"verify": name == "verified"})
            sync = WeightSync(
                config.model_copy(update={"weights": weights}), replace(role, rank=rank), control, learner
            )
            sync.connect()
            timed(name, partial(sync.update, 0))
            sync.close()
        # A sender is done when the kernel has its bytes: the barrier waits for the receiver.
        timed("raw", lambda: (dist.broadcast(flat, src=0), dist.barrier()))
        timed("raw_tensors", lambda: ([dist.broadcast(tensor, src=0) for tensor in tensors], dist.barrier()))
        timed("export", lambda: [None for _ in exporter])
        if rank == 0:
            _time_calls(config, role, control, learner, updates, calls)
        dist.barrier()
    return {"seconds": dict(seconds), "calls": dict(calls), "bytes": flat.nbytes, "tensors": len(tensors)}


def _time_calls(
    config: Config, role: Role, control: Any, learner: Any, updates: int, seconds: dict[str, list[float]]
) -> None:
    """The same update, call by call. Adds to `seconds`, by route; `weight_info` is a call that does nothing."""
    import torch

    from vime.training.weights.engines import Fleet
    from vime.training.weights.gloo_sender import GlooTrainerInitInfo, GlooTrainerTransfer
    from vime.training.weights.sync import PolicySource

    class TimedFleet(Fleet):
        def _call(self, address: Any, method: str, path: str, *args: Any, **rest: Any) -> dict[str, Any]:
            started = time.perf_counter()
            answer = super()._call(address, method, path, *args, **rest)
            if counting:
                seconds[path].append(time.perf_counter() - started)
            return answer

    counting = False
    fleet = TimedFleet([control.engine(0, 10.0)], role.token, 60.0)
    info = GlooTrainerInitInfo(rank=0, master_address=role.host, world_size=2, timeout=60.0)
    transfer = GlooTrainerTransfer.trainer_init(info, client=fleet, source=PolicySource(learner, torch.float32))
    try:
        for turn in range(updates + 1):
            counting = turn > 0
            fleet.version = 0
            fleet.pause()
            transfer.send_weights()
            fleet.reset_prefix_cache()
            fleet.resume()
            fleet.versions()
    finally:
        transfer.shutdown()
        fleet.close()
