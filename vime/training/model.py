"""The policy as a Megatron model: layer spec, packed forward pass, logprobs at the end of it."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from vime.config import Config, Training
from vime.models.family import Architecture
from vime.models.hf_folder import torch_dtype
from vime.training.attention import PackedAttention
from vime.training.logprobs import vocab_parallel_logprobs
from vime.training.norm import RMSNorm
from vime.training.pack import IGNORE, Pack

try:
    import transformer_engine  # noqa: F401  # only whether it is there matters

    HAVE_TRANSFORMER_ENGINE = True
except ImportError:
    HAVE_TRANSFORMER_ENGINE = False


def transformer_config(architecture: Architecture, training: Training, *, fused: bool) -> TransformerConfig:
    """Megatron's configuration of the network and of its parallelism.

    fused: whether the kernels that exist on GPUs only may be used.
    """
    dtype = torch_dtype(training.dtype)
    return TransformerConfig(
        **architecture.transformer,
        tensor_model_parallel_size=training.tensor_parallel,
        pipeline_model_parallel_size=training.pipeline_parallel,
        sequence_parallel=training.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        attention_softmax_in_fp32=True,
        # Losses are sums over tokens, weighted over the global batch: Megatron must neither average nor rescale.
        calculate_per_token_loss=True,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=not fused,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        # Only initialisation marks a parameter as divided, by which gradient norms count each value once.
        perform_initialization=True,
    )


def layer_spec(architecture: Architecture) -> ModuleSpec | TransformerBlockSubmodules:
    """Transformer Engine's layers where it is installed, else Megatron's own with packed attention."""
    if HAVE_TRANSFORMER_ENGINE:
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=architecture.qk_norm)
    spec = get_gpt_layer_local_spec(qk_layernorm=architecture.qk_norm, normalization="RMSNorm")
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = PackedAttention
    if architecture.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    stage_layers = architecture.layers // parallel_state.get_pipeline_model_parallel_world_size()
    return TransformerBlockSubmodules(layer_specs=[spec] * stage_layers, layer_norm=RMSNorm)


P = TypeVar("P", bound="Policy")


class Policy(GPTModel):
    """A GPT model whose last stage returns logprobs and entropies instead of logits."""

    def __init__(self, architecture: Architecture, config: TransformerConfig, training: Training) -> None:
        tensor_parallel = config.tensor_model_parallel_size
        super().__init__(
            config,
            layer_spec(architecture),
            # Megatron divides the words evenly over tensor-parallel ranks; the rows past `vocabulary` are never used.
            vocab_size=-(-architecture.vocabulary // tensor_parallel) * tensor_parallel,
            max_sequence_length=architecture.context,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=architecture.tied,
            position_embedding_type="rope",
            rotary_percent=architecture.rotary_share,
            rotary_base=architecture.rotary_base,  # type: ignore[arg-type]  # used as a number; configs hold 1e6 and 1000000
        )
        self.architecture = architecture
        self._chunk = training.logprob_chunk_tokens
        self.temperature = 1.0

    def _postprocess(self, hidden_states: Tensor, labels: Tensor | None = None, **rest: Any) -> Tensor:  # type: ignore[override]
        """Hidden states [tokens (/ TP), 1, width], labels [tokens] -> float32 [2, labelled tokens] on the last stage.

        Row 0 holds the logprobs of the labels that are not IGNORE, in order, row 1 the entropies. Only those tokens
        meet the output layer.
        """
        if not self.post_process or labels is None:
            return super()._postprocess(hidden_states=hidden_states, labels=labels, **rest)  # type: ignore[no-any-return]
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=True)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden_states)
        wanted = labels != IGNORE
        weight = (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else self.output_layer.weight
        )
        logprobs, entropies = vocab_parallel_logprobs(
            hidden.squeeze(1)[wanted],
            weight,
            labels[wanted],
            temperature=self.temperature,
            vocabulary=self.architecture.vocabulary,
            chunk=self._chunk,
            group=parallel_state.get_tensor_model_parallel_group(),
        )
        return torch.stack([logprobs, entropies])


def inputs(pack: Pack) -> dict[str, Any]:
    """Keyword arguments of the policy's forward pass for one pack."""
    return {
        "input_ids": pack.token_ids.unsqueeze(0),
        "position_ids": pack.position_ids.unsqueeze(0),
        "attention_mask": None,
        "labels": pack.labels,
        "packed_seq_params": pack.params,
    }


def build(architecture: Architecture, config: Config, kind: type[P]) -> P:
    """This rank's part of the model, on its device, with initial weights that are meant to be overwritten."""
    fused = config.cluster.device == "cuda"
    model = kind(architecture, transformer_config(architecture, config.training, fused=fused), config.training)
    model.temperature = config.rollout.temperature
    return model.cuda()
