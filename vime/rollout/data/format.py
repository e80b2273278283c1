"""How a problem becomes token ids, by one declared policy: the chat template, plain text, or a function of the user's.

Special tokens are never added a second time: a chat template decides about them alone, plain text gets a
beginning-of-sequence token when `data.add_bos` says so, and the tokenizer's own habit of adding some is switched off.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from vime.config import Data, Rollout
from vime.config.import_path import load_function, named_arguments
from vime.errors import UserError
from vime.rollout.data.messages import lost_message
from vime.rollout.data.problem import Problem
from vime.rollout.data.results import TokenIds
from vime.rollout.data.user_calls import CallFailed, CallTookTooLong, UserCalls, is_async

Format = Callable[[Problem], Awaitable[list[int]]]
"""Renders a problem. Raises FormatFailed for this problem alone, UserError for what concerns all of them."""
PROBES = 3
KINDS = 64
"""Kinds of conversations that are rendered at the start."""


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
    Then one conversation of each kind, since what a template makes of a message depends on its role and place.
    """
    await _probe_far_apart(render, problems)
    for problem in _one_of_each_kind(problems):
        with contextlib.suppress(FormatFailed):  # of the user's own: it fails on this problem alone
            await render(problem)


def _one_of_each_kind(problems: Sequence[Problem]) -> list[Problem]:
    """The first conversation of each sequence of roles and keys, at most KINDS of them."""
    found: dict[tuple[Any, ...], Problem] = {}
    for problem in problems:
        if isinstance(problem.prompt, list) and len(found) < KINDS:
            kind = tuple((message["role"], *sorted(message)) for message in problem.prompt)
            found.setdefault(kind, problem)
    return list(found.values())


async def _probe_far_apart(render: Format, problems: Sequence[Problem]) -> None:
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
            f"data.format=chat: the chat template failed on {_place(problem)}: {type(error).__name__}: {error}"
        ) from error
    lost = lost_message(messages, text)
    if lost is not None:
        raise UserError(
            f"data.format=chat: the chat template leaves out the text of {lost} of {_place(problem)}: it may know"
            " another name of the role, or no such message"
        )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _text(problem: Problem, tokenizer: Any, add_bos: bool) -> list[int]:
    if not isinstance(problem.prompt, str):
        raise UserError(
            f"data.format=text, but a prompt is a list of messages: {_place(problem)}; use data.format=chat"
        )
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
        what = _place(problem)
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


def _place(problem: Problem) -> str:
    prompt = f"prompt {problem.uid}, {_short(problem)}"
    return f"{problem.where} ({prompt})" if problem.where else prompt


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


def answer_end(data: Data, tokenizer: Any, stops: Collection[int]) -> int | None:
    """The token that the chat template writes after an answer; None where it writes none, or is not in use.

    stops: token ids that end a response. Raises UserError when the token is not one of them: nothing but the limit
    would end a response then, and demonstrations would teach another end than the one that is waited for.
    """
    if data.format != "chat":
        return None
    end = _after_answer(data, tokenizer)
    if end is not None and end not in stops:
        named = ", ".join(f"{tokenizer.decode([stop])!r} ({stop})" for stop in stops)
        raise UserError(
            f"data.format=chat: the chat template ends an answer with {tokenizer.decode([end])!r} (token {end}), and a"
            f" response ends at {named} only: add {end} to rollout.stop_token_ids, or use a model whose template and"
            " eos_token_id agree"
        )
    return end


_ANSWER, _NEXT = "vime's answer", "vime's next question"


def _after_answer(data: Data, tokenizer: Any) -> int | None:
    """What follows an answer that is the last message; if nothing does, the special token that opens the next turn."""
    conversation = [{"role": "user", "content": "u"}, {"role": "assistant", "content": _ANSWER}]
    tail = _rendered_after(_ANSWER, conversation, data, tokenizer)
    for token in _ids_of(tail, tokenizer):
        if tokenizer.decode([token]).strip():
            return token
    tail = _rendered_after(_ANSWER, [*conversation, {"role": "user", "content": _NEXT}], data, tokenizer)
    special = set(tokenizer.added_tokens_decoder)
    return next((token for token in _ids_of(tail.partition(_NEXT)[0], tokenizer) if token in special), None)


def _ids_of(text: str, tokenizer: Any) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _rendered_after(mark: str, messages: list[dict[str, Any]], data: Data, tokenizer: Any) -> str:
    """What the chat template writes behind `mark`; nothing when it refuses such a conversation or leaves `mark` out."""
    try:
        text = tokenizer.apply_chat_template(messages, tools=data.tools or None, tokenize=False, **data.chat_args)
    except Exception:  # noqa: BLE001 - templates raise what they like, such as for roles that they do not know
        return ""
    return str(text).rpartition(mark)[2] if mark in text else ""


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
