"""What the families' decoders have in common: configuration, shape, settings and weights, by both sides' names.

Hugging Face keeps query, key and value apart, and gate and up projection too; Megatron joins them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from vime.config import Shape
from vime.models.family import Architecture
from vime.models.weight import Weight, join_qkv, join_rows, split_halves, split_qkv

if TYPE_CHECKING:
    from torch import Tensor


class Rope(BaseModel):
    """Rotary embedding; only the unscaled kind."""

    model_config = ConfigDict(extra="forbid", strict=True)
    rope_theta: float
    rope_type: Literal["default"] = "default"
    partial_rotary_factor: float | None = None


def rotary_base(rope_theta: float | None, parameters: Rope | None) -> float:
    """The rotary base, from either place that configs keep it in. Raises ValueError when none or two different are."""
    if rope_theta is None and parameters is None:
        raise ValueError("the rotary base is missing: give rope_theta or rope_parameters.rope_theta")
    if rope_theta is not None and parameters is not None and rope_theta != parameters.rope_theta:
        raise ValueError(f"rope_theta={rope_theta} contradicts rope_parameters.rope_theta={parameters.rope_theta}")
    return parameters.rope_theta if parameters is not None else rope_theta  # type: ignore[return-value]


def check_whole_rotary(parameters: Rope | None) -> None:
    """Raises ValueError when only a share of each head would be rotated, in families that rotate all of it."""
    if parameters is not None and parameters.partial_rotary_factor not in (None, 1.0):
        raise ValueError(
            f"rope_parameters.partial_rotary_factor={parameters.partial_rotary_factor} is not supported: it must be 1"
        )


def check_heads(heads: int, kv_heads: int) -> None:
    """Raises ValueError unless query heads divide over key-value heads."""
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")


def derive_head_dim(config: Any) -> Any:
    """Adds head_dim = hidden_size / num_attention_heads where it is missing, in families that leave it out.

    For a `before` validator. Raises ValueError when the one is no multiple of the other.
    """
    if not isinstance(config, dict) or config.get("head_dim") is not None:
        return config
    width, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if not isinstance(width, int) or not isinstance(heads, int) or heads < 1:
        return {key: value for key, value in config.items() if key != "head_dim"}  # refused by name
    if width % heads:
        raise ValueError(f"hidden_size={width} is not a multiple of num_attention_heads={heads}")
    return config | {"head_dim": width // heads}


def check_layer_types(layer_types: list[Any] | None, layers: int) -> None:
    """Raises ValueError when a list of layer kinds has another length than the layers."""
    if layer_types is not None and len(layer_types) != layers:
        raise ValueError(f"layer_types has {len(layer_types)} entries for num_hidden_layers={layers}")


class HfDecoder(BaseModel):
    """What the configurations of all families have; each adds its own. Anything else is refused by name."""

    model_config = ConfigDict(extra="forbid", strict=True)
    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    num_hidden_layers: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int = Field(ge=1)
    head_dim: int = Field(ge=2)
    vocab_size: int = Field(ge=1)
    max_position_embeddings: int = Field(32768, ge=1)
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    hidden_act: Literal["silu"] = "silu"
    attention_dropout: float = Field(0.0, ge=0, le=0)
    tie_word_embeddings: bool = False
    rope_theta: float | None = None
    rope_scaling: None = None
    rope_parameters: Rope | None = None

    @property
    def rotary_base(self) -> float:
        """The rotary base."""
        return rotary_base(self.rope_theta, self.rope_parameters)

    @model_validator(mode="after")
    def _heads_and_rotary_agree(self) -> HfDecoder:
        check_heads(self.num_attention_heads, self.num_key_value_heads)
        rotary_base(self.rope_theta, self.rope_parameters)
        return self


def decoder_shape(
    family: str, hf: HfDecoder, *, qk_norm: bool = False, qkv_bias: bool = False, **experts: Any
) -> Shape:
    """The sizes of a configuration. experts: those keys of Shape that are about experts."""
    return Shape(
        family=family,
        layers=hf.num_hidden_layers,
        hidden=hf.hidden_size,
        heads=hf.num_attention_heads,
        kv_heads=hf.num_key_value_heads,
        head_dim=hf.head_dim,
        ffn=hf.intermediate_size,
        vocabulary=hf.vocab_size,
        context=hf.max_position_embeddings,
        tied_embeddings=hf.tie_word_embeddings,
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        **experts,
    )


def decoder_architecture(
    hf: HfDecoder,
    shape: Shape,
    *,
    router: dict[str, Any] | None = None,
    expert_layer: Callable[[str, str], Iterator[Weight]] | None = None,
    rotary_share: float = 1.0,
    rotary_scaling: Callable[[Tensor], Tensor] | None = None,
    kept_aside: tuple[str, ...] = (),
) -> Architecture:
    """A decoder with grouped-query attention, gated SiLU feed-forward layers or experts, and RMSNorm.

    router: Megatron's settings of how a router scores.
    expert_layer: prefixes of a layer with experts, `decoder.layers.0.mlp.` and `model.layers.3.mlp.` -> its weights.
    The rest as in Architecture.
    """

    def layer_weights(layer: int, local: int) -> list[Weight]:
        ours, theirs = f"decoder.layers.{local}.", f"model.layers.{layer}."
        feed_forward = mlp_weights(ours + "mlp.", theirs + "mlp.")
        if shape.has_experts(layer):
            assert expert_layer is not None, "a family with experts says what their weights are"
            feed_forward = expert_layer(ours + "mlp.", theirs + "mlp.")
        return [*attention_weights(ours, theirs, shape), *feed_forward]

    return Architecture(
        shape=shape,
        transformer=_transformer(hf, shape) | (router or {}),
        layer_weights=layer_weights,
        embedding=EMBEDDING,
        final_norm=FINAL_NORM,
        output=None if shape.tied_embeddings else OUTPUT,
        rotary_base=hf.rotary_base,
        rotary_share=rotary_share,
        rotary_scaling=rotary_scaling,
        kept_aside=kept_aside,
    )


def _transformer(hf: HfDecoder, shape: Shape) -> dict[str, Any]:
    import torch.nn.functional as F

    settings = dict(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        layernorm_epsilon=hf.rms_norm_eps,
        init_method_std=hf.initializer_range,
        normalization="RMSNorm",
        qk_layernorm=bool(shape.qk_norm),
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=bool(shape.qkv_bias),
    )
    if not shape.experts:
        return settings
    return settings | dict(
        num_moe_experts=shape.experts,
        moe_router_topk=shape.top_k,
        moe_ffn_hidden_size=shape.expert_ffn,
        moe_shared_expert_intermediate_size=shape.shared_expert_ffn or None,
        moe_layer_freq=[int(shape.has_experts(layer)) for layer in range(shape.layers)],
        # Near-ties between experts must not be decided by the rounding of a narrow type.
        moe_router_dtype="fp32",
        # The policy gradient alone trains the router: the engine knows no balance of experts.
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
    )


def attention_weights(ours: str, theirs: str, shape: Shape) -> Iterator[Weight]:
    """Both norms of a layer and its attention. ours, theirs: the layer's prefixes, such as `model.layers.3.`."""
    queries_per_group = shape.heads // shape.kv_heads
    join, split = join_qkv(shape.head_dim, queries_per_group), split_qkv(shape.head_dim, queries_per_group)
    attention = theirs + "self_attn."
    yield Weight(ours + "input_layernorm.weight", (theirs + "input_layernorm.weight",))
    for kind in ("weight", "bias") if shape.qkv_bias else ("weight",):
        yield Weight(
            f"{ours}self_attention.linear_qkv.{kind}",
            tuple(f"{attention}{name}_proj.{kind}" for name in "qkv"),
            axis=0,
            join=join,
            split=split,
        )
    if shape.qk_norm:
        yield Weight(ours + "self_attention.q_layernorm.weight", (attention + "q_norm.weight",))
        yield Weight(ours + "self_attention.k_layernorm.weight", (attention + "k_norm.weight",))
    yield Weight(ours + "self_attention.linear_proj.weight", (attention + "o_proj.weight",), axis=1)
    yield Weight(ours + "pre_mlp_layernorm.weight", (theirs + "post_attention_layernorm.weight",))


def mlp_weights(ours: str, theirs: str, expert: int | None = None) -> Iterator[Weight]:
    """A gated feed-forward layer, of an expert or of its own. ours, theirs: prefixes, such as `...layers.3.mlp.`."""
    yield Weight(
        ours + "linear_fc1.weight",
        (theirs + "gate_proj.weight", theirs + "up_proj.weight"),
        axis=0,
        join=join_rows,
        split=split_halves,
        expert=expert,
    )
    yield Weight(ours + "linear_fc2.weight", (theirs + "down_proj.weight",), axis=1, expert=expert)


def expert_weights(ours: str, theirs: str, experts: int) -> Iterator[Weight]:
    """The experts of a layer, one after the other. ours, theirs: prefixes, such as `...layers.3.mlp.`."""
    for expert in range(experts):
        yield from mlp_weights(f"{ours}experts.{expert}.", f"{theirs}experts.{expert}.", expert)


EMBEDDING = Weight("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), axis=0)
FINAL_NORM = Weight("decoder.final_layernorm.weight", ("model.norm.weight",))
OUTPUT = Weight("output_layer.weight", ("lm_head.weight",), axis=0)
