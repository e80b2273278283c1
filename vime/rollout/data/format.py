"""How a problem becomes token ids, by one declared policy: the chat template, plain text, or a function of the user's.

Special tokens are never added a second time: a chat template decides about them alone, plain text gets a
beginning-of-sequence token when `data.add_bos` says so, and the tokenizer's own habit of adding some is switched off.
"""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from vime.config import Data, Rollout
from vime.config.import_path import load_function, named_arguments
from vime.errors import UserError
from vime.rollout.data.problem import Problem
from vime.rollout.data.results import TokenIds
from vime.rollout.data.user_calls import CallFailed, CallTookTooLong, UserCalls, is_async

Format = Callable[[Problem], Awaitable[list[int]]]
"""Renders a problem. Raises FormatFailed for this problem alone, UserError for what concerns all of them."""
PROBES = 3


class FormatFailed(Exception):
    """A `data.format` of the user's gave no prompt for a problem. The text names function and problem."""

    def __init__(self, reason: str, problem: str) -> None:
        """`reason` is the same for other problems that fail alike."""
        super().__init__(f"{reason}, on {problem}")
        self.reason = reason


def load_tokenizer(model: Path) -> Any:
    """The tokenizer of a Hugging Face folder, without the network and without code from the folder."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(f"{model}: its tokenizer does not load: {error}") from error


def make_format(data: Data, tokenizer: Any, rollout: Rollout, calls: UserCalls) -> Format:
    """What renders problems by `data.format`, one after the other. Raises UserError when the tokenizer cannot do it."""
    what = f"data.format={data.format}"
    if data.format == "chat":
        if not tokenizer.chat_template:
            raise UserError(
                "data.format=chat, but the model's tokenizer has no chat template;"
                " use data.format=text, or module:function"
            )

        async def chat(problem: Problem) -> list[int]:
            return _checked(_chat(problem, tokenizer, data), tokenizer, what)

        return chat
    if data.format == "text":
        if data.add_bos and tokenizer.bos_token_id is None:
            raise UserError("data.add_bos is true, but the model's tokenizer has no beginning-of-sequence token")

        async def text(problem: Problem) -> list[int]:
            return _checked(_text(problem, tokenizer, data.add_bos), tokenizer, what)

        return text
    return _custom(data.format, tokenizer, rollout, calls)


async def probe_format(render: Format, problems: Sequence[Problem]) -> None:
    """Render PROBES problems that lie far apart, until one succeeds.

    Raises UserError when none does: a format that fails on all of them is wrong itself, and no engine needs to start.
    """
    failure: FormatFailed | None = None
    for problem in problems[:: -(-len(problems) // PROBES)]:
        try:
            await render(problem)
            return
        except FormatFailed as error:
            failure = error
    raise UserError(f"{failure}; it failed on each of the problems that were tried") from failure


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


def _custom(path: str, tokenizer: Any, rollout: Rollout, calls: UserCalls) -> Format:
    """`function(record, tokenizer)` gives the prompt's token ids; `record` is the source's own."""
    function = load_function(path, "data.format")
    names = named_arguments(function, ("record", "tokenizer"), path, "data.format")
    limit, returns = rollout.reward_timeout, TokenIds(len(tokenizer))
    constants: dict[str, Any] = {}
    if "tokenizer" in names and is_async(function):
        # One of its own: calls that change it, such as with truncation=True, may not meet in two threads.
        constants["tokenizer"] = copy.deepcopy(tokenizer)
    elif "tokenizer" in names:
        calls.give_each_call(path, tokenizer=tokenizer)

    async def custom(problem: Problem) -> list[int]:
        what = f"prompt {problem.uid}, {_short(problem)}"
        given = {**constants, **({"record": problem.record} if "record" in names else {})}
        try:
            ids = await calls.call_again(rollout.tries, path, function, limit, what, returns, **given)
        except CallTookTooLong as error:
            raise FormatFailed(f"data.format={error} (rollout.reward_timeout)", what) from error
        except CallFailed as error:
            raise FormatFailed(f"data.format={error}", what) from error
        if not ids:
            raise FormatFailed(f"data.format={path} returned no list of token ids from 0 to {returns.size - 1}", what)
        return _checked(ids, tokenizer, f"data.format={path}")

    return custom


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


class Turns:
    """Reads what was sampled, and writes what follows it. `ends`: token ids that end every turn."""

    def __init__(self, data: Data, tokenizer: Any, ends: Collection[int]) -> None:
        self._data = data
        self._tokenizer = tokenizer
        self._ends = frozenset(ends)

    def text(self, ids: Sequence[int], more_ends: Collection[int] = ()) -> str:
        """A turn as a scorer sees it: without the token that ended it and without special tokens."""
        kept = ids[:-1] if len(ids) and (ids[-1] in self._ends or ids[-1] in more_ends) else ids
        return str(self._tokenizer.decode(kept, skip_special_tokens=True))

    def following(self, messages: list[dict[str, Any]]) -> list[int]:
        """Tokens that the chat template puts after a sampled answer: the rest of its turn, `messages`, a new opening.

        What it writes must not depend on what came before. Raises UserError when the template has no end token after an
        answer, or writes an earlier answer differently once others follow.
        """
        tokenizer, options = self._tokenizer, {"tools": self._data.tools or None, **self._data.chat_args}
        if not tokenizer.chat_template:
            raise UserError("append_messages needs a chat template, and the model's tokenizer has none; use append")
        base = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
        before = tokenizer.apply_chat_template(base, tokenize=False, **options)
        after = tokenizer.apply_chat_template([*base, *messages], tokenize=False, add_generation_prompt=True, **options)
        end = tokenizer.eos_token
        cut = before.rfind(end) + len(end) if end and end in before else 0
        if not cut or after[:cut] != before[:cut]:
            raise UserError(
                "append_messages: the chat template does not end an answer with the end-of-sequence token, or writes it"
                " differently when messages follow; use append with the text that belongs there"
            )
        return list(tokenizer(after[cut:], add_special_tokens=False)["input_ids"])
