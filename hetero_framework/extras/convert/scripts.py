"""Reads the commands of a shell script, of which none is run: their words and environments."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field

UNKNOWN = "\0"
"""Stands in a word before each expansion whose value the script does not tell."""
_OPEN = (
    r"\$\(\([^()]*\)\)|\$\([^()]*(?:\([^()]*\)[^()]*)*\)|`[^`]*`"
    r"|\$(?:\{(?:[^{}]|\{[^{}]*\})*\}|\w+|[@*#?!])"
)
_PART = re.compile(
    rf"""(?P<skipped>\\\n)|\\(?P<escaped>.)|'(?P<single>[^']*)'|"(?P<double>(?:\\.|[^"\\])*)"
    |(?P<redirected>&>>?|\d?[<>]+&?)[ \t]*|(?P<end>\n|;+|&+|\|+|[()])|(?P<space>[ \t\r]+)
    |(?P<open>{_OPEN})|(?P<plain>[^\s\\'"<>;&|()$`]+|.)""",
    re.VERBOSE | re.DOTALL,
)
_IN_QUOTES = re.compile(rf"\\([\\\"$`\n])|({_OPEN})", re.DOTALL)
_HERE = re.compile(r"(?<!<)<<-?\s*(['\"]?)(\w+)\1([^\n]*)\n(?:.*?\n)??\s*\2(?=\n|\Z)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?:\[[@*]\])?(?::?[-=?](.*))?\}|(\w+))", re.DOTALL)
_ARRAY = re.compile(r"\$\{\w+\[[@*]\]\}")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_PREFIXES = ("then", "do", "else", "if", "while", "time", "nohup", "exec", "sudo", "env", "!", "{")
_SHELL = {"sh", "bash", "zsh"}
_DECLARING = ("export", "declare", "local", "readonly", "typeset")


@dataclass
class ShellCommand:
    """The words of a command, and the variables of the script that it has in its environment."""

    words: list[str]
    environment: dict[str, str] = field(default_factory=dict)


def read_commands(text: str) -> list[ShellCommand]:
    """The commands in `text`, in its order; loops and conditions count once. Raises ValueError for
    a quotation without an end."""
    return list(_Script().commands(_HERE.sub(r"\3", text) + "\n"))


class _Script:
    def __init__(self) -> None:
        self.variables: dict[str, str] = {}
        self.exported: set[str] = set()

    def commands(self, text: str) -> Iterator[ShellCommand]:
        words: list[str] = []
        at, word, is_target = 0, None, False
        while at < len(text):
            if word is None and text[at] == "#":
                at = text.index("\n", at)
            match = _PART.match(text, at)
            assert match is not None
            kind, at = str(match.lastgroup), match.end()
            part, is_array = match[kind], _ARRAY.fullmatch(match[kind])
            if part == "(" and _ASSIGNED.fullmatch(word or ""):
                end = text.index(")", at)
                word, at = f"{word}{self._quoted(text[at:end])} ", end + 1
            elif kind in ("space", "end", "redirected"):
                words += [] if word is None or is_target else [word]
                is_target = kind == "redirected" or (is_target and word is None)
                word = None
                if kind == "end":
                    yield from self._command(words)
                    words = []
            elif part in ("'", '"') and kind == "plain":
                raise ValueError(f"no closing quotation: {text[at - 1 :].partition(chr(10))[0]}")
            elif kind == "double" and not is_array:
                word = (word or "") + self._quoted(part)
            elif kind == "open" or is_array:
                value = self._value(part)
                whole = UNKNOWN in value or _ASSIGNED.match(word or "")
                pieces = shlex.split(value, comments=True) if is_array else value.split()
                *before, last = [value] if whole else pieces or [""]
                for piece in before:
                    words.append((word or "") + piece)
                    word = None
                word = (word or "") + last if last or word else None
            elif kind != "skipped":
                word = (word or "") + part

    def _quoted(self, text: str) -> str:
        """What stands in double quotes, with its expansions."""
        return _IN_QUOTES.sub(lambda m: m[1] if m[2] is None else self._value(m[2]), text)

    def _value(self, expansion: str) -> str:
        if named := _VARIABLE.fullmatch(expansion):
            default = None if named[2] is None or "?" in expansion else self._quoted(named[2])
            value = self.variables.get(named[1] or named[3]) or default
            if value is not None:
                return value
        return UNKNOWN + expansion

    def _command(self, words: list[str]) -> Iterator[ShellCommand]:
        own: dict[str, str] = {}
        while words and (words[0] in _PREFIXES or _ASSIGNED.fullmatch(words[0])):
            own |= self._assigned(words.pop(0))
        if not words:
            self.variables |= own
        elif words[0] in _DECLARING:
            for word in words[1:]:
                self.variables |= self._assigned(word)
                self.exported.add(word.partition("=")[0].rstrip("+"))
        else:
            shared = {n: self.variables[n] for n in self.exported if n in self.variables}
            inner = words[-1] if words[-2:-1] == ["-c"] and _SHELL.intersection(words) else ""
            for command in read_commands(inner) or [ShellCommand(words)]:
                command.environment = shared | own | command.environment
                yield command

    def _assigned(self, word: str) -> dict[str, str]:
        match = _ASSIGNED.fullmatch(word)
        if match is None:
            return {}
        before = self.variables.get(match[1], "") if match[2] else ""
        return {match[1]: before + match[3]}
