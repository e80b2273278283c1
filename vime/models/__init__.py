"""Model families: one file each, Hugging Face <-> Megatron both ways, built from the Hugging Face config alone."""
