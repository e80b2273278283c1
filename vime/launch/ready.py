"""What a dry run may leave open and a submission may not."""

from __future__ import annotations

from vime.config import Config
from vime.errors import UserError
from vime.rollout.check import check_data


def check_ready(config: Config) -> None:
    """Refuse what can be planned but not run yet. Raises UserError with one line about the first such thing."""
    model, data = config.model, config.data
    if model.tiny is None and model.path is None:
        named = f" of {model.name}" if model.name else ""
        download = f", made by `hf download {model.name} --local-dir FOLDER`" if model.name else ""
        raise UserError(f"model.path is not set: give the folder{named}, model.path=FOLDER{download}")
    if data.source == "jsonl" and data.path is None:
        raise UserError(f"data.path is not set: give the JSONL file of {data.name}, data.path=FILE")
    folders = config.algorithm.folders
    if model.path is not None or folders:
        # Reads the family's own rules; imported here because it brings torch.
        from vime.models.family import architecture

        policy = architecture(model.path) if model.path is not None else None
        words = policy.vocabulary if policy is not None else None
        if policy is not None and policy.tied:
            _check_tied(config, policy.model_type, f"{model.path}/config.json has tie_word_embeddings")
        for key, folder in folders.items():
            other = architecture(folder).vocabulary
            if words is not None and other != words:
                raise UserError(f"{key}={folder} has a vocabulary of {other} words, and model.path one of {words}")
    if model.tiny is not None and model.tiny.tied_embeddings:
        _check_tied(config, model.tiny.family, "model.tiny.tied_embeddings is")
    check_data(config)


def _check_tied(config: Config, family: str, where: str) -> None:
    """vLLM's GLM-4.5 always has an output layer of its own: without a tensor for it, it would answer noise."""
    if family == "glm4_moe" and config.rollout.engines:
        raise UserError(f"{where} true, and vLLM cannot tie the embeddings of {family}: it must be false")
