"""Token ids to text and messages to token ids, for responses of one or several turns."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from vime.config import Data
from vime.errors import UserError


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
