"""SLURM's short lists of hosts, such as `n[001-003,7]`, written out and back, without asking SLURM.

pyxis containers have no scontrol, and a list must mean the same inside and outside of a job.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator

from vime.errors import UserError

MAX_HOSTS = 65536
"""Hosts in one list. A longer one is a mistake in a number."""
_NUMBER = re.compile(r"(\d+)(?:-(\d+))?")


def expand(text: str) -> list[str]:
    """Host names in the order of the list, as `scontrol show hostnames` prints them.

    Raises UserError for what is not a list of hosts.
    """
    hosts: list[str] = []
    for item in filter(None, _split(text)):
        hosts += _expand_one(item, text)
        if len(hosts) > MAX_HOSTS:
            raise UserError(f"node list {_short(text)} names more than {MAX_HOSTS} hosts")
    return hosts


def compress(hosts: Iterable[str]) -> str:
    """A list that `expand` and SLURM read as exactly these hosts in this order: `n[1-3],m2`."""
    items: list[str] = []
    for (prefix, numbered), group in itertools.groupby(hosts, _stem):
        numbers = [host.removeprefix(prefix) for host in group]
        if not numbered or len(numbers) == 1:
            items += [prefix + number for number in numbers]
        else:
            items.append(f"{prefix}[{','.join(_ranges(numbers))}]")
    return ",".join(items)


def _split(text: str) -> Iterator[str]:
    """The items between commas or spaces that are not inside brackets."""
    depth, start = 0, 0
    for index, character in enumerate(text):
        if character == "[":
            depth += 1
        elif character == "]":
            depth -= 1
        if depth not in (0, 1):
            raise UserError(f"node list {_short(text)}: unmatched bracket at character {index + 1}")
        if (character == "," or character.isspace()) and depth == 0:
            yield text[start:index]
            start = index + 1
    if depth:
        raise UserError(f"node list {_short(text)}: a bracket is not closed")
    yield text[start:]


def _expand_one(item: str, whole: str) -> list[str]:
    if "[" in item and not item.endswith("]"):
        raise UserError(f"node list {_short(whole)}: SLURM takes no text after the last bracket of a name")
    choices = [
        [piece] if index % 2 == 0 else list(_numbers(piece, whole))
        for index, piece in enumerate(re.split(r"[\[\]]", item))
    ]
    size = 1
    for choice in choices:
        size *= len(choice)
        if size > MAX_HOSTS:
            raise UserError(f"node list {_short(whole)} names more than {MAX_HOSTS} hosts")
    return ["".join(pieces) for pieces in itertools.product(*choices)]


def _numbers(ranges: str, whole: str) -> Iterator[str]:
    for item in ranges.split(","):
        match = _NUMBER.fullmatch(item)
        if match is None:
            problem = f"{_short(f'[{ranges}]')} must hold numbers and ranges, such as [1-3,7]"
            raise UserError(f"node list {_short(whole)}: {problem}")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise UserError(f"node list {_short(whole)}: the range {item} runs backwards")
        if int(last) - int(first) >= MAX_HOSTS:
            raise UserError(f"node list {_short(whole)} names more than {MAX_HOSTS} hosts")
        yield from (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))


def _stem(host: str) -> tuple[str, bool]:
    """What stands before the number at the end of a name, and whether there is one."""
    match = re.fullmatch(r"(.*?)(\d{1,9})", host)
    return (match[1], True) if match else (host, False)


def _ranges(numbers: list[str]) -> Iterator[str]:
    first = last = numbers[0]
    for number in [*numbers[1:], None]:
        follows = number is not None and number == str(int(last) + 1).zfill(len(first))
        if follows and number is not None:
            last = number
            continue
        yield first if first == last else f"{first}-{last}"
        if number is not None:
            first = last = number


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
