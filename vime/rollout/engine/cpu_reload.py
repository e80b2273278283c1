"""The one repair of vLLM that vime needs: what a weight update leaves stale on a CPU.

vLLM's CPU kernels read packed copies of some weights. They are made when a model is first loaded, and two kinds are not
made again by a layerwise reload (vLLM 0.30.0). Nothing fails; only the logprobs are wrong.

- Unquantized experts: `UnquantizedFusedMoEMethod._setup_kernel` packs w13 and w2 on the first load only, so a reload
  leaves them in checkpoint layout, which the kernel reads as if it were packed. Off by 0.07 to 0.2.
- An output layer tied to the embedding: the checkpoint has no tensor for it, so the reload puts its parameter back,
  which is the embedding's new one, but not the packed copy that its product uses. The old output layer stays. Off by 2.

When a later version packs on reload, packing experts twice would be as wrong, so `repack` refuses any other version
rather than guess.
"""

from __future__ import annotations

import torch

CHECKED_VERSIONS = ("0.30.",)


def repack(model: torch.nn.Module) -> int:
    """Makes the packed copies that a layerwise reload left out; to be called once, right after it.

    Returns how many layers were packed: 0 on a GPU. Raises RuntimeError for a vLLM whose reload was not checked.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return 0
    return sum(_repack_experts(layer) or _repack_output(layer) for layer in model.modules())


def _repack_experts(layer: torch.nn.Module) -> bool:
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    method = getattr(layer, "quant_method", None)
    if not isinstance(method, UnquantizedFusedMoEMethod) or method.moe_kernel is None:
        return False
    if method.unquantized_backend != UnquantizedMoeBackend.CPU:
        return False
    _check_version()
    method.moe_kernel.fused_experts.process_weights_after_loading(layer)
    return True


def _repack_output(layer: torch.nn.Module) -> bool:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

    method = getattr(layer, "quant_method", None)
    if not isinstance(layer, ParallelLMHead) or not isinstance(method, UnquantizedEmbeddingMethod):
        return False
    # The weight itself is kept beside the packed copy, so packing an output layer that was packed already is no harm.
    method.process_weights_after_loading(layer)
    return True


def _check_version() -> None:
    from vllm.version import __version__

    if not __version__.startswith(CHECKED_VERSIONS):
        raise RuntimeError(
            f"vLLM {__version__}: whether a weight update packs CPU expert weights was checked only for"
            f" {', '.join(version + 'x' for version in CHECKED_VERSIONS)}; see vime/rollout/engine/cpu_reload.py"
        )
