"""Values that no setting may have: secrets, control characters, numbers too large for machines.
Secrets are refused because the file is copied to every machine."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from typing import Any

from hetero_framework.config.problems import Problem
from hetero_framework.config.strict_json import join_path

_SECRET_KEY = re.compile(r"((hf|hub|api|auth|access|use_auth)_)?(token|key)|password|secret")
_SECRET = re.compile(r"-----BEGIN [A-Z ]+-----|\b(hf|api_org|sk)_[A-Za-z0-9]{30,}\b")
_ELSEWHERE = (
    "; this file is copied to every machine and shown in messages. Log in with `hf auth login`, or"
    " set HF_TOKEN where the process starts"
)
# A token of the tokenizer may well be a line feed; these settings are handed on as they are.
_FREE = re.compile(r"data\.(eos|pad)_token|(data|training)\.\w+_kwargs|model\.from_config")
PATHS = re.compile(
    r"model\.(name_or_path|tokenizer)|adapter\.init_from|data\.chat_template_path|checkpoint_dir"
    r"|data\.(train|eval)(\[\d+\])?|training\.(output_dir|logging_dir)"
)
_OF_SHELLS = (
    (
        r"\$(\w+|\{\w+\})|%\w+%",
        "{} is not replaced here: write the path itself; ~ is the home folder of each machine",
    ),
    (r"^file:", "{} is how a URL begins: write the path itself"),
    (r"^['\"]|['\"]$", "{} is a quote that a shell would have taken away: leave it out"),
    (r"^\s+|\s+$", "begins or ends with a space"),
)
"""Parts of a path that a shell expands; here they would be a folder of that very name."""


def text_problems(raw: Any) -> Iterator[Problem]:
    """Problems with forbidden texts and numbers; none repeats a text: it may be a secret."""
    waiting: list[tuple[str, str | int, Any]] = [("", "", raw)]
    while waiting:
        path, name, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [(join_path(path, str(key)), str(key), item) for key, item in value.items()]
        elif isinstance(value, (list, tuple)):
            waiting += [(join_path(path, i), name, item) for i, item in enumerate(value)]
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            yield Problem(path, "is a number beyond 64 bits, which nothing here can hold")
        elif not isinstance(value, str) or _FREE.match(path):
            continue
        elif _SECRET_KEY.fullmatch(str(name)) or _SECRET.search(value):
            yield Problem(path, f"holds a secret, or is meant to{_ELSEWHERE}")
        elif any(unicodedata.category(char) == "Cc" for char in value):
            yield Problem(path, "holds a control character, which no name and no path has")
        elif PATHS.fullmatch(path):
            matches = ((re.search(pattern, value), text) for pattern, text in _OF_SHELLS)
            for match, text in matches:
                if match:
                    yield Problem(path, text.format(match[0]))
                    break
