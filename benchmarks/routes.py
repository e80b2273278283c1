"""What routed experts cost a step: bytes, and seconds to take them from an answer, write, read and set them up.

The parts are measured on routes of GLM-4.5-Air's shape, and extrapolated by their bandwidths to a step of 256 responses
of 8192 tokens on the published layout, in which each rank reads the layers of its pipeline stage. Beside it, a step of
a small mixture of experts on this machine: reading and packing a batch with its routes and without them, in turns.
"""

from __future__ import annotations

import base64
import io
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.ranks import run_ranks
from benchmarks.row import Row
from vime.buffer.chunk import read_samples, write_chunk
from vime.buffer.manifest import CHUNKS, Manifest, entries
from vime.buffer.sample import Group, Sample
from vime.config import Algorithm, Cluster, Config, Model, Rollout, TinyModel, Training
from vime.models.routing import Routing
from vime.rollout.routes import decode_routes
from vime.run.directory import RunDir

AIR = Routing(layers=46, moe_layers=tuple(range(1, 46)), experts=128, top_k=8)
STAGES = 2
"""Pipeline stages of the published layout; its one replica shares every sequence between two ranks."""
STEP_SAMPLES, STEP_TOKENS, STEP_SECONDS = 256, 8192, 220.0
"""A published step of GLM-4.5-Air on 16 GPUs took 220 to 240 seconds."""
TINY = TinyModel(
    family="qwen3_moe", layers=4, hidden=128, heads=4, kv_heads=2, head_dim=32, experts=32, top_k=4, expert_ffn=96,
    context=256,
)  # fmt: skip


def measure(samples: int = 16, tokens: int = 2048, rounds: int = 5) -> dict[str, Any]:
    """GB/s of each part on `samples` x `tokens`, the step they are extrapolated to, and the small model's step."""
    with tempfile.TemporaryDirectory(prefix="vime-bench-") as name:
        root = Path(name)
        seconds, size = _parts(root, samples, tokens, rounds)
        small = run_ranks(1, root, _compare, root, _write_small(root), rounds)
    speed = {part: size[part] / median(values) for part, values in seconds.items()}
    whole = STEP_SAMPLES * (STEP_TOKENS - 1) * len(AIR.moe_layers) * AIR.top_k
    own = whole / STAGES
    step = {part: (whole if part in ("decode", "write") else own) / speed[part] for part in speed}
    return {
        "sizes": {"samples": samples, "tokens": tokens, "rounds": rounds, "bytes": size["write"]},
        "gb_per_s": {part: value / 1e9 for part, value in speed.items()},
        "step": {"bytes": whole, "bytes_of_a_rank": own, "seconds": step, "share": sum(step.values()) / STEP_SECONDS},
        "small": small,
    }


def rows(measured: dict[str, Any]) -> list[Row]:
    """The extrapolated step and the measured one."""
    step, speed, small = measured["step"], measured["gb_per_s"], measured["small"]
    parts = ", ".join(f"{part} {step['seconds'][part]:.2f} s ({speed[part]:.1f} GB/s)" for part in speed)
    return [
        Row(
            f"GLM-4.5-Air, {STEP_SAMPLES} x {STEP_TOKENS} tokens: {step['bytes'] / 1e6:,.0f} MB of routes",
            parts,
            f"a step of {STEP_SECONDS:.0f} s",
            step["share"],
            at_most=0.02,
        ),
        Row(
            f"  small model, {small['tokens']} tokens: {small['bytes'] / 1e3:,.0f} kB of routes, read and set up",
            f"{small['added'] * 1e3:.2f} ms",
            f"a step of {small['seconds']:.3f} s",
            small["added"] / small["seconds"],
            at_most=0.02,
        ),
    ]


def _parts(root: Path, samples: int, tokens: int, rounds: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    rng = np.random.default_rng(0)
    said = rng.integers(1, AIR.experts, (tokens - 1, AIR.layers, AIR.top_k)).astype(np.uint8)
    file = io.BytesIO()
    np.save(file, said)
    text = base64.b64encode(file.getvalue()).decode()
    ids = decode_routes(text, tokens, AIR).ids
    with_routes = [_sample(rng, tokens, np.roll(ids, i, axis=1)) for i in range(samples)]
    without = [_sample(rng, tokens, None) for _ in range(samples)]
    own = range(len(AIR.moe_layers) // STAGES)
    seconds: dict[str, list[float]] = {"decode": [], "write": [], "read": [], "set up": []}
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        for _ in range(samples):
            decode_routes(text, tokens, AIR)
        decode = time.perf_counter() - begin
        times = []
        for label, chosen in (("with", with_routes), ("without", without)):
            begin = time.perf_counter()
            write_chunk(root, label, [Group("g", 0, tuple(chosen))], AIR.experts)
            times.append(time.perf_counter() - begin)
        write = max(times[0] - times[1], 1e-9)
        times = []
        for label in ("with", "without"):
            begin = time.perf_counter()
            read_samples(root / label, range(samples), own if label == "with" else ())
            times.append(time.perf_counter() - begin)
        read = max(times[0] - times[1], 1e-9)
        for part, value in zip(seconds, (decode, write, read, 0.0), strict=True):
            seconds[part].append(value)
    seconds["set up"] = run_ranks(1, root, _set_up, root / "with", samples, rounds)
    whole = samples * ids.nbytes
    size = {
        "decode": whole,
        "write": whole,
        "read": whole * len(own) // len(ids),
        "set up": whole * len(own) // len(ids),
    }
    return {part: values[-rounds:] for part, values in seconds.items()}, size


def _set_up(rank: int, store: Any, world_size: int, path: Path, samples: int, rounds: int) -> list[float]:
    """Seconds to make the routers' choices of one pack of all samples, from files that are read already."""
    from vime.training.pack import pack
    from vime.training.replay import pack_routes

    own = range(len(AIR.moe_layers) // STAGES)
    read = read_samples(path, range(samples), own)
    packed = pack(read)
    seconds = []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        pack_routes(read, packed, len(own), AIR)
        seconds.append(time.perf_counter() - begin)
    return seconds[1:]


def _sample(rng: np.random.Generator, tokens: int, routes: Any, words: int = 264) -> Sample:
    prompt = tokens // 4
    return Sample(
        token_ids=rng.integers(0, words, tokens).astype(np.int32),
        prompt_length=prompt,
        loss_mask=np.ones(tokens - prompt, np.uint8),
        rollout_logprobs=np.full(tokens - prompt, -5.0, np.float32),
        versions=np.array([[0, 0]], np.int32),
        reward=float(rng.random()),
        finish_reason="stop",
        routed_experts=routes,
    )


def _write_small(root: Path, samples: int = 32, tokens: int = 128) -> Manifest:
    from vime.models.tiny import make_tiny

    make_tiny(TINY, root / "hf")
    rng = np.random.default_rng(1)
    experts = np.tile(np.arange(TINY.experts, dtype=np.uint8), (TINY.layers, tokens - 1, 1))
    made = [_sample(rng, tokens, rng.permuted(experts, axis=2)[..., : TINY.top_k]) for _ in range(samples)]
    groups = [Group(f"p{i}", i, tuple(made[i : i + 8])) for i in range(0, samples, 8)]
    chunks = root / "buffer" / CHUNKS
    chunks.mkdir(parents=True)
    info = write_chunk(chunks, "c0.safetensors", groups, TINY.experts)
    return Manifest(step=1, version=0, chunks=(info,), samples=tuple(entries("c0.safetensors", groups)))


def _compare(rank: int, store: Any, world_size: int, root: Path, manifest: Manifest, rounds: int) -> dict[str, Any]:
    """Seconds of a step on one rank, and those of them that routes add."""
    from vime.buffer.reader import BufferReader
    from vime.training import batch, parallel
    from vime.training.learner import Learner

    config = Config(
        recipe="benchmark",
        cluster=Cluster(name="local"),
        model=Model(path=root / "hf"),
        algorithm=Algorithm(routing_replay=True),
        rollout=Rollout(dtype="float32"),
        training=Training(ranks=1, dtype="float32", max_tokens_per_microbatch=2048, learning_rate=1e-6),
    )
    parallel.initialize(config, store, rank, world_size)
    learner = Learner(config, root / "hf")
    reader = BufferReader(RunDir(root), config.buffer)
    steps, added = [], []
    for turn in range(rounds + 2):
        begin = time.perf_counter()
        batch.load(manifest, reader, config, version=0)
        middle = time.perf_counter()
        loaded = batch.load(manifest, reader, config, version=0, replay=learner.replay)
        end = time.perf_counter()
        learner.train(loaded)
        if turn >= 2:
            steps.append(time.perf_counter() - middle)
            added.append((end - middle) - (middle - begin))
    tokens = sum(entry.tokens for entry in manifest.samples)
    return {
        "tokens": tokens,
        "bytes": (tokens - len(manifest.samples)) * TINY.layers * TINY.top_k,
        "seconds": median(steps),
        "added": median(added),
    }
