"""A Hugging Face repository's settings, read as data before any library reads them.
Settings that would load code are refused."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from hetero_framework.errors import ModelError, UserError, in_words

CONFIG = "config.json"
GENERATION = "generation_config.json"
TOKENIZER = "tokenizer_config.json"
ADAPTER = "adapter_config.json"
PROCESSORS = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
"""Settings of image and audio processors; copied with their model, never used here."""
PROCESSOR_TEMPLATE = "chat_template.json"  # of a processor, in older repositories
MAX_SETTINGS_BYTES = 16 * 2**20
_COPY = "copy or download it again"
PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".npy", ".npz")
"""Names of files that a library may unpickle."""

# Each setting names a module, a repository or another file that a library would load.
_AUTO_MAP = "auto_map"
_CODE_KEYS = {
    _AUTO_MAP: "names code of its own",
    "custom_pipelines": "names code of its own",
    "custom_generate": "names code of its own",
    "trust_remote_code": "asks for code of its own to be run",
    "_attn_implementation_internal": "names the attention's code",
    "_experts_implementation_internal": "names the experts' code",
    "configuration_files": "names other files to be read in its place",
}
# A value with a slash is a hub repository of native kernels; the library's own have plain names.
_KERNEL_KEYS = (
    *("attn_implementation", "_attn_implementation"),
    *("experts_implementation", "_experts_implementation"),
)
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_MAGIC = (
    (b"PK\x03\x04", "a zip archive, as torch.save writes it"),
    (b"\x1f\x8b", "gzip data"),
    *((b"\x80" + bytes([version]), "pickled data") for version in range(2, 6)),
)


def resolve_model_path(name_or_path: str, base_dir: Path) -> str:
    """The absolute path of a directory relative to `base_dir`, as `Config.path` makes it, or a hub
    name unchanged. Raises ModelError for a path that does not exist here, and as `refuse_elsewhere`
    does."""
    path = Path(os.path.expanduser(name_or_path))
    local = os.path.normpath(base_dir / path)
    if os.path.isdir(local):
        return local
    written_as_path = path.is_absolute() or name_or_path.startswith((".", "~"))
    if written_as_path or name_or_path.count("/") > 1 or "\\" in name_or_path:
        raise ModelError(
            f"{platform.node()} has no model directory {local}",
            hint="copy the model there, or set model.name_or_path to where it is on every machine",
        )
    refuse_elsewhere(name_or_path, base_dir, ModelError)
    return name_or_path


def refuse_code(
    source: str, revision: str | None, names: Iterable[str], kind: type[UserError], hint: str
) -> None:
    """Raise `kind` if a file of `names` in the repository `source` (a folder or a hub name) would
    have code loaded or cannot be read."""
    for path in settings_files(source, revision, names):
        refuse_code_in(read_json(path, kind), str(path), kind, hint)


def refuse_code_in(fields: dict[str, Any], where: str, kind: type[UserError], hint: str) -> None:
    """Raise `kind` if settings would have code loaded; `where` names their file."""
    for place, why in _code(fields):
        raise kind(f"{where} {why} ({place}), which is never run here", hint=hint)


def refuse_elsewhere(name: str, base_dir: Path, kind: type[UserError]) -> None:
    """Raise `kind` for a hub name that is also a folder where this process was started, though not
    in `base_dir`: a library would read that folder."""
    if os.path.isdir(name):
        raise kind(
            f"{name!r} is not a directory in {base_dir}, where relative paths start, but one in"
            f" {Path.cwd()}, where this process was started",
            hint="write it as a path from the configuration's folder, or as an absolute one",
        )


def settings_files(source: str, revision: str | None, names: Iterable[str]) -> Iterator[Path]:
    """The files of `names` that a repository has. For a folder PROCESSORS are added to `names`."""
    folder = Path(source)
    if folder.is_dir():
        names = (*names, *PROCESSORS)
        yield from (folder / name for name in names if (folder / name).is_file())
        return
    from transformers.utils.hub import cached_file  # slow, and not needed for folders

    for name in names:
        with suppress(OSError):  # absent or out of reach: its reader reports that
            file = cached_file(
                source,
                name,
                revision=revision,
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=False,
            )
            if file is not None:
                yield Path(file)


def read_json(
    path: Path, kind: type[UserError], most_bytes: int = MAX_SETTINGS_BYTES, *, hint: str = _COPY
) -> dict[str, Any]:
    """The JSON object in a file. Raises `kind`, which names the file, if it has no such object."""
    try:
        if (size := path.stat().st_size) > most_bytes:
            raise kind(
                f"{path} has {size >> 20} MiB, more than the {most_bytes >> 20} read", hint=hint
            )
        content = path.read_bytes()
        if (mistaken := mistaken_for(content)) is not None:
            raise kind(f"{path} is {mistaken[0]}, not the file", hint=mistaken[1])
        fields = json.loads(content.decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise kind(f"{path} is not readable JSON: {in_words(error)}", hint=hint) from error
    if not isinstance(fields, dict):
        raise kind(f"{path} is not a JSON object", hint=hint)
    return fields


def mistaken_for(content: bytes) -> tuple[str, str] | None:
    """(The thing stored in place of a file, a hint), by the first bytes; None for a real file."""
    start = content[:64].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if start.startswith(_LFS_POINTER):
        return "a Git LFS pointer", "run `git lfs pull` there, or download it with `hf download`"
    if start.startswith((b"<!doctype html", b"<html")):
        return "an HTML page", "it was downloaded without access or from the page that shows it"
    return None


def refuse_mistaken(path: Path, kind: type[UserError]) -> None:
    """Raise `kind` if something else is stored in place of the file `path`."""
    head = b""
    with suppress(OSError), path.open("rb") as file:  # its reader reports that it cannot be read
        head = file.read(64)
    if (mistaken := mistaken_for(head)) is not None:
        raise kind(f"{path} is {mistaken[0]}, not the file", hint=mistaken[1])


def settings_in(fields: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Place and value of every setting, however deep: "text_config.vocab_size"."""
    waiting: list[tuple[str, Any]] = [("", fields)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, list):
            waiting += [(f"{path}[{index}]", item) for index, item in enumerate(value)]
        for key, item in value.items() if isinstance(value, dict) else ():
            here = f"{path}.{key}" if path else str(key)
            yield here, item
            waiting.append((here, item))


def _code(fields: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Place and meaning of each setting that would load code."""
    for place, item in settings_in(fields):
        key = place.rpartition(".")[2]
        if key in _CODE_KEYS and item:
            yield place, _CODE_KEYS[key]
        elif key == _AUTO_MAP and item != {}:  # libraries read it, whatever its type
            yield place, f"has {json.dumps(item)} where code of its own is named"
        elif key in _KERNEL_KEYS and any("/" in text for text in _texts(item)):
            yield place, "names a repository of native code"


def _texts(value: Any) -> list[str]:
    values = value.values() if isinstance(value, dict) else [value]
    return [item for item in values if isinstance(item, str)]


def pickled(path: Path) -> str | None:
    """The reason why reading a file may run code, by its first bytes; None if none."""
    try:
        with path.open("rb") as file:
            head = file.read(4)
    except OSError:
        return None  # its reader reports that
    return next((f"it is {what}" for magic, what in _MAGIC if head.startswith(magic)), None)
