"""The documentation as data: its pages, and the fenced blocks in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PAGES = (REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").glob("*.md")))
NOT_TESTED = re.compile(r"<!-- not tested: (.+) -->")
FILE_NAME = re.compile(r"# ([\w.-]+\.(?:py|yaml))\b")


@dataclass(frozen=True)
class Block:
    """What stands between two fences. `line` is that of the opening fence, from 1."""

    page: Path
    line: int
    language: str
    text: str
    not_tested: str | None
    """Why nothing runs it: the comment on the line before it."""

    @property
    def place(self) -> str:
        """Page and line, as an editor opens them."""
        return f"{self.page.relative_to(REPOSITORY)}:{self.line}"

    @property
    def file_name(self) -> str | None:
        """The file that a reader is to make of it: its first line is `# my_logic.py`."""
        found = FILE_NAME.match(self.text)
        return found[1] if found else None


def blocks(page: Path, text: str | None = None) -> list[Block]:
    """The fenced blocks of a page, in order. `text`: instead of the file's."""
    found: list[Block] = []
    lines = (page.read_text(encoding="utf-8") if text is None else text).splitlines()
    start: int | None = None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if start is None:
            start = number
            continue
        reason = NOT_TESTED.fullmatch(lines[start - 1]) if start else None
        body = "".join(f"{one}\n" for one in lines[start + 1 : number])
        found.append(Block(page, start + 1, lines[start][3:], body, reason[1] if reason else None))
        start = None
    assert start is None, f"{page}:{start}: a fence is not closed"
    return found


def printed_file(name: str) -> str:
    """The text of the one block of all pages that is the file `name`."""
    (block,) = [block for page in PAGES for block in blocks(page) if block.file_name == name]
    return block.text
