"""Random Qwen3 folders of any size: what `make_tiny` makes, with another vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from vime.config import TinyModel
from vime.models.tiny import make_tiny

EMBEDDING = "model.embed_tokens.weight"


def make_model(tiny: TinyModel, folder: Path, vocabulary: int | None = None) -> int:
    """Write the model, with `vocabulary` rows of embedding when given. Returns its number of parameters.

    The tokens beyond the tokenizer's have weights and no text, as the padded vocabularies of real models do.
    """
    make_tiny(tiny, folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    if vocabulary is not None:
        rows = torch.randn(vocabulary, tiny.hidden, generator=torch.Generator().manual_seed(tiny.seed))
        tensors[EMBEDDING] = rows * tiny.initializer_range
        save_file(tensors, path, metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"vocab_size": vocabulary}))
    return sum(tensor.numel() for tensor in tensors.values())
