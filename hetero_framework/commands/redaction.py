"""Redaction of a text that leaves the machine: secrets, addresses, names of hosts and users, homes.

An address or a host's name becomes host-1, host-2 and so on, the same throughout a text, so that a
reader still sees which machines are meant. More is redacted than has to be: a long word in which
letters and digits alternate counts as a secret.
"""

from __future__ import annotations

import getpass
import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from hetero_framework.core import addresses

SECRET = "<secret>"
_SECRET_NAME = (
    "token|secret|passw|passphrase|(?:api|access|private)[_-]?key|credential|authorization"
)
_NO_SECRET = re.compile(r"(eos|bos|pad|unk|cls|sep|mask|add)_token|padding |token[a-z_]", re.I)
_SECRETS = tuple(
    re.compile(pattern, re.I | re.S)
    for pattern in (
        r"-----BEGIN [^-\n]+-----.*?(-----END [^-\n]+-----|\Z)",
        r"(?<=://)[^/\s@]+(?=@)",
        r"(?<=[?&#])[^\s\"'<>]*=[^\s\"'<>]*",  # what follows the address of a page
        r"\b(bearer|basic) +[^\s\"',]{6,}",
        r"\bHT1-[\w-]+",
        r"\b(hf_|gh[a-z]_|github_pat_|npm_|r8_|[prs]k-|pypi-|glpat-|xox[a-z]-|ya29\.|AKIA|ASIA|AIza)"
        r"[\w-]{10,}(\.[\w-]+)*",
        r"\beyJ[\w-]+\.[\w-]+\.[\w-]*",
        r"\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b",
        r"\b[0-9a-f]{2}([:-][0-9a-f]{2}){5,}\b",  # the address of a card, a fingerprint
        r"\b[0-9a-f]{32,}\b",
    )
)
_NAMED = re.compile(
    rf"((?:padding )?[\w.-]*(?:{_SECRET_NAME})[\w-]*[\"']?(?:\s*[=:]\s*|\s+(?=\S*\d)))"
    r"(\"(?:[^\"\\]|\\.)*\"|'[^']*'|[^\s\"',;{}\[\]]+)",
    re.I,
)
_LONG = tuple(
    re.compile(rf"(?<![\w+{slash}])[\w+{slash}][\w+{slash}-]{{23,}}={{0,2}}") for slash in ("/", "")
)
_IP = re.compile(
    r"(?<![\w.])(\d+(?:\.\d+){3}|[0-9a-f]*(?::[0-9a-f]*){1,7}:[0-9a-f]+(?:\.\d+)*)", re.I
)
_HOST = re.compile(
    r"(?<=://)[\w.-]+|(?<=[\w>]@)[\w.-]+|\b[a-z][\w.-]*(?<!\.py)(?=:\d{4,5}\b)"
    r"|\b[\w-]+(\.[\w-]+)*\.(local|lan|internal|intra|home|corp|localdomain|arpa|com|org|net|edu|gov|io)"
    r"\b(?!\.\w)",
    re.I,
)
_PUBLIC = re.compile(
    r"localhost(\.localdomain)?|(.*\.)?(huggingface\.co|github\.com|pytorch\.org)", re.I
)
_HOME = re.compile(r"(/home|/Users|[A-Z]:[\\/]+Users)[\\/]+[^\\/\s\"':),]+", re.I)


class Redaction:
    """Redacts texts; `hosts` are further names and addresses of machines."""

    def __init__(self, hosts: Iterable[str] = ()) -> None:
        self._hosts: dict[str, str] = {}
        self._known = {*hosts, *addresses.local_hostnames()} - {""}
        named = (value for name, value in os.environ.items() if re.search(_SECRET_NAME, name, re.I))
        self._values = sorted({value for value in named if len(value) > 7}, key=len, reverse=True)
        self._users: set[str] = set()
        with suppress(OSError, KeyError, ImportError):  # a user without a name
            self._users = {getpass.getuser()} - {"root"}

    def __call__(self, text: str) -> str:
        for value in self._values:
            text = text.replace(value, SECRET)
        for pattern in _SECRETS:
            text = pattern.sub(SECRET, text)
        text = _NAMED.sub(lambda m: m[0] if _NO_SECRET.search(m[1]) else m[1] + SECRET, text)
        for pattern in _LONG:
            text = pattern.sub(lambda m: SECRET if _is_random(m[0]) else m[0], text)
        text = _words(text, {str(Path.home())} - {"/"}, lambda _: "~")
        text = _HOME.sub("~", text)
        text = _words(text, self._known, self._host)
        for pattern in (_IP, _HOST):
            text = pattern.sub(lambda m: self._host(m[0]), text)
        text = re.sub(r"[\w.+-]+(?=@host-\d)", "<user>", text)
        return _words(text, self._users, lambda _: "<user>")

    def _host(self, name: str) -> str:
        ip = addresses.parsed(name)
        if ip.is_loopback or ip.is_unspecified if ip else _PUBLIC.fullmatch(name):
            return name
        if re.fullmatch(r"host-\d+|[\d:.]*", name) and not ip:  # a time, a version
            return name
        return self._hosts.setdefault(name.lower(), f"host-{len(self._hosts) + 1}")


def _words(text: str, words: Iterable[str], replaced: Callable[[str], str]) -> str:
    for word in sorted(words, key=len, reverse=True):
        pattern = rf"(?<![\w-]){re.escape(word)}(?![\w-])"
        text = re.sub(pattern, lambda m: replaced(m[0]), text, flags=re.I)
    return text


def _is_random(word: str) -> bool:
    """Whether small letters, capitals and digits alternate as in a key, and not as in a name."""
    kinds = [(char.isdigit(), char.isupper()) for char in word if char.isalnum()]
    changes = sum(one != other for one, other in pairwise(kinds))
    return changes > (0.36 if len(kinds) > 31 and "/" not in word else 0.43) * len(kinds)
