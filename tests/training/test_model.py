"""The Megatron policy against transformers, and the round trip of its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.training.ranks import Ranks, tiny_config
from vime.buffer.sample import Sample
from vime.config import TinyModel
from vime.models.tiny import make_tiny

TINY = TinyModel(layers=4, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=96, initializer_range=0.2)
LAYOUTS = {
    "one": (1, {}),
    "tp2": (2, {"tensor_parallel": 2}),
    "tp2_sp": (2, {"tensor_parallel": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_parallel": 2}),
}


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


def _forward(rank: int, store: Any, world_size: int, folder: Path, training: dict[str, Any]) -> dict[str, Any]:
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    from vime.models.family import architecture
    from vime.models.hf_folder import HfReader
    from vime.training import hf_weights, model, parallel
    from vime.training.pack import pack

    config = tiny_config(training={"ranks": world_size, **training})
    parallel.initialize(config, store, rank, world_size)
    policy = model.build(architecture(folder), config, model.Policy)
    hf_weights.load(policy, HfReader(folder))
    exported = dict(hf_weights.export(policy, torch.float32))
    packed = pack(samples(), multiple=world_size)

    def step(iterator: Any, chunk: Any) -> Any:
        output = chunk(
            input_ids=packed.token_ids[None],
            position_ids=packed.position_ids[None],
            attention_mask=None,
            packed_seq_params=packed.params,
        )
        return output, lambda logits, non_loss_data=False: logits

    policy.config.deallocate_pipeline_outputs = False
    outputs = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter([None]),
        model=policy,
        num_microbatches=1,
        seq_length=len(packed.token_ids),
        micro_batch_size=1,
        forward_only=True,
        collect_non_loss_data=True,
    )
    logits = None
    if parallel.is_last_stage():
        group = parallel_state.get_tensor_model_parallel_group()
        shards = [torch.empty_like(outputs[0]) for _ in range(group.size())]
        torch.distributed.all_gather(shards, outputs[0].contiguous(), group=group)
        logits = torch.cat(shards, dim=-1)[0]
    return {"logits": logits, "export": exported}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tied", [True, False])
def test_logits_equal_transformers_and_weights_round_trip(
    ranks: Ranks, tmp_path: Path, layout: str, tied: bool
) -> None:
    from transformers import AutoModelForCausalLM

    make_tiny(TINY.model_copy(update={"tied_embeddings": tied}), tmp_path / "hf")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    with torch.no_grad():
        expected = torch.cat(
            [reference(torch.from_numpy(s.token_ids[None].astype(np.int64))).logits[0] for s in samples()]
        )
    world_size, training = LAYOUTS[layout]
    results = ranks.run(world_size, _forward, tmp_path / "hf", training)
    logits = results[-1]["logits"][: len(expected)]
    assert logits.abs().max() > 1  # a model that says nothing would agree with anything
    assert (logits - expected).abs().max() < 1e-5
    exported, original = results[0]["export"], load_file(tmp_path / "hf" / "model.safetensors")
    assert exported.keys() == original.keys()
    for name, tensor in original.items():
        assert torch.equal(exported[name], tensor), name
