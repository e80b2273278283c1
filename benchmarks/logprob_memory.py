"""Peak memory of the chunked logprobs, forward and backward, against one chunk's logits and the plain computation.

Each candidate runs in a fresh process, on one that it has warmed up with a few tokens. What is counted is the growth of
its peak resident memory beyond what any implementation must hold: logprobs, entropies and the two gradients.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.row import Row
from vime.supervise.commands import thread_counts
from vime.training.logprobs import vocab_parallel_logprobs

CANDIDATES = ("chunked", "chunked_entropy", "plain")
FLOAT = 4


def measure(tokens: int = 4096, vocabulary: int = 32768, width: int = 256, chunk: int = 1024) -> dict[str, Any]:
    """Extra bytes and seconds of each candidate, float32.

    chunked: vocab_parallel_logprobs with a loss of logprobs, as GRPO without an entropy bonus has. chunked_entropy:
    entropies in the loss too. plain: log_softmax of all logits.
    """
    sizes = {"tokens": tokens, "vocabulary": vocabulary, "width": width, "chunk": chunk}
    chunk_bytes = min(chunk, tokens) * vocabulary * FLOAT
    runs = {candidate: _in_fresh_process(candidate, sizes) for candidate in CANDIDATES}
    extra = {candidate: run["extra_bytes"] for candidate, run in runs.items()}
    return {
        "sizes": sizes,
        "chunk_bytes": chunk_bytes,
        "extra_bytes": extra,
        "seconds": {candidate: run["seconds"] for candidate, run in runs.items()},
        "extra_vs_chunk": extra["chunked"] / chunk_bytes,
        "extra_vs_chunk_entropy": extra["chunked_entropy"] / chunk_bytes,
        "extra_vs_plain": extra["chunked"] / extra["plain"],
        "speed_vs_plain": runs["plain"]["seconds"] / runs["chunked"]["seconds"],
    }


def rows(measured: dict[str, Any]) -> list[Row]:
    """Memory in chunks, memory and time against the plain computation."""
    sizes, extra, seconds = measured["sizes"], measured["extra_bytes"], measured["seconds"]
    text = f"{sizes['tokens']} tokens x {sizes['vocabulary']} words x {sizes['width']}"
    chunk = f"{_mb(measured['chunk_bytes'])} logits of {sizes['chunk']} tokens"
    return [
        Row(f"extra memory, {text}", _mb(extra["chunked"]), chunk, measured["extra_vs_chunk"], at_most=5),
        Row(
            "  entropy in the loss", _mb(extra["chunked_entropy"]), chunk, measured["extra_vs_chunk_entropy"], at_most=5
        ),
        Row("  against log_softmax of all", _mb(extra["chunked"]), _mb(extra["plain"]), measured["extra_vs_plain"]),
        Row(
            "  speed",
            f"{seconds['chunked']:.1f} s",
            f"{seconds['plain']:.1f} s log_softmax of all",
            measured["speed_vs_plain"],
        ),
    ]


def _mb(size: float) -> str:
    return f"{size / 1e6:,.0f} MB"


def _in_fresh_process(candidate: str, sizes: dict[str, int]) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.logprob_memory", candidate, json.dumps(sizes)]
    environment = os.environ | thread_counts(1)
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, timeout=300)
    answer: dict[str, float] = json.loads(done.stdout)
    return answer


def _run(candidate: str, tokens: int, vocabulary: int, width: int, chunk: int) -> dict[str, float]:
    """In the fresh process: one forward and backward pass."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator).requires_grad_()
    weight = (torch.randn(vocabulary, width, generator=generator) * 0.02).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    _pass(
        candidate, hidden[:8].detach().requires_grad_(), weight[:64].detach().requires_grad_(), targets[:8] % 64, chunk
    )
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, started = _status("VmRSS"), time.perf_counter()
    needed = _pass(candidate, hidden, weight, targets, chunk)
    seconds = time.perf_counter() - started
    return {"extra_bytes": _status("VmHWM") - before - needed, "seconds": seconds}


def _pass(candidate: str, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> int:
    """Forward and backward; the bytes of what must be there at its end."""
    if candidate == "plain":
        log_p = torch.log_softmax((hidden @ weight.t()).float(), dim=-1)
        logprobs = log_p.gather(1, targets.unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            entropies = -(log_p.exp() * log_p).sum(dim=-1)
    else:
        logprobs, entropies = vocab_parallel_logprobs(
            hidden, weight, targets, temperature=1.0, vocabulary_size=weight.shape[0], chunk=chunk
        )
    loss = -logprobs.mean()
    if candidate == "chunked_entropy":
        loss = loss - 0.01 * entropies.mean()
    loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return sum(tensor.nbytes for tensor in (logprobs, entropies, hidden.grad, weight.grad))


def _status(key: str) -> int:
    """Bytes that /proc/self/status states."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))


if __name__ == "__main__":
    print(json.dumps(_run(sys.argv[1], **json.loads(sys.argv[2]))))
