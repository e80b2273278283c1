"""What a Hugging Face folder may say, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vime.config import TinyModel
from vime.errors import UserError
from vime.models.family import architecture
from vime.models.hf_folder import INDEX, HfReader, HfWriter, join_shards
from vime.models.tiny import make_tiny
from vime.models.weight import join_qkv, join_rows, split_halves, split_qkv

QWEN3_4B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "initializer_range": 0.02,
    "intermediate_size": 9728,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def _folder(path: Path, **changes: Any) -> Path:
    config = {**QWEN3_4B, **changes}
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "absent"}))
    return path


def test_the_published_config_is_understood(tmp_path: Path) -> None:
    shape = architecture(_folder(tmp_path))
    assert (shape.layers, shape.vocabulary, shape.rotary_base, shape.tied) == (36, 151936, 1e6, True)
    assert shape.transformer["num_query_groups"] == 8
    assert shape.output is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, ["rope_scaling"]),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0}}, ["rope_parameters"]),
        ({"rope_theta": "absent"}, ["rotary base is missing"]),
        ({"rope_parameters": {"rope_theta": 1e4}}, ["contradicts", "1000000", "10000"]),
        ({"use_sliding_window": True}, ["use_sliding_window", "True"]),
        ({"attention_bias": True}, ["attention_bias"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({"num_key_value_heads": 5}, ["num_attention_heads=32", "num_key_value_heads=5"]),
        ({"layer_types": ["full_attention"] * 35}, ["layer_types", "35", "36"]),
        ({"layer_types": ["sliding_attention"] * 36}, ["layer_types"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config", "not known"]),
        ({"model_type": "qwen2"}, ["model_type 'qwen2' is not supported", "qwen3"]),
        ({"hidden_size": "2560"}, ["hidden_size"]),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        architecture(_folder(tmp_path, **changes))
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no config\.json"):
        architecture(tmp_path)


def test_qkv_order_is_group_by_group() -> None:
    # one row a head: 4 queries in 2 groups, keys 10 and 11, values 20 and 21
    query, key, value = (
        torch.tensor(rows, dtype=torch.float32)[:, None] for rows in ([0, 1, 2, 3], [10, 11], [20, 21])
    )
    joined = join_qkv(1, 2)([query, key, value])
    assert joined[:, 0].tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert all(torch.equal(a, b) for a, b in zip(split_qkv(1, 2)(joined), [query, key, value], strict=True))


def test_gate_and_up_round_trip() -> None:
    gate, up = torch.randn(3, 2), torch.randn(3, 2)
    assert all(torch.equal(a, b) for a, b in zip(split_halves(join_rows([gate, up])), [gate, up], strict=True))


def test_shards_are_written_and_read_part_by_part(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.randn(8, 4) for i in range(5)}
    writer = HfWriter(tmp_path, shard_bytes=2 * 8 * 4 * 4)
    writer.write(tensors.items())
    writer.close()
    join_shards(tmp_path, [0])
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == [
        f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)
    ]
    assert json.loads((tmp_path / INDEX).read_text())["metadata"]["total_size"] == 5 * 8 * 4 * 4
    assert not list(tmp_path.glob(".*"))
    reader = HfReader(tmp_path)
    assert reader.names == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(reader.part(name, None, 0, 4), tensor)
        assert torch.equal(reader.part(name, 0, 3, 4), tensor[6:])
        assert torch.equal(reader.part(name, 1, 1, 2), tensor[:, 2:])
        assert torch.equal(reader.rows(name, 7, 10), tensor[7:])
        assert reader.rows(name, 9, 8).shape == (0, 4)
    with pytest.raises(UserError, match="t0: 8 along axis 0 does not divide by tensor_parallel=3"):
        reader.part("t0", 0, 0, 3)
    with pytest.raises(UserError, match="no tensor 'missing'"):
        reader.part("missing", None, 0, 1)


def test_a_tiny_model_is_the_same_twice(tmp_path: Path) -> None:
    tiny = TinyModel(layers=2, hidden=32, heads=2, kv_heads=1, head_dim=16, ffn=48)
    make_tiny(tiny, tmp_path / "a")
    torch.rand(3)
    make_tiny(tiny, tmp_path / "b")
    a, b = load_file(tmp_path / "a" / "model.safetensors"), load_file(tmp_path / "b" / "model.safetensors")
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert architecture(tmp_path / "a").layers == 2


def test_left_over_and_missing_tensors_are_named(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert HfReader(tmp_path).names == {"a"}
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"neither model\.safetensors nor"):
        HfReader(tmp_path)
