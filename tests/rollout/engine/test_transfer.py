"""Weights over gloo into a real engine: after an update it is a fresh engine of the new model, to the last bit."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import SERVED, STARTUP, EngineStack, end_role, stack_config, start_role
from tests.rollout.reference import logprobs
from tests.rollout.sending import send
from vime.buffer.control import Control, EngineMessage
from vime.config import TinyModel
from vime.config.compose import dump_resolved
from vime.models.tiny import make_tiny
from vime.run.directory import RunDir
from vime.run.role import Role

pytestmark = pytest.mark.slow

PROMPT = [257, 49, 43, 50, 258]
LONG_PROMPT = [(7 * i) % 250 for i in range(100)]
"""Longer than the tiny Llama's original context, so that every kind of its rotary frequencies counts."""


def make_other(tiny: TinyModel, folder: Path) -> Path:
    """Another model of that kind, without a bias of 0 or a norm of 1, which would hide a mistake."""
    make_tiny(tiny.model_copy(update={"seed": 1}), folder)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for tensor in tensors.values():
        if tensor.dim() == 1:
            tensor += 0.1 * torch.randn(tensor.shape, generator=generator)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_other(SERVED, tmp_path_factory.mktemp("other") / "model")


def assert_serves(stack: EngineStack, model: Path, prompt: list[int] = PROMPT) -> None:
    """A sampled answer has the logprobs that transformers gives it under `model`."""
    sampled = stack.complete(prompt, temperature=1.0, seed=3)
    expected = logprobs(model, prompt, np.asarray(sampled["token_ids"]))
    np.testing.assert_allclose(sampled["logprobs"]["token_logprobs"], expected, atol=2e-5)


def test_an_update_makes_the_engine_serve_the_new_model(engine_stack: EngineStack, other_model: Path) -> None:
    """Cases 16 and FACTS' silent fault: nothing of the old weights is left, in the model or in the prefix cache."""
    stack = engine_stack
    assert_serves(stack, stack.model)
    before = stack.complete(PROMPT, temperature=1.0, seed=3)
    try:
        send(other_model, stack.engine_url, stack.role.token, version=1, rounds=2)
        assert_serves(stack, other_model)
        with pytest.raises(AssertionError):
            assert_serves(stack, stack.model)
    finally:
        send(stack.model, stack.engine_url, stack.role.token, version=0)
    after = stack.complete(PROMPT, temperature=1.0, seed=3)
    assert after["token_ids"] == before["token_ids"]
    assert after["logprobs"]["token_logprobs"] == before["logprobs"]["token_logprobs"]


def test_llama_is_served_as_it_is_trained(tmp_path: Path) -> None:
    """Its scaled rotary embedding and an output layer of its own, before and after an update."""
    llama = SERVED.model_copy(update={"family": "llama", "tied_embeddings": False})
    first, second = tmp_path / "first", make_other(llama, tmp_path / "second")
    make_tiny(llama, first)
    run_dir = RunDir.create(tmp_path, "run", "test")
    config = stack_config(first)
    run_dir.config.write_text(dump_resolved(config))
    token = secrets.token_hex(16)
    control, port = Control.serve("127.0.0.1", 1, token)
    role = Role(run_dir.path, "127.0.0.1", port, "engine", 1, token, 0, 1, "127.0.0.1", first)
    engine = start_role(role, "vime.rollout.engine.engine")
    try:
        url = control.engine(0, STARTUP).url
        stack = EngineStack(config, role, run_dir, control, engine, url, url)
        assert_serves(stack, first, LONG_PROMPT)
        send(second, url, role.token, version=1)
        assert_serves(stack, second, LONG_PROMPT)
    finally:
        end_role(engine)


def test_a_killed_server_comes_back_behind_a_gate(engine_stack: EngineStack) -> None:
    """It gets its old port, serves nobody until it has been sent weights, and asks the trainer for them."""
    stack = engine_stack
    posted = stack.control.posted()
    servers = [p for p in psutil.Process(stack.engine.pid).children() if "api_server" in " ".join(p.cmdline())]
    (server,) = servers
    core = server.children()
    server.kill()
    message = stack.control.next_message(posted, 120, "the restarted engine's message")
    assert message == EngineMessage(index=0, incarnation=1)
    assert not any(process.is_running() for process in core), "the old engine core was left behind"
    address = stack.control.engine(0, 1)
    assert (address.url, address.incarnation) == (stack.engine_url, 1)

    body = {"model": "policy", "prompt": PROMPT, "max_tokens": 2}
    assert httpx.get(stack.engine_url + "/health").status_code == 503
    assert httpx.post(stack.engine_url + "/v1/completions", json=body, headers=stack.headers).status_code == 503
    assert httpx.get(stack.engine_url + "/weight_info", headers=stack.headers).status_code == 200
    time.sleep(3)  # three of the router's health checks
    routed = httpx.post(stack.router_url + "/v1/completions", json=body, headers=stack.router_headers)
    assert routed.status_code == 503

    send(stack.model, stack.engine_url, stack.role.token, version=0)
    assert httpx.get(stack.engine_url + "/health").status_code == 200
    deadline = time.monotonic() + 30
    while httpx.post(stack.router_url + "/v1/completions", json=body, headers=stack.router_headers).status_code != 200:
        assert time.monotonic() < deadline, "the router did not admit the engine again"
        time.sleep(0.2)
    assert_serves(stack, stack.model)
