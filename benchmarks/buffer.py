"""Speed of the buffer's files against a plain copy of the same bytes, pickle and torch.save, in the same run.

    python -m benchmarks.buffer --samples 512 --tokens 4096 --layers 48 --top-k 8

Every number is the median of `--repeats` rounds in which all the candidates take turns, on files that the page cache
holds. A write counts until the data are on disk (fsync), for every candidate. The reader's memory is what its process
grew by when it read an eighth of the samples, divided by that eighth.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.row import Row
from vime.buffer.chunk import read_samples, write_chunk
from vime.buffer.sample import Group, Sample

GROUP, GROUPS_PER_CHUNK = 8, 8
PART = 8
"""The reader whose memory is measured takes one of so many shares."""


def measure(
    samples: int = 128,
    tokens: int = 4096,
    layers: int = 48,
    top_k: int = 8,
    experts: int = 128,
    repeats: int = 3,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Write and read `samples` x `tokens` (a quarter of them prompt) with routes [layers, tokens - 1, top_k].

    Returns the sizes used, GB/s of each candidate, ratios against the copy, and the reader's memory as a multiple of
    its share. Files go to a new folder in `folder` (default: the temporary folder) and are deleted.
    """
    groups = _make(samples, tokens, layers, top_k, experts)
    batches = [groups[i : i + GROUPS_PER_CHUNK] for i in range(0, len(groups), GROUPS_PER_CHUNK)]
    plain = [vars(sample) for group in groups for sample in group.samples]
    with tempfile.TemporaryDirectory(dir=folder, prefix="vime-bench-") as name:
        root = Path(name)
        chunks = [root / f"chunk_{number}" for number in range(len(batches))]

        def write() -> None:
            for path, batch in zip(chunks, batches, strict=True):
                write_chunk(root, path.name, batch, experts)

        def copy() -> None:
            for path in chunks:
                with path.open("rb") as source, path.with_suffix(".copy").open("wb") as target:
                    shutil.copyfileobj(source, target, 1 << 24)
                    os.fsync(target.fileno())

        def copy_cached() -> None:
            for path in chunks:
                shutil.copyfile(path, path.with_suffix(".copy"))

        def read() -> int:
            return sum(_touch(sample) for path, batch in zip(chunks, batches, strict=True)
                       for sample in read_samples(path, range(sum(len(g.samples) for g in batch))))  # fmt: skip

        def load_plain() -> int:
            # Our own file of a second ago: the buffer itself never unpickles.
            with (root / "pickle").open("rb") as file:
                return sum(_touch(Sample(**part)) for part in pickle.load(file))  # noqa: S301

        def load_torch() -> int:
            loaded = torch.load(root / "torch", weights_only=True)
            return sum(_touch_tensors(part) for part in loaded)

        tensors = [
            {key: torch.from_numpy(value) for key, value in part.items() if isinstance(value, np.ndarray)}
            for part in plain
        ]
        writers: dict[str, Callable[[], Any]] = {
            "write": write,
            "copy": copy,
            "pickle_write": lambda: _dump(root / "pickle", lambda file: pickle.dump(plain, file, protocol=5)),
            "torch_write": lambda: _dump(root / "torch", lambda file: torch.save(tensors, file)),
        }
        readers: dict[str, Callable[[], Any]] = {
            "copy_cached": copy_cached,
            "read": read,
            "pickle_read": load_plain,
            "torch_read": load_torch,
        }
        for action in writers.values():
            action()
        seconds: dict[str, list[float]] = {key: [] for key in writers | readers}
        for actions in (writers, readers):
            for _ in range(repeats):
                for key, action in actions.items():
                    begin = time.perf_counter()
                    action()
                    seconds[key].append(time.perf_counter() - begin)
        size = sum(path.stat().st_size for path in chunks)
        speed = {key: size / statistics.median(values) / 1e9 for key, values in seconds.items()}
        grown, share = _memory(chunks)
    return {
        "sizes": {
            "samples": samples,
            "tokens": tokens,
            "layers": layers,
            "top_k": top_k,
            "experts": experts,
            "bytes": size,
        },
        "gb_per_s": {key: round(value, 3) for key, value in speed.items()},
        "write_vs_copy": round(speed["write"] / speed["copy"], 3),
        "read_vs_copy": round(speed["read"] / speed["copy_cached"], 3),
        "write_vs_pickle": round(speed["write"] / speed["pickle_write"], 3),
        "read_vs_pickle": round(speed["read"] / speed["pickle_read"], 3),
        "write_vs_torch_save": round(speed["write"] / speed["torch_write"], 3),
        "read_vs_torch_save": round(speed["read"] / speed["torch_read"], 3),
        "reader_memory_vs_share": round(grown / share, 3),
    }


def rows(measured: dict[str, Any]) -> list[Row]:
    """Write and read against the copy, and the reader's memory."""
    sizes, speed = measured["sizes"], measured["gb_per_s"]
    text = f"{sizes['samples']} x {sizes['tokens']} tokens, {sizes['layers']} layers of routes"
    copy, cached = f"{speed['copy']:.2f} GB/s copy, fsync", f"{speed['copy_cached']:.2f} GB/s copy"
    return [
        Row(f"write, {text}", f"{speed['write']:.2f} GB/s", copy, measured["write_vs_copy"], at_least=0.8),
        *(
            Row(f"  against {name}", f"{speed['write']:.2f} GB/s", f"{speed[f'{key}_write']:.2f} GB/s", measured[ratio])
            for name, key, ratio in (
                ("pickle", "pickle", "write_vs_pickle"),
                ("torch.save", "torch", "write_vs_torch_save"),
            )
        ),
        Row("  read", f"{speed['read']:.2f} GB/s", cached, measured["read_vs_copy"], at_least=0.8),
        *(
            Row(f"  against {name}", f"{speed['read']:.2f} GB/s", f"{speed[f'{key}_read']:.2f} GB/s", measured[ratio])
            for name, key, ratio in (
                ("pickle", "pickle", "read_vs_pickle"),
                ("torch.load", "torch", "read_vs_torch_save"),
            )
        ),
        Row(
            "  memory of a reader of 1/8",
            "growth of the process",
            "its share",
            measured["reader_memory_vs_share"],
            at_most=1.2,
        ),
    ]


def _make(samples: int, tokens: int, layers: int, top_k: int, experts: int) -> list[Group]:
    rng = np.random.default_rng(0)
    prompt = tokens // 4
    response = tokens - prompt
    routes = rng.integers(0, experts, (layers, tokens - 1, top_k)).astype(np.uint8 if experts <= 256 else np.uint16)
    made = [
        Sample(
            token_ids=rng.integers(0, 150_000, tokens).astype(np.int32),
            prompt_length=prompt,
            loss_mask=np.ones(response, np.uint8),
            rollout_logprobs=rng.normal(size=response).astype(np.float32),
            versions=np.array([[0, 3]], np.int32),
            reward=1.0,
            finish_reason="stop",
            routed_experts=np.roll(routes, number, axis=1),
        )
        for number in range(samples)
    ]
    return [Group(str(i), i, tuple(made[i : i + GROUP])) for i in range(0, samples, GROUP)]


def _dump(path: Path, save: Callable[[Any], None]) -> None:
    with path.open("wb") as file:
        save(file)
        file.flush()
        os.fsync(file.fileno())


def _touch(sample: Sample) -> int:
    """Read one byte of every page, so that a mapping counts as read only when its data have come."""
    parts = (sample.token_ids, sample.rollout_logprobs, sample.loss_mask, sample.routed_experts)
    return sum(int(part.reshape(-1).view(np.uint8)[::4096].sum()) for part in parts if part is not None)


def _touch_tensors(parts: dict[str, torch.Tensor]) -> int:
    return sum(int(part.reshape(-1).view(torch.uint8)[::4096].sum()) for part in parts.values())


def _memory(chunks: list[Path]) -> tuple[int, float]:
    """(bytes that a fresh process grew by when it read every 8th sample, bytes of that share)."""
    code = """
import json, sys
from pathlib import Path
from vime.buffer.chunk import Chunk, read_samples
def resident():
    text = Path("/proc/self/smaps_rollup").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Rss:"))
part, *paths = sys.argv[1:]
read_samples(Path(paths[0]), [1])  # what the first call of anything imports and compiles is not the data' share
before, held, share = resident(), [], 0.0
for path in map(Path, paths):
    count = len(Chunk.open(path))
    chosen = range(0, count, int(part))
    held.append(read_samples(path, chosen))
    share += path.stat().st_size * len(chosen) / count
print(json.dumps([resident() - before, share]))
"""
    command = [sys.executable, "-c", code, str(PART), *map(str, chunks)]
    grown, share = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=600).stdout)
    return grown, share


def main() -> None:
    """Command line: the arguments of `measure`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("samples", 512),
        ("tokens", 4096),
        ("layers", 48),
        ("top-k", 8),
        ("experts", 128),
        ("repeats", 3),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", type=Path)
    print(json.dumps(measure(**vars(parser.parse_args())), indent=2))


if __name__ == "__main__":
    main()
