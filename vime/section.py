"""What every part of the configuration is made of."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict


def _import_path(value: Any) -> Any:
    if isinstance(value, str) and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", value):
        raise ValueError(f"{value!r} is not an import path; write it as module:function")
    return value


ImportPath = Annotated[str, BeforeValidator(_import_path)]


class Section(BaseModel):
    """A part of the configuration: immutable, unknown keys refused, documented by the strings under its fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)
