"""What a prompt cursor belongs to: hashes of the problems and of all that makes prompts of them.

The cursor carries them into every batch and checkpoint. A file that was edited between two attempts would otherwise ask
some prompts twice and others never, without a word.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from vime.config import Data
from vime.rollout.data.sources import Problems

Fingerprint = dict[str, Any]
_SETTINGS = ("template", "prompt_key", "answer_key", "format", "chat_args", "tools", "tools_key", "add_bos", "shuffle")


def fingerprint(problems: Problems, data: Data, chat_template: str | None = None) -> Fingerprint:
    """Hashes of training and held-out problems and of the settings that make prompts of them, as JSON.

    chat_template: the tokenizer's. Without it, as on a login node, it is not compared.
    """
    found: Fingerprint = {
        "problems": len(problems.training),
        "prompts": _hash(problem.uid for problem in problems.training),
        "records": _hash(problem.identity for problem in problems.training),
        "held_out": _hash(problem.identity for problem in problems.held_out),
    }
    values = data.model_dump(mode="json")
    found |= {name: _hash([json.dumps(values[name], sort_keys=True)]) for name in _SETTINGS}
    if data.format == "chat" and chat_template is not None:
        found["chat_template"] = _hash([chat_template])
    return found


def changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two fingerprints, in words; what only one of them knows does not count."""
    different = [name for name in now if name in saved and saved[name] != now[name]]
    words = []
    if "problems" in different:
        words.append(f"{saved['problems']} training problems then, {now['problems']} now")
    elif "prompts" in different:
        words.append("other prompts, or in another order")
    elif "records" in different:
        words.append("other answers, or other fields of the records")
    if "held_out" in different:
        words.append("other held-out problems")
    words += [f"another data.{name}" for name in _SETTINGS if name in different]
    return words + ["another chat template of the model"] * ("chat_template" in different)


def _hash(parts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)}:{part}".encode(errors="replace"))
    return digest.hexdigest()[:12]
