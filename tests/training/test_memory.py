"""The memory plan against what tiny models really allocate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.training.ranks import Ranks, tiny_config
from tests.training.test_model import samples
from vime.config import TinyModel
from vime.models.shape import shape_of
from vime.models.tiny import make_tiny
from vime.plan.memory import GB, trainer_memory

SIZES = {"layers": 4, "hidden": 96, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 160, "tied_embeddings": False}
MOE = {"experts": 8, "top_k": 3, "expert_ffn": 64}
FAMILIES = {
    "qwen3": TinyModel(**SIZES),
    "qwen2": TinyModel(family="qwen2", **{**SIZES, "head_dim": 24}),
    "llama": TinyModel(family="llama", **SIZES),
    "qwen3_moe": TinyModel(family="qwen3_moe", **SIZES, **MOE),
    "glm4_moe": TinyModel(family="glm4_moe", dense_layers=1, qk_norm=True, **SIZES, **MOE),
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "bfloat16_dp2": (2, {"dtype": "bfloat16"}),
    "plain_optimizer": (2, {"dtype": "bfloat16", "distributed_optimizer": False}),
    "pp2": (2, {"pipeline_parallel": 2}),
    "recompute": (1, {"recompute": "full"}),
    "recompute_selective": (1, {"recompute": "selective"}),
    "tp2_ep2": (2, {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2}),
}
TOKENS = 16 * 25


class _Kept:
    """Bytes of the tensors that autograd keeps, each storage once, and the most there were at a time."""

    def __init__(self, known: set[int]) -> None:
        self._known = known
        self._users: dict[int, int] = {}
        self._now = self.peak = 0

    def pack(self, tensor: Any) -> Any:
        """Called when autograd keeps a tensor; what it returns lives as long as that."""
        kept, storage = self, tensor.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        if place in self._known:
            return tensor

        class Use:
            def __init__(self) -> None:
                self.tensor = tensor
                kept._users[place] = kept._users.get(place, 0) + 1
                if kept._users[place] == 1:
                    kept._now += size
                    kept.peak = max(kept.peak, kept._now)

            def __del__(self) -> None:
                kept._users[place] -= 1
                if kept._users[place] == 0:
                    kept._now -= size

        return Use()

    @staticmethod
    def unpack(kept: Any) -> Any:
        """The tensor again."""
        return getattr(kept, "tensor", kept)


def _measure(rank: int, store: Any, world_size: int, folder: Path, training: dict[str, Any]) -> dict[str, float]:
    import torch

    from vime.training import model, parallel
    from vime.training.checkpoint.model_state import give_state
    from vime.training.learner import Learner
    from vime.training.pack import pack

    config = _config(None, world_size, training)
    parallel.initialize(config, store, rank, world_size)
    learner = Learner(config, folder)
    give_state(learner.optimizer)

    def size(tensors: Any) -> int:
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    buffers = [b for m in learner.trainable.modules for b in (*m.buffers, *m.expert_parallel_buffers)]
    weights = list(learner.policy[0].parameters())
    known = {weight.untyped_storage().data_ptr() for weight in weights}
    parts = getattr(learner.optimizer, "chained_optimizers", [learner.optimizer])
    states = [t for part in parts for group in part.optimizer.state.values() for t in group.values() if t.numel() > 1]
    masters = [p for part in parts for group in part.optimizer.param_groups for p in group["params"]]
    packed = pack(samples(lengths=(25,) * 16), parallel.pack_layout())
    kept = _Kept(known)
    if config.training.pipeline_parallel == 1:
        with torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack):
            learner.policy[0](**model.inputs(packed))[0].sum().backward()
    return {
        "parameters": size(weights),
        "gradients": size(buffer.grad_data for buffer in buffers),
        "optimizer": size(states) + size(p for p in masters if p.untyped_storage().data_ptr() not in known),
        "activations": kept.peak,
    }


def _config(tiny: TinyModel | None, ranks: int, training: dict[str, Any]) -> Any:
    settings = {"ranks": ranks, "max_tokens_per_microbatch": TOKENS, "logprob_chunk_tokens": 1, **training}
    return tiny_config(tiny, training=settings, rollout={"context": 128})


CASES = [
    *(("qwen3", layout) for layout in LAYOUTS if "ep2" not in layout),
    *(("qwen2", layout) for layout in ("one", "pp2")),
    *(("llama", layout) for layout in ("one", "plain_optimizer")),
    *(("qwen3_moe", layout) for layout in ("one", "tp2_ep2", "bfloat16_dp2")),
    *(("glm4_moe", layout) for layout in ("one", "pp2", "tp2_ep2")),
]


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_the_plan_is_what_is_allocated(ranks: Ranks, tmp_path: Path, family: str, layout: str) -> None:
    make_tiny(FAMILIES[family], tmp_path / "hf")
    world_size, training = LAYOUTS[layout]
    measured = ranks.run(world_size, _measure, tmp_path / "hf", training)
    config = _config(FAMILIES[family], world_size, training)
    shape = shape_of(config.model)
    assert shape is not None
    plan = trainer_memory(config, shape)
    fullest = measured[plan.stage * world_size // config.training.pipeline_parallel]
    for part in ("parameters", "gradients", "optimizer"):
        assert getattr(plan, part) * GB == pytest.approx(fullest[part], rel=0.02), part
    # In bfloat16 torch's own norms on a CPU keep float32 copies; Transformer Engine's on a GPU do not.
    if "pipeline_parallel" not in training and "dtype" not in training:
        # Which experts are chosen decides how many tokens a rank has: compare with the mean.
        mean = sum(parts["activations"] for parts in measured) / len(measured)
        assert plan.activations * GB == pytest.approx(mean, rel=0.1)
