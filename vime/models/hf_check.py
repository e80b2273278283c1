"""Whether a Hugging Face folder is whole, from names, sizes and the headers of its files. No torch, no tensor is read.

A folder that was copied or downloaded in part fails minutes later, on another node, in another library's words. Here it
costs milliseconds and says which file it is.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

from vime.config.file_kind import HEAD, file_kind, read_regular
from vime.errors import UserError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER = 100_000_000
"""Bytes of a safetensors header: the format's own limit."""
MAX_JSON = 256 << 20
"""Bytes of a JSON file of a model folder; the largest tokenizers have some 30 MiB."""
_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
"""Bits of an element by safetensors' name of its type."""
_TOKENIZERS = (("tokenizer.json",), ("vocab.json", "merges.txt"), ("tokenizer.model",))


def check_weights(folder: Path, key: str) -> None:
    """Refuse a folder whose configuration or weights are not whole. `key` names the folder in the configuration.

    Raises UserError with one line: key, folder, file and what it looks like.
    """
    _json_object(folder, "config.json", key)
    if (folder / "generation_config.json").exists():
        _json_object(folder, "generation_config.json", key)
    if not (folder / INDEX).exists():
        if not (folder / SINGLE).exists():
            raise _wrong(folder, key, f"it has neither {SINGLE} nor {INDEX}{_instead(folder)}")
        read_header(folder, SINGLE, key)
        return
    for shard, names in _shards(folder, key).items():
        if not (folder / shard).exists():
            raise _wrong(folder, key, f"{shard} is missing, which {INDEX} names")
        there = read_header(folder, shard, key)
        absent = next((name for name in names if name not in there), None)
        if absent is not None:
            raise _wrong(folder, key, f"{shard} lacks the tensor {absent}, which {INDEX} says it holds")


def check_tokenizer(folder: Path, key: str, *, load: bool) -> None:
    """Refuse a folder whose tokenizer is missing, cut short, or (with `load`) not one that this installation reads.

    Raises UserError with one line.
    """
    if not any(all((folder / name).exists() for name in names) for names in _TOKENIZERS):
        raise _wrong(folder, key, f"it has no tokenizer: none of {', '.join('+'.join(n) for n in _TOKENIZERS)}")
    if (folder / "tokenizer_config.json").exists():
        _json_object(folder, "tokenizer_config.json", key)
    if not (folder / "tokenizer.json").exists():
        return
    content = _json_object(folder, "tokenizer.json", key)
    if not isinstance(content.get("model"), dict):
        raise _wrong(folder, key, "tokenizer.json describes no `model`: it is not a tokenizer's file")
    if load:
        _load_tokenizer(folder, key, content)


def read_header(folder: Path, name: str, key: str) -> dict[str, Any]:
    """The tensors that the header of a safetensors file names, after it and the file's size were found to agree.

    Source of the layout: https://github.com/huggingface/safetensors#format. Raises UserError as `check_weights`.
    """
    try:
        with (folder / name).open("rb") as file:
            head = file.read(HEAD)
            length = int.from_bytes(head[:8], "little")
            file.seek(0, 2)
            size = file.tell()
            known = file_kind(head)
            if known is not None:
                raise _wrong(folder, key, f"{name} is {known}")
            if size < 8 or not 2 <= length <= MAX_HEADER:
                raise _wrong(folder, key, f"{name} is not a safetensors file")
            if size < 8 + length:
                raise _wrong(folder, key, f"{name} is cut short: {size:,} bytes of a header of {length:,}")
            file.seek(8)
            header = json.loads(file.read(length))
    except OSError as error:
        raise _wrong(folder, key, f"{name} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise _wrong(folder, key, f"{name} is not a safetensors file: its header is not JSON") from None
    if not isinstance(header, dict):
        raise _wrong(folder, key, f"{name} is not a safetensors file: its header is no JSON object")
    tensors = {tensor: entry for tensor, entry in header.items() if tensor != "__metadata__"}
    end = 0
    for tensor, entry in tensors.items():
        end = max(end, _tensor_end(entry, folder, f"{name}: the tensor {tensor}", key))
    if size != 8 + length + end:
        less = "is cut short" if size < 8 + length + end else "is too long"
        raise _wrong(folder, key, f"{name} {less}: {size:,} of the {8 + length + end:,} bytes that its header states")
    return tensors


def _tensor_end(entry: Any, folder: Path, what: str, key: str) -> int:
    """Where a tensor's bytes end behind the header."""
    try:
        start, end = entry["data_offsets"]
        size = prod(entry["shape"]) * _BITS[entry["dtype"]]
        agrees = 0 <= start <= end and (end - start) * 8 == size
    except (TypeError, ValueError, KeyError):
        raise _wrong(folder, key, f"{what} is not described as safetensors does: {str(entry)[:80]}") from None
    if not agrees:
        raise _wrong(folder, key, f"{what} has {end - start:,} bytes, which its shape {entry['shape']} contradicts")
    return int(end)


def _shards(folder: Path, key: str) -> dict[str, list[str]]:
    """Names of the tensors that the index says are in each shard."""
    weight_map = _json_object(folder, INDEX, key).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise _wrong(folder, key, f"{INDEX} has no `weight_map`, which says what tensor is in which file")
    shards: dict[str, list[str]] = {}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not shard or shard != Path(shard).name:
            raise _wrong(
                folder, key, f"{INDEX} says that {tensor} is in {str(shard)[:80]!r}, which names no file of it"
            )
        shards.setdefault(shard, []).append(tensor)
    return shards


def _json_object(folder: Path, name: str, key: str) -> dict[str, Any]:
    try:
        content = read_regular(folder / name, MAX_JSON)
    except FileNotFoundError:
        raise _wrong(folder, key, f"it has no {name}") from None
    except OSError as error:
        raise _wrong(folder, key, f"{name} cannot be read: {error.strerror}") from None
    try:
        value = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        seems = file_kind(content[:HEAD])
        cut = "cut short, or no JSON" if "Expecting" in str(error) or "Unterminated" in str(error) else "not JSON"
        raise _wrong(folder, key, f"{name} is {seems or f'{cut}: {error}'}") from None
    if not isinstance(value, dict):
        raise _wrong(folder, key, f"{name} holds no JSON object")
    return value


def _load_tokenizer(folder: Path, key: str, content: dict[str, Any]) -> None:
    try:
        import tokenizers
    except ModuleNotFoundError:
        return  # a login node without it
    try:
        tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # noqa: BLE001 - the library raises plain Exceptions
        kind = content["model"].get("type")
        raise _wrong(
            folder,
            key,
            f"tokenizer.json (version {content.get('version')}, model {kind}) is not one that tokenizers"
            f" {tokenizers.__version__} reads; a newer release may have written it: {str(error)[:120]}",
        ) from None


def _instead(folder: Path) -> str:
    """What lies there in place of weights."""
    found = sorted(p.name for p in folder.glob("*") if p.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf"))
    if not found:
        return ", and no other weights"
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return f"; there is {found[0]}{more}" + ("" if found[0].endswith(".safetensors") else ", which vime does not read")


def _wrong(folder: Path, key: str, what: str) -> UserError:
    return UserError(f"{key}={folder}: {what}")
