"""Samples, groups and connections for the tests of the buffer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from vime.buffer.control import Control
from vime.buffer.sample import Group, Sample
from vime.run.role import Role

LAYERS, TOP_K = 3, 2


def connect(port: int, attempt: int = 1, timeout: float = 30.0) -> Control:
    role = Role(
        run_dir=Path("run"), store_host="127.0.0.1", store_port=port, name="generator", attempt=attempt, token="t",
        rank=0, world_size=1, host="127.0.0.1", model=Path("model"),
    )  # fmt: skip
    return Control.connect(role, timeout)


def make_sample(
    rng: np.random.Generator,
    prompt: int,
    response: int,
    experts: int | None = None,
    teacher: bool = False,
    **changes: Any,
) -> Sample:
    total = prompt + response
    starts = np.flatnonzero(rng.random(response) < 0.2)
    starts = np.unique(np.append(0, starts)) if response else np.empty(0, int)
    versions = np.stack([starts, np.sort(rng.integers(0, 9, len(starts)))], axis=1)
    logprobs = rng.normal(size=response).astype(np.float32)
    mask = rng.integers(0, 2, response).astype(np.uint8)
    logprobs[(mask == 0) & (rng.random(response) < 0.3)] = np.nan
    routes = None if experts is None else rng.integers(0, experts, (LAYERS, max(total - 1, 0), TOP_K))
    first_route = 0 if experts is None or rng.random() < 0.5 else int(rng.integers(0, max(total, 1)))
    parts: dict[str, Any] = {
        "token_ids": rng.integers(0, 1 << 31, total).astype(np.int32),
        "prompt_length": prompt,
        "loss_mask": mask,
        "rollout_logprobs": logprobs,
        "versions": versions.astype(np.int32),
        "reward": float(np.float32(rng.normal())),
        "finish_reason": str(rng.choice(["stop", "length", "abort"])),
        "routed_experts": routes,
        "first_route": first_route,
        "metadata": {"question": "é 😀", "n": [1, None, 2.5]},
    }
    if teacher:
        parts["teacher_logprobs"] = rng.normal(size=response).astype(np.float32)
    return Sample(**(parts | changes))


def make_group(index: int, size: int = 2, experts: int | None = None, teacher: bool = False) -> Group:
    """The same group for the same index, in any process."""
    rng = np.random.default_rng(index)
    sizes = rng.integers(0, 40, (size, 2))
    samples = [make_sample(rng, int(p), int(r), experts, teacher) for p, r in sizes]
    return Group(f"prompt-{index}", index, tuple(samples))


@st.composite
def group_lists(draw: st.DrawFn) -> tuple[list[Group], int | None]:
    """Any mixture of lengths, empty prompts and responses, missing routes, with or without a teacher; and the expert
    count, or None without experts."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    experts = draw(st.sampled_from([None, 1, 8, 127, 128, 255, 256, 257, 511, 65536, 65537]))
    teacher = draw(st.booleans())
    length = st.one_of(st.integers(0, 3), st.integers(0, 200))
    sizes = draw(
        st.lists(st.lists(st.tuples(length, length, st.booleans()), min_size=1, max_size=4), min_size=1, max_size=4)
    )
    groups = [
        Group(
            f"u{index}",
            index,
            tuple(make_sample(rng, p, r, experts if routed else None, teacher) for p, r, routed in samples),
        )
        for index, samples in enumerate(sizes)
    ]
    return groups, experts


def assert_same(seen: Sample, wanted: Sample) -> None:
    assert (seen.teacher_logprobs is None) == (wanted.teacher_logprobs is None)
    for name in ("token_ids", "loss_mask", "rollout_logprobs", "versions", "teacher_logprobs"):
        one, other = getattr(seen, name), getattr(wanted, name)
        if one is None:
            continue
        assert one.dtype == other.dtype, name
        assert one.tobytes() == other.tobytes(), name
    assert (seen.routed_experts is None) == (wanted.routed_experts is None)
    if seen.routed_experts is not None and wanted.routed_experts is not None:
        assert seen.routed_experts.shape == wanted.routed_experts.shape
        assert (seen.routed_experts == wanted.routed_experts).all()
    for name in ("first_route", "prompt_length", "reward", "finish_reason", "metadata"):
        assert getattr(seen, name) == getattr(wanted, name), name
