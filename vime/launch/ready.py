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

        words = architecture(model.path).vocabulary if model.path is not None else None
        for key, folder in folders.items():
            other = architecture(folder).vocabulary
            if words is not None and other != words:
                raise UserError(f"{key}={folder} has a vocabulary of {other} words, and model.path one of {words}")
    check_data(config)
