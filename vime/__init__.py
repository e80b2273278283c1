"""vime: reinforcement-learning post-training of language models on SLURM clusters."""
