"""Model families: one file each, Hugging Face <-> Megatron in both directions, built from the Hugging Face config alone."""
