"""Imported once, by the process that ranks are forks of: Megatron, set up for the CPU, and what jobs need of vime."""

import gc

import torch

from vime.training import cpu

torch.set_num_threads(1)
cpu.enable()

import vime.training.checkpoint.checkpoints  # noqa: E402
import vime.training.learner  # noqa: E402
import vime.training.weights.hf_export  # noqa: E402, F401

# What is frozen no collection looks at again: half a million objects, which took longer than most jobs. And no fork
# copies their pages.
gc.collect()
gc.freeze()
