"""A training step of vime against a bare Megatron-core loop over the same packs, on the same two gloo ranks."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.hf_model import make_model
from benchmarks.ranks import run_ranks
from benchmarks.row import Row, paired_ratio
from vime.buffer.chunk import write_chunk
from vime.buffer.manifest import CHUNKS, Manifest, entries
from vime.buffer.sample import Group, Sample
from vime.config import Cluster, Config, Model, Rollout, TinyModel, Training
from vime.run.directory import RunDir

RANKS = 2
GROUP = 8
BYTE_VOCABULARY = 264


@dataclass(frozen=True)
class Size:
    """One comparison. tokens: of the whole step, in sequences of `shortest` to `longest`; limit: of a microbatch."""

    model: TinyModel
    vocabulary: int
    tokens: int
    shortest: int
    longest: int
    limit: int


SIZES = {
    # tiny_grpo's model and sequences about as short as its own
    "tiny": Size(TinyModel(layers=2, hidden=192, heads=6, ffn=512, context=128), BYTE_VOCABULARY, 8192, 12, 48, 4096),
    # a seventh of the parameters in the output layer, as in a model of 4 billion
    "wider": Size(TinyModel(layers=4, hidden=256, heads=8, kv_heads=4, ffn=768), 2048, 8192, 64, 256, 2048),
}


def measure(sizes: Mapping[str, Size] = SIZES, rounds: int = 7) -> dict[str, Any]:
    """Seconds of a step, by size and candidate; the ratios are the bare loop's time over vime's.

    train: Learner.train on packs that are ready, as the bare loop's are. load: what the trainer does before it: reading
    its share of the batch from the buffer's files, advantages, packing. The `_cpu` seconds are rank 0's processor time,
    which other work on the machine disturbs less.
    """
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="vime-bench-") as name:
        jobs: dict[str, tuple[Size, Path, Manifest]] = {}
        for label, size in sizes.items():
            folder = Path(name) / label
            parameters = make_model(size.model, folder / "hf", size.vocabulary)
            manifest = _write_batch(folder, size)
            jobs[label] = (size, folder, manifest)
            results[label] = {"sizes": _describe(size, manifest) | {"parameters": parameters, "rounds": rounds}}
        answers = run_ranks(RANKS, Path(name), _compare, jobs, rounds)
    for label, (microbatches, seconds) in answers.items():
        results[label]["sizes"]["microbatches"] = microbatches
        whole = [a + b for a, b in zip(seconds["train"], seconds["load"], strict=True)]
        results[label] |= {
            "seconds": {key: median(values) for key, values in seconds.items()},
            "speed_vs_bare": paired_ratio(seconds["bare"], seconds["train"]),
            "speed_with_load_vs_bare": paired_ratio(seconds["bare"], whole),
            "cpu_bare_vs_train": paired_ratio(seconds["bare_cpu"], seconds["train_cpu"]),
        }
    return results


def rows(measured: dict[str, Any]) -> list[Row]:
    """Three lines a size."""
    lines = []
    for label, result in measured.items():
        sizes, seconds = result["sizes"], result["seconds"]
        tokens, whole = sizes["tokens"], seconds["train"] + seconds["load"]
        text = f"step, {label} model ({sizes['parameters'] / 1e6:.1f} M), {tokens} tokens, {RANKS} ranks"
        bare = f"{tokens / seconds['bare']:,.0f} tok/s bare Megatron"
        with_load = result["speed_with_load_vs_bare"]
        lines += [
            Row(text, f"{tokens / seconds['train']:,.0f} tok/s", bare, result["speed_vs_bare"], at_least=0.9),
            Row("  with reading and packing", f"{tokens / whole:,.0f} tok/s", bare, with_load, at_least=0.9),
            Row(
                "  processor time of rank 0",
                f"{seconds['train_cpu']:.2f} s",
                f"{seconds['bare_cpu']:.2f} s bare Megatron",
                result["cpu_bare_vs_train"],
            ),
        ]
    return lines


def _describe(size: Size, manifest: Manifest) -> dict[str, Any]:
    return {
        "tokens": sum(entry.tokens for entry in manifest.samples),
        "trained_tokens": sum(entry.masked_in for entry in manifest.samples),
        "sequences": len(manifest.samples),
        "lengths": [size.shortest, size.longest],
        "vocabulary": size.vocabulary,
        "ranks": RANKS,
    }


def _write_batch(folder: Path, size: Size) -> Manifest:
    """A batch in the buffer's files: groups of 8 responses, a prompt of an eighth to a quarter of each sequence."""
    rng = np.random.default_rng(0)
    groups: list[Group] = []
    tokens = 0
    while tokens < size.tokens:
        samples = []
        for _ in range(GROUP):
            length = int(rng.integers(size.shortest, size.longest + 1))
            prompt = max(1, int(length * rng.uniform(0.125, 0.25)))
            samples.append(
                Sample(
                    token_ids=rng.integers(0, size.vocabulary, length).astype(np.int32),
                    prompt_length=prompt,
                    loss_mask=np.ones(length - prompt, np.uint8),
                    rollout_logprobs=np.full(length - prompt, -np.log(size.vocabulary), np.float32),
                    versions=np.array([[0, 0]], np.int32),
                    reward=float(rng.random()),
                    finish_reason="stop",
                )
            )
            tokens += length
        groups.append(Group(f"p{len(groups)}", len(groups), tuple(samples)))
    chunks = folder / "buffer" / CHUNKS
    chunks.mkdir(parents=True)
    info = write_chunk(chunks, "c0.safetensors", groups)
    return Manifest(step=1, version=0, chunks=(info,), samples=tuple(entries("c0.safetensors", groups)))


def _config(size: Size, model: Path, world_size: int) -> Config:
    return Config(
        recipe="benchmark",
        cluster=Cluster(name="local"),
        model=Model(path=model),
        rollout=Rollout(dtype="float32"),
        training=Training(ranks=world_size, dtype="float32", max_tokens_per_microbatch=size.limit, learning_rate=1e-5),
    )


def _compare(
    rank: int, store: Any, world_size: int, jobs: dict[str, tuple[Size, Path, Manifest]], rounds: int
) -> dict[str, tuple[int, dict[str, list[float]]]]:
    """On each rank, for each size: number of microbatches, and seconds of each candidate's turns."""
    from vime.training import parallel

    first_size, first_folder, _ = next(iter(jobs.values()))
    parallel.initialize(_config(first_size, first_folder / "hf", world_size), store, rank, world_size)
    return {
        label: _take_turns(_config(size, folder / "hf", world_size), folder, manifest, rounds)
        for label, (size, folder, manifest) in jobs.items()
    }


def _take_turns(config: Config, folder: Path, manifest: Manifest, rounds: int) -> tuple[int, dict[str, list[float]]]:
    import torch
    import torch.distributed as dist

    from benchmarks.bare_megatron import BareLoop
    from vime.buffer.reader import BufferReader
    from vime.training import batch, model
    from vime.training.learner import Learner

    learner = Learner(config, folder / "hf")
    (policy,) = learner.policy
    bare = BareLoop(policy.architecture, config.training, policy.state_dict())
    reader = BufferReader(RunDir(folder), config.buffer)
    loaded = batch.load(manifest, reader, config, version=0)
    packs = [microbatch.pack for microbatch in loaded.microbatches]
    with torch.no_grad():
        loss = -float(policy(**model.inputs(packs[0]))[0].mean())
    if abs(loss - bare.loss(packs[0])) > 1e-4 * loss:
        raise RuntimeError(f"the two do not compute the same: loss {loss} here, {bare.loss(packs[0])} bare")
    candidates: dict[str, Callable[[], Any]] = {
        "load": lambda: batch.load(manifest, reader, config, version=0),
        "train": lambda: learner.train(loaded),
        "bare": lambda: bare.train(packs),
    }
    seconds: dict[str, list[float]] = {name: [] for name in (*candidates, "train_cpu", "bare_cpu", "load_cpu")}
    for turn in range(rounds + 2):
        for name in list(candidates) if turn % 2 else list(reversed(candidates)):
            dist.barrier()
            started, used = time.perf_counter(), time.process_time()
            candidates[name]()
            dist.barrier()
            if turn >= 2:  # the first two warm up
                seconds[name].append(time.perf_counter() - started)
                seconds[name + "_cpu"].append(time.process_time() - used)
    return len(packs), seconds
