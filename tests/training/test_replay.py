"""Megatron uses the experts that the engine chose: in every layout, packed, and when layers are computed again."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.training.ranks import Ranks, tiny_config
from vime.buffer.chunk import write_chunk
from vime.buffer.manifest import CHUNKS, Manifest, entries
from vime.buffer.sample import Group, Sample
from vime.config import TinyModel
from vime.models.tiny import make_tiny
from vime.run.directory import RunDir

EXPERTS, TOP_K, LAYERS = 8, 3, 4
TINY = TinyModel(
    family="qwen3_moe", layers=LAYERS, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=96, initializer_range=0.2,
    experts=EXPERTS, top_k=TOP_K, expert_ffn=48,
)  # fmt: skip
FAMILIES = {
    "qwen3_moe": TINY,
    "glm4_moe": TINY.model_copy(
        update={"family": "glm4_moe", "dense_layers": 1, "routing_bias": 0.3, "tied_embeddings": False}
    ),
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp2": (2, {}),
    "pp2": (2, {"pipeline_parallel": 2}),
    "pp2_vpp2": (2, {"pipeline_parallel": 2, "virtual_stages": 2}),
    "ep2": (2, {"expert_parallel": 2}),
    "etp2": (2, {"tensor_parallel": 2, "sequence_parallel": True, "expert_tensor_parallel": 2}),
    "tp2_ep2": (2, {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2}),
    "cp2": (2, {"context_parallel": 2}),
    "etp2_cp2": (
        4,
        {"tensor_parallel": 2, "context_parallel": 2, "sequence_parallel": True, "expert_tensor_parallel": 2},
    ),
    "pp2_ep2_vpp2": (4, {"pipeline_parallel": 2, "expert_parallel": 2, "virtual_stages": 2}),
    "etp2_pp2": (
        4,
        {"tensor_parallel": 2, "sequence_parallel": True, "pipeline_parallel": 2, "expert_tensor_parallel": 2},
    ),
}


def write_batch(folder: Path, moe_layers: int) -> Manifest:
    """Groups with random routes: of the whole sequence, of all but its start, or none at all."""
    rng = np.random.default_rng(5)
    groups = []
    for prompt in range(6):
        samples = []
        for which in range(2):
            total = int(rng.integers(6, 36))
            prompt_length = int(rng.integers(1, total - 1))
            drawn = rng.permuted(np.tile(np.arange(EXPERTS, dtype=np.uint8), (moe_layers, total - 1, 1)), axis=2)
            first = int(rng.integers(1, total - 1)) if prompt == 1 else 0
            samples.append(
                Sample(
                    token_ids=rng.integers(0, 264, total, dtype=np.int32),
                    prompt_length=prompt_length,
                    loss_mask=np.ones(total - prompt_length, np.uint8),
                    rollout_logprobs=rng.normal(-3, 1, total - prompt_length).astype(np.float32),
                    versions=np.zeros((1, 2), dtype=np.int32),
                    reward=float(rng.random()),
                    finish_reason="stop",
                    routed_experts=None if (prompt, which) == (2, 0) else drawn[..., :TOP_K],
                    first_route=first,
                )
            )
        groups.append(Group(uid=f"p{prompt}", index=prompt, samples=tuple(samples)))
    chunks = folder / "buffer" / CHUNKS
    chunks.mkdir(parents=True)
    info = write_chunk(chunks, "c0.safetensors", groups, EXPERTS)
    return Manifest(step=1, version=0, chunks=(info,), samples=tuple(entries("c0.safetensors", groups)))


def replayed_step(
    rank: int, store: Any, world_size: int, model: Path, run: Path, manifest: Manifest, sections: dict[str, Any]
) -> dict[str, Any]:
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    from vime.buffer.reader import BufferReader
    from vime.training import batch, parallel
    from vime.training.learner import Learner
    from vime.training.weights import hf_export

    training = {"ranks": world_size, "learning_rate": 1e-3, "adam_eps": 1e-4, "max_tokens_per_microbatch": 48}
    config = tiny_config(
        algorithm={"routing_replay": True, "kl_coefficient": 0.1, **sections.get("algorithm", {})},
        training={**training, **sections.get("training", {})},
    )
    parallel.initialize(config, store, rank, world_size)
    learner = Learner(config, model)
    seen: dict[tuple[int, bool], list[torch.Tensor]] = defaultdict(list)

    def record(router: Any, _: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        again = router.router_replay is not None
        again = again and router.router_replay.router_replay_action == RouterReplayAction.REPLAY_BACKWARD
        seen[router.layer_number - 1, again].append(output[1].clone())

    for chunk in learner.policy:
        for module in chunk.modules():
            if isinstance(module, TopKRouter):
                module.register_forward_hook(record)
    reader = BufferReader(RunDir(run), config.buffer)
    loaded = batch.load(manifest, reader, config, version=0, replay=learner.replay)
    metrics = learner.train(loaded)
    checked = {}
    if learner.replay is not None:
        every = dict(enumerate(reader.samples(manifest, range(len(manifest.samples)))))
        moe_layers = learner.replay.routing.moe_layers
        for (layer, again), maps in seen.items():
            wanted = [_experts(m, every, moe_layers.index(layer), config) for m in loaded.microbatches]
            assert len(maps) == len(wanted), f"{len(maps)} passes of {len(wanted)} microbatches"
            checked[layer, again] = _compare(maps, wanted, learner.replay.routing.top_k)
    return {
        "metrics": metrics,
        "weights": dict(hf_export.export(learner.policy, torch.float32)) if parallel.is_leading() else {},
        "checked": checked,
        "microbatches": len(loaded.microbatches),
        "bound": _bound(learner),
    }


def _experts(microbatch: Any, samples: dict[int, Sample], place: int, config: Any) -> list[set[int] | None]:
    """The experts that each token of this rank's routers should use, None where they are free."""
    from megatron.core import parallel_state

    pack = microbatch.pack
    whole: list[set[int] | None] = [None] * int(pack.params.cu_seqlens_q[-1])
    for start, index in zip(pack.starts, microbatch.samples, strict=True):
        routes = samples[index].routed_experts
        for position in range(samples[index].first_route, len(samples[index].token_ids) - 1):
            if routes is not None:
                whole[start + position] = set(routes[place, position].tolist())
    rows = range(len(whole)) if pack.rows is None else pack.rows.tolist()
    local = [whole[row] for row in rows]
    if not config.training.sequence_parallel:
        return local
    share = len(local) // config.training.tensor_parallel
    first = parallel_state.get_tensor_model_parallel_rank() * share
    return local[first : first + share]


def _compare(maps: list[torch.Tensor], wanted: list[list[set[int] | None]], top_k: int) -> tuple[int, int, int]:
    """(tokens as wanted, tokens otherwise, tokens that were free)"""
    good = bad = free = 0
    for routing_map, experts in zip(maps, wanted, strict=True):
        assert len(routing_map) == len(experts)
        for row, expected in zip(routing_map, experts, strict=True):
            used = set(row.nonzero().flatten().tolist())
            assert len(used) == top_k
            good, bad, free = good + (used == expected), bad + (expected not in (None, used)), free + (expected is None)
    return good, bad, free


def _bound(learner: Any) -> dict[str, int]:
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.moe.router_replay import RouterReplay

    def routers(chunks: Any) -> list[Any]:
        return [module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)]

    policy, reference = routers(learner.policy), routers(learner.reference.chunks)
    instances = RouterReplay.global_router_replay_instances
    return {
        "policy": len(policy),
        "policy bound": sum(router.router_replay is not None for router in policy),
        "reference": len(reference),
        "reference bound": sum(router.router_replay is not None for router in reference),
        "known to Megatron": sum(any(router.router_replay is one for one in instances) for router in policy),
    }


Prepared = dict[str, tuple[Path, Path, Manifest]]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    made = {}
    for family, tiny in FAMILIES.items():
        folder = tmp_path_factory.mktemp(family)
        make_tiny(tiny, folder / "hf")
        made[family] = (folder / "hf", folder, write_batch(folder, LAYERS - (family == "glm4_moe")))
    return made


@pytest.mark.parametrize(
    ("family", "recompute", "layout"),
    [
        *(("qwen3_moe", "full", layout) for layout in LAYOUTS),
        *(("glm4_moe", "full", layout) for layout in ("one", "tp2_ep2", "pp2_vpp2", "cp2")),
        *(("glm4_moe", "none", layout) for layout in ("one", "pp2_vpp2")),
    ],
)
def test_every_covered_token_uses_the_engines_experts(
    ranks: Ranks, prepared: Prepared, family: str, layout: str, recompute: str
) -> None:
    model, run, manifest = prepared[family]
    world_size, training = LAYOUTS[layout]
    training = {**training, "recompute": recompute}
    (expected,) = ranks.run(1, replayed_step, model, run, manifest, {})
    results = ranks.run(world_size, replayed_step, model, run, manifest, {"training": training})
    assert expected["microbatches"] > 3
    layers = set()
    for result in results:
        for (layer, again), (good, bad, _) in result["checked"].items():
            assert bad == 0, (layer, again)
            assert good > 0, (layer, again)
            layers.add((layer, again))
        for name, value in expected["metrics"].items():
            assert result["metrics"][name] == pytest.approx(value, abs=1e-5, rel=1e-5), name
    moe_layers = range(LAYERS)[family == "glm4_moe" :]
    assert layers == {(layer, again) for layer in moe_layers for again in {False, recompute == "full"}}
    for name, tensor in expected["weights"].items():
        assert (results[0]["weights"][name] - tensor).abs().max() < 1e-5, name


@pytest.mark.parametrize("kind", ["softmax", "softmax before", "sigmoid with bias"])
def test_weights_and_gradients_are_those_of_the_trainers_scores(kind: str) -> None:
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    from vime.training.replay import FREE, Choices

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, EXPERTS, generator=generator, dtype=torch.float64, requires_grad=True)
    bias = 5 * torch.randn(EXPERTS, generator=generator, dtype=torch.float64) if "bias" in kind else None
    chosen = torch.tensor([[7, 0, 3], [1, 2, 3], [FREE] * 3, [5, 6, 0], [FREE] * 3], dtype=torch.int16)
    choices = Choices()
    choices.set_target_indices(chosen)
    choices.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    settings: dict[str, Any] = {"score_function": kind.split()[0], "use_pre_softmax": "before" in kind}
    scores = logits.sigmoid() if bias is not None else logits.softmax(-1)
    own = (scores + bias if bias is not None else scores).topk(TOP_K).indices
    used = torch.where(chosen < 0, own, chosen.long())
    expected = scores.gather(1, used)
    if "before" not in kind:
        expected = expected / expected.sum(-1, keepdim=True)
    probs, routing_map = topk_routing_with_score_function(
        logits, TOP_K, expert_bias=bias, scaling_factor=1.7, router_replay=choices, **settings
    )
    assert torch.equal(routing_map, torch.zeros(5, EXPERTS, dtype=torch.bool).scatter(1, used, True))
    torch.testing.assert_close(probs.gather(1, used), 1.7 * expected, atol=1e-6, rtol=1e-6)
    weights = torch.randn(5, TOP_K, generator=generator, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((probs.gather(1, used) * weights).sum(), logits)
    (wanted,) = torch.autograd.grad((1.7 * expected * weights).sum(), logits)
    assert wanted[0].abs().max() > 0
    torch.testing.assert_close(gradient, wanted, atol=1e-6, rtol=1e-5)


def test_coverage_counts_the_tokens_that_routes_predict(ranks: Ranks, prepared: Prepared) -> None:
    model, run, manifest = prepared["qwen3_moe"]
    (result,) = ranks.run(1, replayed_step, model, run, manifest, {})
    samples = [sample for group in _groups(run) for sample in group]
    covered = sum(
        sum(position - 1 >= sample.first_route for position in range(sample.prompt_length, len(sample.token_ids)))
        for sample in samples
        if sample.routed_experts is not None
    )
    share = covered / sum(sample.response_length for sample in samples)
    assert 0.5 < share < 1
    assert result["metrics"]["train/routing_replay_coverage"] == pytest.approx(share, rel=1e-6)


def _groups(run: Path) -> list[list[Sample]]:
    from vime.buffer.chunk import Chunk

    chunk = Chunk.open(run / "buffer" / CHUNKS / "c0.safetensors")
    return [[chunk.sample(i) for i in range(g.first, g.first + g.count)] for g in chunk.groups]


def test_case_15_only_the_live_models_routers_are_bound(ranks: Ranks, prepared: Prepared) -> None:
    model, run, manifest = prepared["glm4_moe"]
    for _ in range(2):  # a process that builds its models twice
        (result,) = ranks.run(1, replayed_step, model, run, manifest, {})
        assert result["bound"] == {
            "policy": 3, "policy bound": 3, "reference": 3, "reference bound": 0, "known to Megatron": 3
        }  # fmt: skip


def test_case_15_off_is_no_error_and_binds_nothing(ranks: Ranks, prepared: Prepared) -> None:
    model, run, manifest = prepared["glm4_moe"]
    (on,) = ranks.run(1, replayed_step, model, run, manifest, {})
    (off,) = ranks.run(1, replayed_step, model, run, manifest, {"algorithm": {"routing_replay": False}})
    assert off["bound"]["policy bound"] == 0
    assert "train/routing_replay_coverage" not in off["metrics"]
    # The routes of this batch are random, so that training by them is another step.
    assert abs(on["metrics"]["train/loss"] - off["metrics"]["train/loss"]) > 1e-3


def _score(rank: int, store: Any, world_size: int, model: Path, run: Path, manifest: Manifest) -> list[torch.Tensor]:
    from vime.buffer.reader import BufferReader
    from vime.training import batch, parallel
    from vime.training.learner import Learner

    config = tiny_config(
        algorithm={"routing_replay": True, "kl_coefficient": 0.1}, training={"ranks": world_size, "recompute": "full"}
    )
    parallel.initialize(config, store, rank, world_size)
    learner = Learner(config, model)
    reader = BufferReader(RunDir(run), config.buffer)
    loaded = batch.load(manifest, reader, config, version=0, replay=learner.replay)
    packs = [microbatch.pack for microbatch in loaded.microbatches]
    assert learner.reference is not None
    replayed, reference = learner._score(packs), learner.reference.logprobs(packs)
    samples = [reader.samples(manifest, [i])[0] for microbatch in loaded.microbatches for i in microbatch.samples]
    free = learner.score(samples, config.rollout.temperature)  # as the probe of the engines is
    assert all(output is not None for output in (*replayed, *reference))
    return [torch.cat([output[0] for output in replayed]), torch.cat(list(reference)), torch.cat(free)]  # type: ignore[index, arg-type]


def test_the_policys_scores_are_replayed_and_no_others(ranks: Ranks, prepared: Prepared) -> None:
    ((replayed, reference, free),) = ranks.run(1, _score, *prepared["qwen3_moe"])
    assert (reference - free).abs().max() < 1e-5  # the same weights, both free
    assert (replayed - free).abs().mean() > 0.1  # the batch's routes are random


def _bind_wrongly(rank: int, store: Any, world_size: int, model: Path) -> list[str]:
    from dataclasses import replace

    from vime.models.family import architecture
    from vime.models.routing import routing
    from vime.training import model as models
    from vime.training import parallel
    from vime.training.replay import Replay

    config = tiny_config()
    parallel.initialize(config, store, rank, world_size)
    shape = architecture(model)
    chunks = models.build(shape, config, models.Policy)
    found = routing(shape)
    assert found is not None
    messages = []
    for wrong in (replace(found, moe_layers=(0, 1, 2, 3)), replace(found, moe_layers=(1, 2))):
        with pytest.raises(RuntimeError) as caught:
            Replay(chunks, wrong)
        messages.append(str(caught.value))
    chunks[0].config.moe_router_fusion = True
    with pytest.raises(RuntimeError) as caught:
        Replay(chunks, found)
    return [*messages, str(caught.value)]


def test_case_15_a_router_that_is_missing_or_cannot_be_replayed_is_an_error(ranks: Ranks, prepared: Prepared) -> None:
    (messages,) = ranks.run(1, _bind_wrongly, prepared["glm4_moe"][0])
    assert messages == [
        "layers [0, 1, 2, 3] should have a router to replay; [1, 2, 3] have one",
        "layers [1, 2] should have a router to replay; [1, 2, 3] have one",
        "layers [1, 2, 3] should have a router to replay; [1, 2, 3] have one behind a fused kernel",
    ]
