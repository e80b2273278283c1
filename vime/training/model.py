"""The policy as a Megatron model: layer spec, packed forward pass, logprobs at the end of it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from vime.config import Config, Training
from vime.models.family import Architecture
from vime.models.hf_folder import torch_dtype
from vime.training.layers import PackedAttention, RMSNorm
from vime.training.logprobs import vocab_parallel_logprobs
from vime.training.pack import IGNORE, Pack
from vime.training.replay import ChunkReplay

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
        **_experts(architecture, training),
        **_recompute(training),
        tensor_model_parallel_size=training.tensor_parallel,
        pipeline_model_parallel_size=training.pipeline_parallel,
        virtual_pipeline_model_parallel_size=training.virtual_stages if training.virtual_stages > 1 else None,
        context_parallel_size=training.context_parallel,
        sequence_parallel=training.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        attention_softmax_in_fp32=True,
        # Losses are sums over tokens, weighted over the global batch: Megatron must neither average nor rescale.
        calculate_per_token_loss=True,
        **_pipeline(training),
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


def _pipeline(training: Training) -> dict[str, Any]:
    """How activations go from stage to stage.

    Packs differ in size, which stages tell each other first. With virtual stages each has messages for both of its
    neighbours at once, and of two stages those are the same rank: Megatron then mixes up the sizes, so packs are made
    equal instead, and messages are ordered by the parity of the stage.
    """
    if training.virtual_stages == 1:
        return dict(variable_seq_lengths=True)
    return dict(variable_seq_lengths=False, overlap_p2p_comm=True, batch_p2p_comm=False)


def _experts(architecture: Architecture, training: Training) -> dict[str, Any]:
    """Settings of a mixture-of-experts model's parallelism and kernels. A dense model beside one has no experts to
    divide, however those of the other are."""
    sparse = architecture.shape.experts > 0
    return dict(
        expert_model_parallel_size=training.expert_parallel if sparse else 1,
        expert_tensor_parallel_size=training.expert_tensor_parallel if sparse else training.tensor_parallel,
        # Also for a dense model: the default dispatcher is refused with packs of varying size.
        # All experts of a rank in one kernel call, which is Transformer Engine's.
        moe_grouped_gemm=HAVE_TRANSFORMER_ENGINE,
        moe_permute_fusion=HAVE_TRANSFORMER_ENGINE,
        moe_token_dispatcher_type="alltoall" if training.expert_dispatcher == "alltoall" else "flex",
        **({} if training.expert_dispatcher == "alltoall" else {"moe_flex_dispatcher_backend": "deepep"}),
    )


def _recompute(training: Training) -> dict[str, Any]:
    """Which activations are computed again in the backward pass instead of being kept."""
    if training.recompute == "none":
        return {}
    if training.recompute == "selective":  # the core attention of each layer
        return dict(recompute_granularity="selective")
    return dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


def block_spec(architecture: Architecture, config: TransformerConfig, stage: int | None) -> TransformerBlockSubmodules:
    """The layers of one model chunk: Transformer Engine's where it is installed, else Megatron's own.

    stage: the virtual pipeline stage, None without such. Megatron's own get packed attention.
    """
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=HAVE_TRANSFORMER_ENGINE, normalization="RMSNorm", vp_stage=stage
    )
    if HAVE_TRANSFORMER_ENGINE:
        return block
    for spec in block.layer_specs or ():
        layer = spec.submodules
        layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
        attention = layer.self_attention.submodules
        attention.core_attention = PackedAttention
        if architecture.shape.qk_norm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    block.layer_norm = RMSNorm
    return block


P = TypeVar("P", bound="Policy")


class Policy(GPTModel):
    """A GPT model, or one chunk of its layers, whose last stage returns logprobs and entropies instead of logits."""

    def __init__(
        self, architecture: Architecture, config: TransformerConfig, training: Training, stage: int | None = None
    ) -> None:
        """stage: the virtual pipeline stage that this chunk is, None without such."""
        shape, tensor_parallel = architecture.shape, config.tensor_model_parallel_size
        super().__init__(
            config,
            block_spec(architecture, config, stage),
            # Megatron divides the rows evenly over tensor-parallel ranks; those past the vocabulary are never used.
            vocab_size=-(-shape.vocabulary // tensor_parallel) * tensor_parallel,
            max_sequence_length=shape.context,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            share_embeddings_and_output_weights=shape.tied_embeddings,
            position_embedding_type="rope",
            rotary_percent=architecture.rotary_share,
            rotary_base=architecture.rotary_base,  # type: ignore[arg-type]  # used as a number; configs hold 1e6 and 1000000
            vp_stage=stage,
        )
        if architecture.rotary_scaling is not None:
            self.rotary_pos_emb.inv_freq = architecture.rotary_scaling(self.rotary_pos_emb.inv_freq)
        self.architecture = architecture
        self._chunk = training.logprob_chunk_tokens
        self.temperature = 1.0
        self.replay: ChunkReplay | None = None
        """Set on the one model that is trained by replayed routes."""

    def forward(self, *args: Any, routes: Tensor | None = None, **rest: Any) -> Tensor:  # type: ignore[override]
        """GPTModel's forward pass. routes: of the pack, which count only where `replay` is set."""
        with self.replay.replaying(routes) if self.replay is not None else nullcontext():
            return super().forward(*args, **rest)  # type: ignore[no-any-return]

    def _postprocess(self, hidden_states: Tensor, labels: Tensor | None = None, **rest: Any) -> Tensor:  # type: ignore[override]
        """Hidden states [tokens (/ TP), 1, width], labels [tokens] -> float32 [2, labelled tokens] on the last stage.

        The tokens are those of this context-parallel rank; `assemble` puts those of all together. Row 0 holds the
        logprobs of the labels that are not IGNORE, in order, row 1 the entropies. Only those tokens meet the output
        layer.
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
            vocabulary_size=self.architecture.shape.vocabulary,
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
        "routes": pack.routes,
    }


class _Assemble(torch.autograd.Function):
    """Each context-parallel rank's columns to their places, on every rank."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, columns: Tensor, total: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(columns)
        whole = output.new_zeros(output.shape[0], total)
        whole[:, columns] = output
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        # Every rank has the same loss of the whole pack; each is answerable for its own columns.
        (columns,) = ctx.saved_tensors
        return gradient[:, columns], None, None, None


def assemble(output: Tensor, pack: Pack) -> Tensor:
    """Output of the last stage, float32 [k, labelled tokens of this rank] -> [k, labelled tokens of the pack].

    Context-parallel ranks each computed a part; what follows, such as a loss, sees whole sequences on all of them.
    """
    if pack.columns is None:
        return output
    group = parallel_state.get_context_parallel_group()
    whole: Tensor = _Assemble.apply(output, pack.columns, len(pack.sample), group)
    return whole


def build(architecture: Architecture, config: Config, kind: type[P]) -> list[P]:
    """This rank's part of a model, on its device, with initial weights that are meant to be overwritten.

    One chunk of layers, or with virtual pipeline stages several, in order.
    """
    training = config.training
    shared = transformer_config(architecture, training, fused=config.cluster.device == "cuda")
    stages = range(training.virtual_stages) if training.virtual_stages > 1 else (None,)
    chunks = [kind(architecture, shared, training, stage) for stage in stages]
    set_temperature(chunks, config.rollout.temperature)
    return [chunk.cuda() for chunk in chunks]


def set_temperature(chunks: Sequence[Policy], temperature: float) -> float:
    """Compute logprobs of the distribution at this temperature from now on; returns the one before."""
    before = chunks[-1].temperature
    for chunk in chunks:
        chunk.temperature = temperature
    return before
