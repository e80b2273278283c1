"""Megatron ranks: model, batching, step, weight sync, checkpoints."""
