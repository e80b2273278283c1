"""What the configuration, and every other checked value of vime, is made of."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict


def _url_or_path(value: str | Path) -> str | Path:
    if isinstance(value, Path) or not re.match(r"https?:", value):
        return Path(value)
    try:
        parts = urlsplit(value)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"is no address: {error}") from error
    if not host or "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError("must be http://host:port, without user, password or query")
    return value


UrlOrPath = Annotated[str | Path, AfterValidator(_url_or_path)]
"""A str that begins with http:// or https://, or a Path."""


class Frozen(BaseModel):
    """A value that is written as JSON and read back: immutable, unknown names refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Strict(Frozen):
    """A value that another process wrote: read without turning one type into another."""

    model_config = ConfigDict(strict=True)


class Section(Frozen):
    """A part of the configuration, documented by the strings under its fields."""

    model_config = ConfigDict(use_attribute_docstrings=True, allow_inf_nan=False)
