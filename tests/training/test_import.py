"""What is refused when a folder's weights are not what its config.json says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.training.ranks import Ranks, tiny_config
from tests.training.test_model import TINY
from vime.models.tiny import make_tiny


def _load(rank: int, store: Any, world_size: int, folders: list[Path]) -> list[str]:
    from vime.errors import UserError
    from vime.models.family import architecture
    from vime.models.hf_folder import HfReader
    from vime.training import hf_import, model, parallel

    config = tiny_config(training={"ranks": world_size, "tensor_parallel": world_size})
    parallel.initialize(config, store, rank, world_size)
    messages = []
    for folder in folders:
        try:
            hf_import.load(model.build(architecture(folder), config, model.Policy), HfReader(folder))
            messages.append("")
        except UserError as error:
            messages.append(str(error).removeprefix(f"{folder}: "))
    return messages


def test_weights_that_are_not_those_of_the_configuration_are_named(ranks: Ranks, tmp_path: Path) -> None:
    make_tiny(TINY.model_copy(update={"layers": 1}), tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    embedding = tensors["model.embed_tokens.weight"]

    def folder(name: str, more: dict[str, Any], **changes: Any) -> Path:
        made = tmp_path / name
        made.mkdir()
        (made / "config.json").write_text(json.dumps(config | changes))
        save_file({**tensors, **more}, made / "model.safetensors", metadata={"format": "pt"})
        return made

    other = embedding.clone()
    other[200, 3] += 1  # a row of the second rank
    folders = [
        folder("repeated", {"lm_head.weight": embedding.clone()}),
        folder("untied", {"lm_head.weight": other}),
        folder("narrow", {"lm_head.weight": embedding[:, :2].clone()}),
        folder("heads", {}, num_attention_heads=6, num_key_value_heads=6),
        folder("groups", {}, num_key_value_heads=4),
        folder("layers", {}, num_hidden_layers=2, layer_types=None),
        folder("vocabulary", {}, vocab_size=300),
        folder("norms", {"model.norm.weight": torch.ones(63)}),
    ]
    first, second = ranks.run(2, _load, folders)
    differs = (
        "config.json has tie_word_embeddings=true, but lm_head.weight differs from model.embed_tokens.weight: set"
        " tie_word_embeddings=false to use both, or remove lm_head.weight"
    )
    assert first[:3] == ["", "", differs]
    assert second[:3] == ["", differs, differs]
    q, k = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"
    assert first[3:] == second[3:]
    assert first[3:] == [
        f"{q} has shape (64, 64), and config.json asks for (96, 64)",
        f"{k} has shape (32, 64), and config.json asks for (64, 64)",
        f"{tmp_path}/layers has no tensor 'model.layers.1.input_layernorm.weight'",
        "model.embed_tokens.weight has shape (264, 64), and config.json asks for (300, 64)",
        "model.norm.weight has shape (63,), and config.json asks for (64,)",
    ]
