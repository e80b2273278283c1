"""Weights into an engine with experts: the fault of vLLM's CPU reload that `vime.rollout.cpu_reload` repairs."""

from __future__ import annotations

import secrets
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from tests.conftest import STARTUP, end_role, stack_config, start_role
from tests.rollout.reference import logprobs
from tests.rollout.sending import send
from vime.buffer.control import Control
from vime.compose import dump_resolved
from vime.config import TinyModel
from vime.models.tiny import make_tiny
from vime.role import Role
from vime.run_dir import RunDir

pytestmark = pytest.mark.slow

PROMPT = [257, 49, 43, 50, 258]


def make_moe(folder: Path, seed: int) -> Path:
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    make_tiny(TinyModel(context=128), folder)
    config = Qwen3MoeConfig(
        vocab_size=264, hidden_size=64, intermediate_size=128, moe_intermediate_size=96, num_experts=8,
        num_experts_per_tok=2, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        max_position_embeddings=128, eos_token_id=259, pad_token_id=256, bos_token_id=None, initializer_range=0.1,
        tie_word_embeddings=True, norm_topk_prob=True,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def test_experts_are_the_new_ones_after_each_update(tmp_path: Path) -> None:
    first, second = (make_moe(tmp_path / f"model{seed}", seed) for seed in (0, 1))
    run_dir = RunDir.create(tmp_path, "run", "test")
    run_dir.config.write_text(dump_resolved(stack_config(first)))
    control, port = Control.serve("127.0.0.1", 1)
    role = Role(run_dir.path, "127.0.0.1", port, "engine", 1, secrets.token_hex(16), 0, 1, "127.0.0.1", first)
    engine = start_role(role, "vime.rollout.engine")
    try:
        url = control.engine(0, STARTUP).url

        def difference(model: Path) -> float:
            body = {"model": "policy", "prompt": PROMPT, "logprobs": 0, "return_token_ids": True, "max_tokens": 16}
            headers = {"Authorization": f"Bearer {role.token}"}
            answer = httpx.post(url + "/v1/completions", json={**body, "seed": 3}, headers=headers, timeout=120)
            choice = answer.json()["choices"][0]
            expected = logprobs(model, PROMPT, np.asarray(choice["token_ids"]))
            return float(np.abs(np.asarray(choice["logprobs"]["token_logprobs"]) - expected).max())

        assert difference(first) < 2e-5
        for version, model in enumerate((second, first, second), 1):
            send(model, url, role.token, version)
            assert difference(model) < 2e-5, version
    finally:
        end_role(engine)
