"""The Megatron policy against transformers in every layout, and the round trip of its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.training.ranks import Ranks, tiny_config
from vime.buffer.sample import Sample
from vime.config import TinyModel
from vime.models.tiny import make_tiny

TINY = TinyModel(layers=4, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=96, initializer_range=0.13)
MOE = {"experts": 8, "top_k": 3, "expert_ffn": 48}
FAMILIES = {
    "qwen3": TINY,
    "qwen3-untied": TINY.model_copy(update={"tied_embeddings": False}),
    "qwen3_moe": TINY.model_copy(update={"family": "qwen3_moe", **MOE}),
    "glm4_moe": TINY.model_copy(
        update={"family": "glm4_moe", "dense_layers": 1, "routing_bias": 0.3, "tied_embeddings": False, **MOE}
    ),
    "llama": TINY.model_copy(update={"family": "llama"}),
    "llama-untied": TINY.model_copy(update={"family": "llama", "tied_embeddings": False}),
    "qwen2": TINY.model_copy(update={"family": "qwen2"}),
    "qwen2-untied": TINY.model_copy(update={"family": "qwen2", "tied_embeddings": False}),
    "glm4_moe-norm": TINY.model_copy(update={"family": "glm4_moe", "dense_layers": 2, "qk_norm": True, **MOE}),
}
DENSE_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, {"tensor_parallel": 2}),
    "tp2_sp": (2, {"tensor_parallel": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_parallel": 2}),
    "pp2_vpp2": (2, {"pipeline_parallel": 2, "virtual_stages": 2}),
    "cp2": (2, {"context_parallel": 2}),
    "tp2_cp2": (4, {"tensor_parallel": 2, "context_parallel": 2, "sequence_parallel": True}),
}
MOE_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    **{name: layout for name, layout in DENSE_LAYOUTS.items() if name != "tp2"},
    "ep2": (2, {"expert_parallel": 2}),
    "etp2": (2, {"tensor_parallel": 2, "sequence_parallel": True, "expert_tensor_parallel": 2}),
    "tp2_ep2": (2, {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2}),
    "tp2_ep2_dp2": (4, {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2}),
    "ep4_etp1": (4, {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 4}),
    "ep2_etp2": (
        4,
        {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2, "expert_tensor_parallel": 2},
    ),
    "pp2_ep2": (4, {"pipeline_parallel": 2, "expert_parallel": 2, "virtual_stages": 2}),
    "cp2_ep2": (2, {"context_parallel": 2, "expert_parallel": 2}),
}
CASES = [
    *((family, layout) for family in ("qwen3", "qwen3-untied") for layout in DENSE_LAYOUTS),
    *((family, layout) for family in ("qwen3_moe", "glm4_moe") for layout in MOE_LAYOUTS),
    *((family, layout) for family in ("llama", "qwen2") for layout in ("one", "tp2", "pp2")),
    *((f"{family}-untied", "tp2_cp2") for family in ("llama", "qwen2")),
    *(("glm4_moe-norm", layout) for layout in ("one", "tp2_sp", "pp2")),
]


def samples(seed: int = 0, lengths: tuple[int, ...] = (7, 12, 7, 1 + 3, 30)) -> list[Sample]:
    generator = np.random.default_rng(seed)
    made = []
    for length in lengths:
        prompt = max(1, length // 2)
        response = length - prompt
        made.append(
            Sample(
                token_ids=generator.integers(0, 264, length, dtype=np.int32),
                prompt_length=prompt,
                loss_mask=np.ones(response, dtype=np.uint8),
                rollout_logprobs=np.zeros(response, dtype=np.float32),
                versions=np.array([[0, 0]], dtype=np.int32),
                reward=0.0,
                finish_reason="stop",
            )
        )
    return made


def make_model(family: str, folder: Path) -> None:
    """A tiny model of which no tensor has a value that hides a mistake, such as a bias of 0 or a norm of 1."""
    make_tiny(FAMILIES[family], folder)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for tensor in tensors.values():
        if tensor.dim() == 1:
            tensor += 0.1 * torch.randn(tensor.shape, generator=generator)
    if family == "glm4_moe":  # a layer for predicting the token after the next, which is not trained
        tensors |= {f"model.layers.4.{name}.weight": torch.randn(3, 2, generator=generator) for name in ("enorm", "x")}
        config = json.loads((folder / "config.json").read_text())
        config["num_nextn_predict_layers"] = 1
        (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _forward(rank: int, store: Any, world_size: int, folder: Path, training: dict[str, Any]) -> dict[str, Any]:
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    from vime.models.family import architecture
    from vime.models.hf_folder import HfReader
    from vime.training import hf_import, model, parallel
    from vime.training.pack import pack
    from vime.training.weights.hf_export import Exporter, export_folder

    config = tiny_config(training={"ranks": world_size, **training})
    parallel.initialize(config, store, rank, world_size)
    policy = model.build(architecture(folder), config, model.Policy)
    hf_import.load(policy, HfReader(folder))
    streamed = {}
    if parallel.is_leading():
        exporter = Exporter(policy, torch.float32)
        streamed = dict(exporter)
        if rank == 0:
            assert [(meta.name, meta.shape) for meta in exporter.metadata] == [
                (name, tuple(tensor.shape)) for name, tensor in streamed.items()
            ]

    class Holder:
        pass

    learner: Any = Holder()
    learner.policy, learner.config = policy, config
    export_folder(learner, folder, folder.parent / "export", "float32")
    packed = pack(samples(), parallel.pack_layout())

    def step(iterator: Any, chunk: Any) -> Any:
        output = chunk(
            input_ids=packed.token_ids[None],
            position_ids=packed.position_ids[None],
            attention_mask=None,
            packed_seq_params=packed.params,
        )
        return output, lambda logits, non_loss_data=False: logits

    policy[0].config.deallocate_pipeline_outputs = False
    microbatches = config.training.pipeline_parallel
    several = len(policy) > 1
    items = list(range(microbatches))
    outputs = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(items) for _ in policy] if several else iter(items),
        model=policy if several else policy[0],
        num_microbatches=microbatches,
        seq_length=len(packed.token_ids),
        micro_batch_size=1,
        forward_only=True,
        collect_non_loss_data=True,
    )
    logits = None
    if parallel.is_last_stage():
        group = parallel_state.get_tensor_model_parallel_group()
        shards = [torch.empty_like(outputs[-1]) for _ in range(group.size())]
        torch.distributed.all_gather(shards, outputs[-1].contiguous(), group=group)
        logits = torch.cat(shards, dim=-1)[0]
    return {"logits": logits, "rows": packed.rows, "starts": packed.starts, "streamed": streamed}


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_logits_equal_transformers_and_weights_round_trip(
    ranks: Ranks, tmp_path: Path, family: str, layout: str
) -> None:
    from transformers import AutoModelForCausalLM

    make_model(family, tmp_path / "hf")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    with torch.no_grad():
        expected = [reference(torch.from_numpy(s.token_ids[None].astype(np.int64))).logits[0] for s in samples()]
    world_size, training = (MOE_LAYOUTS if "moe" in family else DENSE_LAYOUTS)[layout]
    results = ranks.run(world_size, _forward, tmp_path / "hf", training)
    last = [result for result in results if result["logits"] is not None]
    rows = torch.cat([r["rows"] if r["rows"] is not None else torch.arange(len(r["logits"])) for r in last])
    logits = torch.empty(int(rows.max()) + 1, last[0]["logits"].shape[1])
    for result in last:
        logits[result["rows"] if result["rows"] is not None else slice(None)] = result["logits"]
    for start, wanted in zip(last[0]["starts"], expected, strict=True):
        assert wanted.abs().max() > 1  # a model that says nothing would agree with anything
        worst = (logits[start : start + len(wanted)] - wanted).abs().max()
        assert worst < 1e-5
    original = load_file(tmp_path / "hf" / "model.safetensors")
    written = {
        name: tensor for path in (tmp_path / "export").glob("*.safetensors") for name, tensor in load_file(path).items()
    }
    assert written.keys() == original.keys()
    for name, tensor in original.items():
        assert torch.equal(written[name], tensor), name
        if not name.startswith("model.layers.4."):
            assert torch.equal(results[0]["streamed"].pop(name), tensor), name
    assert not results[0]["streamed"]
