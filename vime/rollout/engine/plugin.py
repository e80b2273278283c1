"""What vime adds to vLLM: loaded by vLLM in each of its processes (entry point group vllm.general_plugins)."""

from __future__ import annotations

import os


def register() -> None:
    """Registers vime's weight-transfer backends and ties this process's life to its parent's.

    Called by every vLLM of an environment that vime is installed in, more than once in some processes. Outside a vime
    run (no VIME_ROLE) it does nothing.
    """
    if "VIME_ROLE" not in os.environ:
        return
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from vime.run.role import die_with_parent

    die_with_parent()
    if "gloo" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("gloo", "vime.rollout.engine.gloo_receiver", "GlooTransferEngine")
        # In the place of vLLM's own. `register_engine` refuses a name that is taken.
        WeightTransferEngineFactory._registry.pop("nccl", None)
        WeightTransferEngineFactory.register_engine("nccl", "vime.rollout.engine.nccl_receiver", "NcclTransferEngine")
