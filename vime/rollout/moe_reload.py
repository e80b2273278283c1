"""The one patch of vLLM that vime needs: CPU expert weights after a weight update.

On a CPU, vLLM's unquantized experts keep w13 and w2 in a packed layout. `UnquantizedFusedMoEMethod._setup_kernel` packs
them when a model is first loaded and not again: a layerwise reload leaves them in checkpoint layout, which the kernel
then reads as if it were packed. Nothing fails and parameter sums agree, but logprobs are off by 0.07 to 0.2. Seen in
vLLM 0.30.0; when a later version packs on reload, packing twice would be as wrong, so `repack_cpu_experts` refuses any
other version rather than guess.
"""

from __future__ import annotations

import torch

CHECKED_VERSIONS = ("0.30.",)


def repack_cpu_experts(model: torch.nn.Module) -> int:
    """Packs the experts of `model` that a layerwise reload left unpacked; to be called once, right after it.

    Returns how many expert layers were packed: 0 for a dense model and on a GPU. Raises RuntimeError for a vLLM whose
    reload was not checked.
    """
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.version import __version__

    packed = 0
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if not isinstance(method, UnquantizedFusedMoEMethod) or method.moe_kernel is None:
            continue
        if method.unquantized_backend != UnquantizedMoeBackend.CPU:
            continue
        if not __version__.startswith(CHECKED_VERSIONS):
            raise RuntimeError(
                f"vLLM {__version__}: whether a weight update packs CPU expert weights was checked only for"
                f" {', '.join(v + 'x' for v in CHECKED_VERSIONS)}; see vime/rollout/moe_reload.py"
            )
        method.moe_kernel.fused_experts.process_weights_after_loading(layer)
        packed += 1
    return packed
