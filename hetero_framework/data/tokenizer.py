"""The tokenizer that belongs to a run. Code that comes with a tokenizer is never run."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hetero_framework import registry, repository
from hetero_framework.config import Config
from hetero_framework.errors import DataError, in_words

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_HINT = "set model.tokenizer to a folder or hub name that has one"
_CODE_HINT = "convert it to a tokenizer.json, or set model.tokenizer to one that has it"
_SETTINGS = (repository.TOKENIZER, repository.CONFIG)
MAX_TOKENIZER_BYTES = 256 * 2**20  # the largest in use has 33 MiB
_ERRORS = (
    *(OSError, ValueError, TypeError, ImportError, LookupError, AttributeError, RuntimeError),
    *(ArithmeticError, AssertionError),
)
"""Exceptions that transformers raises for files with unexpected values."""
_LOADED = ("tokenizer.json", repository.TOKENIZER)
"""transformers needs one of these files. Without any, the files of the table "bare_tokenizers" are
looked for."""
_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken*", "spiece*", "*.vocab")


@dataclass(frozen=True)
class TokenizersErrors(AbstractContextManager[None]):
    """Turns errors of the library tokenizers into DataError, whose text begins with `what`. The
    library raises a bare `Exception`, or for a panic in Rust a class that is no `Exception`."""

    what: str = "the tokenizer cannot be used"

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if kind is Exception or getattr(kind, "__module__", "") == "pyo3_runtime":
            hint = "get its files again, or choose another tokenizer in model.tokenizer"
            raise DataError(f"{self.what}: {error}", hint=hint) from error


def load_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    """The tokenizer of `model.tokenizer`, else of `model.name_or_path`, with `data.eos_token`,
    `data.pad_token` and the template of `data.chat_template_path`. Raises DataError when there is
    none, when it needs code of its own, or when a token that was asked for is not in it."""
    tokenizer = read_tokenizer(*tokenizer_place(config))
    if config.data is not None:
        for role, token in (("eos", config.data.eos_token), ("pad", config.data.pad_token)):
            if token is None:
                continue
            if token not in tokenizer.get_vocab():
                raise DataError(f"data.{role}_token: the tokenizer has no token {token!r}")
            setattr(tokenizer, f"{role}_token", token)
        if config.data.chat_template_path is not None:
            path = config.path(config.data.chat_template_path)
            try:
                tokenizer.chat_template = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise DataError(
                    f"data.chat_template_path: cannot read {path}: {in_words(error)}"
                ) from error
    return tokenizer


def tokenizer_place(config: Config) -> tuple[str, str | None]:
    """The tokenizer's folder or hub name, and its revision on the hub."""
    model = config.model
    if model is None:
        raise DataError("the configuration has no model, so there is no tokenizer", hint=_HINT)
    name = model.tokenizer or model.name_or_path
    if name is None:
        raise DataError("model.from_config gives weights but no tokenizer", hint=_HINT)
    folder = config.path(name)
    if folder.is_dir():
        return str(folder), None
    if folder.exists():
        raise DataError(f"{name} is a file; a tokenizer is a folder", hint=_HINT)
    if name.startswith((".", "~", "/")) or name.count("/") > 1 or "\\" in name:
        raise DataError(f"there is no folder {folder} with a tokenizer", hint=_HINT)
    repository.refuse_elsewhere(name, config.base_dir, DataError)
    return name, None if model.tokenizer else model.revision


def _check_folder(folder: Path) -> None:
    """Raise DataError for faults that transformers reports in passing or not at all."""
    files = [path for pattern in _FILES for path in sorted(folder.glob(pattern))]
    if not files:
        raise DataError(f"{folder} holds no tokenizer files", hint=_HINT)
    for path in files:
        repository.refuse_mistaken(path, DataError)
        if path.suffix == ".json":
            repository.read_json(path, DataError, MAX_TOKENIZER_BYTES, hint=_HINT)


def read_tokenizer(name: str, revision: str | None) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or hub repository. Raises DataError, also if it is code."""
    repository.refuse_code(name, revision, _SETTINGS, DataError, _CODE_HINT)
    if Path(name).is_dir():
        _check_folder(Path(name))
    try:
        with TokenizersErrors(f"cannot load a tokenizer from {name}"):
            tokenizer = _read(name, revision)
    except _ERRORS as error:
        raise DataError(f"cannot load a tokenizer from {name}: {error}", hint=_HINT) from error
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise DataError(f"the tokenizer of {name} has no vocabulary", hint=_HINT)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = _processors_template(name, revision)
    return tokenizer


def _read(name: str, revision: str | None) -> PreTrainedTokenizerBase:
    if not any(Path(name, file).exists() for file in _LOADED):
        for path in (Path(name, file) for file in registry.names("bare_tokenizers")):
            if path.is_file():
                read = registry.needed("tokenizers", path.name, str(path))
                found: PreTrainedTokenizerBase = read(path)
                return found
    from transformers import AutoTokenizer  # slow, and not needed to find data

    return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)


def _processors_template(name: str, revision: str | None) -> str | None:
    """The chat template of a multimodal model whose tokenizer has none."""
    template = None
    wanted = repository.PROCESSOR_TEMPLATE
    for path in repository.settings_files(name, revision, [wanted]):
        if path.name == wanted:
            template = repository.read_json(path, DataError).get("chat_template")
    return template if isinstance(template, str) else None


def settle_pad_token(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Set the tokenizer's pad token, as TRL does; to None where no token can pad."""
    try:
        index, _ = choose_pad_token(tokenizer, vocab_size)
    except DataError:  # padding_free needs none
        tokenizer.pad_token = None
    else:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(index)


def choose_pad_token(
    tokenizer: PreTrainedTokenizerBase, vocab_size: int | None = None
) -> tuple[int, str]:
    """Id of the token to pad with, and a sentence about it. The token is the pad token, else
    end-of-sequence, as in TRL, else unknown; a token that the model has no embedding for is passed
    over. Padding is masked and has no label, so the choice does not change the result."""
    passed = []
    for role in ("pad", "eos", "unk"):
        token = getattr(tokenizer, f"{role}_token")
        if token is None:
            passed.append(f"no {role} token")
            continue
        index = tokenizer.get_vocab()[token]
        if vocab_size is not None and index >= vocab_size:
            passed.append(f"its {role} token {token} is beyond the model's vocabulary")
            continue
        reason = f" (the tokenizer: {', '.join(passed)})" if passed else ""
        return index, f"padding token: {token}{reason}"
    raise DataError(
        f"no token to pad with: the tokenizer: {', '.join(passed)}",
        hint="set data.pad_token to one of its tokens",
    )
