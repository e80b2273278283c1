"""What a Hugging Face folder may say, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.published import (
    GLM45_AIR,
    LLAMA31_8B,
    LLAMA32_1B,
    QWEN3_4B,
    QWEN3_30B_A3B,
    QWEN25_05B,
    QWEN25_7B,
)
from vime.config import Model, Shape, TinyModel
from vime.config.compose import compose
from vime.errors import UserError
from vime.models.family import FAMILIES, architecture, family, read_shape
from vime.models.hf_folder import INDEX, HfReader, HfWriter, join_shards
from vime.models.shape import shape_of, tiny_shape
from vime.models.tiny import make_tiny
from vime.models.weight import join_qkv, join_rows, split_halves, split_qkv
from vime.plan.checks import check_model
from vime.plan.memory import trainer_memory
from vime.plan.parameters import count

PUBLISHED = {
    "qwen3": QWEN3_4B,
    "qwen3_moe": QWEN3_30B_A3B,
    "glm4_moe": GLM45_AIR,
    "llama": LLAMA31_8B,
    "qwen2": QWEN25_7B,
}
ONE_SIZE = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 96, "vocabulary": 100}


def _folder(path: Path, published: dict[str, Any] = QWEN3_4B, **changes: Any) -> Path:
    config = {**published, **changes}
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "absent"}))
    return path


def test_the_published_config_is_understood(tmp_path: Path) -> None:
    made = architecture(_folder(tmp_path))
    assert (made.shape.layers, made.shape.vocabulary, made.rotary_base) == (36, 151936, 1e6)
    assert made.transformer["num_query_groups"] == 8
    assert made.output is None


@pytest.mark.parametrize(
    ("published", "billions"),
    [
        (QWEN3_4B, 4.022),
        (QWEN3_30B_A3B, 30.53),
        (GLM45_AIR, 106.85),
        (LLAMA31_8B, 8.030),
        (LLAMA32_1B, 1.236),
        (QWEN25_7B, 7.616),
        (QWEN25_05B, 0.494),
    ],
)
def test_a_published_model_has_the_parameters_that_it_is_named_for(
    tmp_path: Path, published: dict[str, Any], billions: float
) -> None:
    assert count(read_shape(_folder(tmp_path, published))) / 1e9 == pytest.approx(billions, rel=1e-3)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_family_says_of_itself_is_what_its_models_are(tmp_path: Path, name: str) -> None:
    found, shape = family(name, "test"), read_shape(_folder(tmp_path, PUBLISHED[name]))
    assert shape.family == name
    assert (shape.experts > 0) == found.experts
    for key in ("qk_norm", "qkv_bias"):
        assert getattr(found, key) in (None, getattr(shape, key))
    assert architecture(tmp_path).shape == shape


def test_layers_with_experts_are_those_of_the_configuration(tmp_path: Path) -> None:
    shape = read_shape(_folder(tmp_path, QWEN3_30B_A3B, decoder_sparse_step=2, mlp_only_layers=[3]))
    assert [layer for layer in range(9) if shape.has_experts(layer)] == [1, 5, 7]
    assert not any(read_shape(_folder(tmp_path)).has_experts(layer) for layer in range(36))


def test_a_scaled_rotary_embedding_is_transformers(tmp_path: Path) -> None:
    """Numbers that Megatron-core's own scaling does not take, in both places that configurations keep them in."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3",
        "factor": 3.0,
        "low_freq_factor": 1.5,
        "high_freq_factor": 5.0,
        "original_max_position_embeddings": 300,
    }
    plain = 1.0 / (5e5 ** (torch.arange(0, 128, 2, dtype=torch.float32) / 128))
    old = architecture(_folder(tmp_path, LLAMA31_8B, rope_scaling=scaling)).rotary_scaling
    changes = {"rope_scaling": "absent", "rope_theta": "absent", "rope_parameters": {**scaling, "rope_theta": 5e5}}
    new = architecture(_folder(tmp_path, LLAMA31_8B, **changes)).rotary_scaling
    assert old is not None
    assert new is not None
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig.from_pretrained(tmp_path))
    assert torch.equal(old(plain), expected)
    assert torch.equal(new(plain), expected)
    assert not torch.allclose(expected, plain)
    assert architecture(_folder(tmp_path, LLAMA31_8B, rope_scaling=None)).rotary_scaling is None


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
        ({"model_type": "qwen5"}, ["model_type 'qwen5' is not supported", "qwen3_moe, glm4_moe, llama, qwen2"]),
        ({"model_type": "absent"}, ["model_type is missing", "qwen3, qwen3_moe"]),
        ({"attention_dropout": 0.1}, ["attention_dropout=0.1"]),
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


LLAMA_SCALING = LLAMA31_8B["rope_scaling"]


@pytest.mark.parametrize(
    ("published", "changes", "reason"),
    [
        (GLM45_AIR, {"head_dim": "absent"}, "head_dim is missing"),
        (QWEN3_30B_A3B, {"head_dim": "absent"}, "head_dim is missing"),
        (LLAMA31_8B, {"hidden_size": "absent"}, "hidden_size is missing"),
        (LLAMA31_8B, {"num_attention_heads": 31}, "hidden_size=4096 is not a multiple of num_attention_heads=31"),
        (LLAMA31_8B, {"attention_bias": True}, "attention_bias=True is not supported: it must be False"),
        (LLAMA31_8B, {"mlp_bias": True}, "mlp_bias=True is not supported: it must be False"),
        (LLAMA31_8B, {"attention_dropout": 0.1}, "attention_dropout=0.1 is not supported: it must be less than or"),
        (
            LLAMA31_8B,
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "rope_scaling.rope_type='yarn' is not supported: it must be 'default' or 'llama3'",
        ),
        (LLAMA31_8B, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.type='linear' is not known"),
        (
            LLAMA31_8B,
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "rope_scaling: low_freq_factor is missing for rope_type=llama3",
        ),
        (
            LLAMA31_8B,
            {"rope_scaling": LLAMA_SCALING | {"low_freq_factor": 4.0}},
            "rope_scaling: low_freq_factor=4.0 is not below high_freq_factor=4.0",
        ),
        (LLAMA31_8B, {"rope_scaling": {"factor": 8.0}}, "rope_scaling: factor=8.0 needs rope_type=llama3"),
        (LLAMA31_8B, {"rope_parameters": {"rope_theta": 5e5}}, "rope_scaling and rope_parameters are both given"),
        (LLAMA31_8B, {"rope_theta": "absent"}, "the rotary base is missing"),
        (LLAMA31_8B, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not known"),
        (QWEN25_7B, {"use_sliding_window": True}, "use_sliding_window=True is not supported: it must be False"),
        (QWEN25_7B, {"use_mrope": True}, "use_mrope=True is not supported"),
        (QWEN25_7B, {"layer_types": ["sliding_attention"] * 28}, "layer_types.0='sliding_attention' is not supported"),
        (QWEN25_7B, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling={'rope_type': 'yarn'"),
        (QWEN25_7B, {"head_dim": 64}, "head_dim=64 is not hidden_size / num_attention_heads = 3584 / 28"),
        (QWEN25_7B, {"attention_dropout": 0.5}, "attention_dropout=0.5 is not supported"),
    ],
)
def test_each_family_refuses_in_one_line(
    tmp_path: Path, published: dict[str, Any], changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UserError) as caught:
        read_shape(_folder(tmp_path, published, **changes))
    assert str(caught.value).startswith(f"{tmp_path}/config.json: {reason}")
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "llama", "qk_norm": True}, "model.shape.qk_norm=true: in llama it is false"),
        ({"family": "qwen2", "qkv_bias": False}, "model.shape.qkv_bias=false: in qwen2 it is true"),
        ({"family": "qwen3", "experts": 8}, "model.shape.experts=8: qwen3 has none"),
        ({"family": "glm4_moe"}, "model.shape.experts=0: glm4_moe is a mixture of experts"),
        ({"family": "lama"}, "model.shape.family=lama is not supported (supported: qwen3, qwen3_moe, glm4_moe, llama"),
    ],
)
def test_a_declared_shape_that_its_family_cannot_have(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        shape_of(Model(shape=Shape(**ONE_SIZE, context=64, **changes)))
    assert str(caught.value).startswith(message)


def test_a_declared_shape_has_what_its_family_fixes() -> None:
    made = {name: shape_of(Model(shape=Shape(**ONE_SIZE, context=64, family=name))) for name in ("llama", "qwen2")}
    assert (made["llama"].qk_norm, made["llama"].qkv_bias) == (False, False)
    # A bias each for 4 query heads and twice 2 key-value heads of 16, in two layers.
    assert count(made["qwen2"]) - count(made["llama"]) == 2 * (4 + 2 * 2) * 16


@pytest.mark.parametrize(
    ("tiny", "message"),
    [
        ({"family": "qwen4"}, "model.tiny.family=qwen4 is not supported (supported: qwen3, qwen3_moe, glm4_moe, llama"),
        ({"experts": 4}, "model.tiny.experts=4 with model.tiny.family=qwen3, which has none"),
        ({"family": "qwen3_moe"}, "model.tiny.experts=0 with model.tiny.family=qwen3_moe, which is a mixture of expe"),
        ({"family": "glm4_moe", "experts": 4, "dense_layers": 4}, "model.tiny.dense_layers=4 leaves none of model"),
        ({"family": "qwen2", "head_dim": 64}, "model.tiny: head_dim=64 is not hidden_size / num_attention_heads"),
    ],
)
def test_a_tiny_model_that_its_family_cannot_be(tmp_path: Path, tiny: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        shape_of(Model(tiny=TinyModel(**tiny)))
    assert str(caught.value).startswith(message)


def test_a_family_is_added_by_one_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As vime.models.family says: a file, and its line in the table. Everything that asks the family then knows it."""
    (tmp_path / "toy_family.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(FAMILIES, "toy", "toy_family")
    folder = tmp_path / "hf"
    folder.mkdir()
    _folder(folder, LLAMA32_1B, model_type="toy", depth_scale=1)
    made = architecture(folder)
    assert (made.shape.family, made.shape.qkv_bias, made.shape.layers) == ("toy", True, 16)
    assert "model.layers.2.self_attn.q_proj.bias" in [name for one in made.layer_weights(2, 0) for name in one.hf]
    overrides = ["model.tiny=null", "model.warmup=null", f"model.path={folder}"]
    checked = compose("local", "tiny_sft", [*overrides, "training.max_tokens_per_microbatch=131072"], check=check_model)
    toy, llama = (
        trainer_memory(checked, shape_of(Model(shape=Shape(**ONE_SIZE, context=64, family=name))))
        for name in ("toy", "llama")
    )
    assert toy.parameters > llama.parameters
    assert tiny_shape(TinyModel(family="toy", layers=3)).layers == 3
    with pytest.raises(UserError, match="depth_scale=2 is not supported: it must be 1"):
        read_shape(_folder(folder, LLAMA32_1B, model_type="toy", depth_scale=2))


TOY = """
from typing import Literal

from vime.models import decoder
from vime.models.family import Family
from vime.models.llama import HfConfig as LlamaConfig

class HfConfig(LlamaConfig):
    depth_scale: Literal[1] = 1

def shape(hf):
    return decoder.decoder_shape("toy", hf, qkv_bias=True)

def architecture(hf):
    return decoder.decoder_architecture(hf, shape(hf))

FAMILY = Family(HfConfig, shape, architecture, qkv_bias=True)
"""


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


def test_shards_are_written_and_read_slice_by_slice(tmp_path: Path) -> None:
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
        assert torch.equal(reader.slice(name, None, 0, 4), tensor)
        assert torch.equal(reader.slice(name, 0, 3, 4), tensor[6:])
        assert torch.equal(reader.slice(name, 1, 1, 2), tensor[:, 2:])
        assert torch.equal(reader.rows(name, 7, 10), tensor[7:])
        assert reader.rows(name, 9, 8).shape == (0, 4)
    with pytest.raises(UserError, match="t0: 8 along axis 0 does not divide by tensor_parallel=3"):
        reader.slice("t0", 0, 0, 3)
    with pytest.raises(UserError, match="no tensor 'missing'"):
        reader.slice("missing", None, 0, 1)


def test_a_tiny_model_is_the_same_twice(tmp_path: Path) -> None:
    tiny = TinyModel(layers=2, hidden=32, heads=2, kv_heads=1, head_dim=16, ffn=48)
    make_tiny(tiny, tmp_path / "a")
    torch.rand(3)
    make_tiny(tiny, tmp_path / "b")
    a, b = load_file(tmp_path / "a" / "model.safetensors"), load_file(tmp_path / "b" / "model.safetensors")
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert read_shape(tmp_path / "a").layers == 2


def test_left_over_and_missing_tensors_are_named(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert HfReader(tmp_path).names == {"a"}
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"neither model\.safetensors nor"):
        HfReader(tmp_path)
