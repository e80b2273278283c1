"""A prompt's chat messages: what a record may hold, and whether a chat template has rendered all of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from vime.errors import UserError

Message = dict[str, Any]


def read_messages(given: list[Any], where: str) -> list[Message]:
    """The messages of a record with `content` as text: text parts are joined, a call of tools has empty text.

    `where` starts the message of the UserError that is raised for anything else: another kind of content, or a
    conversation that ends with the answer.
    """
    if not given:
        raise UserError(f"{where} is an empty list; give the messages")
    for message in given:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError(f"{where} is a list, but not of messages with role and content")
    messages = [_read(message, f"{where}[{index}]") for index, message in enumerate(given)]
    if not any(message["content"].strip() for message in messages):
        raise UserError(f"{where} is a list of messages without any text")
    if messages[-1]["role"] == "assistant":
        raise UserError(
            f"{where} ends with the assistant's message: the policy is to write it; leave it out, or move it to the"
            " reference answer"
        )
    return messages


def _read(message: Message, where: str) -> Message:
    content = message.get("content")
    if content is None and message["role"] == "assistant" and message.get("tool_calls"):
        return {**message, "content": ""}
    if "content" not in message:
        raise UserError(f"{where} has no content; only an assistant's call of tools may have none")
    if isinstance(content, str):
        return message
    if not isinstance(content, list):
        raise UserError(f"{where}.content is {_named(content)}; it must be a text")
    if not content:
        raise UserError(f"{where}.content is an empty list; it must be a text")
    return {**message, "content": "".join(_text_of(part, f"{where}.content[{i}]") for i, part in enumerate(content))}


def _text_of(part: Any, where: str) -> str:
    if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = f"a part of type {part['type']!r}" if isinstance(part, dict) and "type" in part else _named(part)
    raise UserError(f"{where} is {kind}; only text is supported")


def _named(value: Any) -> str:
    if value is None:
        return "null"
    kinds = {bool: "true or false", int: "a number", float: "a number", dict: "an object", list: "a list", str: "text"}
    return kinds.get(type(value), f"a {type(value).__name__}")


def lost_message(messages: Sequence[Message], rendered: str) -> str | None:
    """Which message is not, or not whole, in what a chat template made of all of them; None when none is lost.

    Templates trim texts, and some leave the thinking out of earlier answers; that loses nothing that is asked. Each
    text is looked for behind the one before it.
    """
    place = 0
    for index, message in enumerate(messages):
        text = message["content"]
        if message["role"] == "assistant":
            text = re.sub(r"\A.*</think>", "", text, flags=re.DOTALL)
        text = text.strip()
        found = rendered.find(text, place)
        if found < 0:
            found = rendered.find(text)  # a template may move a message, such as the system's
            if found < 0:
                return f"message {index} of role {message['role']!r}"
            continue
        place = found + len(text)
    return None
