"""How a problem becomes token ids, by one declared policy: the chat template, plain text, or a function of the user's.

Special tokens are never added a second time: a chat template decides about them alone, plain text gets a
beginning-of-sequence token when `data.add_bos` says so, and the tokenizer's own habit of adding some is switched off.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from vime.config import Data
from vime.errors import UserError
from vime.import_path import load_function
from vime.rollout.problem import Problem

Format = Callable[[Problem], list[int]]


def load_tokenizer(model: Path) -> Any:
    """The tokenizer of a Hugging Face folder, without the network and without code from the folder."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(f"{model}: its tokenizer does not load: {error}") from error


def make_format(data: Data, tokenizer: Any) -> Format:
    """The function that renders problems by `data.format`. Raises UserError when the tokenizer cannot do it."""
    if data.format == "chat":
        if not tokenizer.chat_template:
            raise UserError(
                "data.format=chat, but the model's tokenizer has no chat template;"
                " use data.format=text, or module:function"
            )
        return lambda problem: _checked(_chat(problem, tokenizer, data), tokenizer, "data.format=chat")
    if data.format == "text":
        if data.add_bos and tokenizer.bos_token_id is None:
            raise UserError("data.add_bos is true, but the model's tokenizer has no beginning-of-sequence token")
        return lambda problem: _checked(_text(problem, tokenizer, data.add_bos), tokenizer, "data.format=text")
    function = load_function(data.format, "data.format")
    return lambda problem: _checked(
        _custom(problem, tokenizer, function, data.format), tokenizer, f"data.format={data.format}"
    )


def answer_ids(answer: str, tokenizer: Any) -> list[int]:
    """The answer's own tokens, without any special ones."""
    return list(tokenizer(answer, add_special_tokens=False)["input_ids"])


def _chat(problem: Problem, tokenizer: Any, data: Data) -> list[int]:
    messages = problem.prompt
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    tools = problem.record.get(data.tools_key) if data.tools_key else None
    try:
        text = tokenizer.apply_chat_template(
            messages, tools=tools or data.tools or None, tokenize=False, add_generation_prompt=True, **data.chat_args
        )
    except Exception as error:
        raise UserError(
            f"data.format=chat: the chat template failed on prompt {problem.uid}, {_short(problem)}:"
            f" {type(error).__name__}: {error}"
        ) from error
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _text(problem: Problem, tokenizer: Any, add_bos: bool) -> list[int]:
    if not isinstance(problem.prompt, str):
        raise UserError("data.format=text, but a prompt is a list of messages; use data.format=chat")
    ids = list(tokenizer(problem.prompt, add_special_tokens=False)["input_ids"])
    return [tokenizer.bos_token_id, *ids] if add_bos else ids


def _custom(problem: Problem, tokenizer: Any, function: Callable[..., Any], name: str) -> list[int]:
    """`function(record, tokenizer)` gives the prompt's token ids; `record` is the source's own."""
    try:
        ids = list(function(problem.record, tokenizer))
    except Exception as error:
        raise UserError(
            f"data.format={name} raised {type(error).__name__}: {error}, on prompt {problem.uid}: {_short(problem)}"
        ) from error
    size = len(tokenizer)
    if not all(isinstance(token, int) and 0 <= token < size for token in ids):
        raise UserError(f"data.format={name} must give a list of token ids from 0 to {size - 1}")
    return ids


def _short(problem: Problem) -> str:
    text = repr(problem.prompt)
    return text if len(text) <= 80 else text[:77] + "..."


def _checked(ids: list[int], tokenizer: Any, what: str) -> list[int]:
    if not ids:
        raise UserError(f"{what} gave a prompt without tokens")
    bos = tokenizer.bos_token_id
    if bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos:
        raise UserError(
            f"{what} gave a prompt that begins with two beginning-of-sequence tokens: the chat template or the text"
            " has one of its own; remove it, or set data.add_bos=false"
        )
    return ids
