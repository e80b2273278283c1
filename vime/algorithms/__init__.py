"""Advantages and losses as plain torch functions of flat tensors: no Megatron, no files, no communication.

N samples, T tokens (the response tokens of any number of samples, one after the other). The loss of a step is a sum of
per-token losses times token weights that add up to 1 over the whole batch, so it is the same however the tokens are
split into microbatches and ranks.
"""
