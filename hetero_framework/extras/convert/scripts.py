"""Reads the commands of a shell script, of which none is run: their words and environments."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

UNKNOWN = "\0"
"""Stands in a word before each expansion whose value the script does not tell."""
_APART = "\x1f"  # stands before each element of an array
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
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_PREFIXES = ("then", "do", "else", "if", "while", "time", "nohup", "exec", "sudo", "env", "!", "{")
_SHELL = {"sh", "bash", "zsh"}
_DECLARING = ("export", "declare", "local", "readonly", "typeset")


@dataclass
class ShellCommand:
    """The words of a command, and the variables of the script that it has in its environment."""

    words: list[str]
    environment: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return " ".join(self.words).replace(UNKNOWN, "")


def read_commands(text: str) -> list[ShellCommand]:
    """The commands in `text`, in its order; loops and conditions count once. Raises ValueError for
    a quotation without an end."""
    return list(_Script().commands(_HERE.sub(r"\3", text) + "\n"))


class _Script:
    def __init__(self) -> None:
        self.variables: dict[str, str] = {}
        self.exported: set[str] = set()
        self.words: list[str] = []
        self.word: str | None = None

    def commands(self, text: str) -> Iterator[ShellCommand]:
        at, array, is_target = 0, "", False
        while at < len(text):
            if self.word is None and text[at] == "#":
                at = text.index("\n", at)
            match = _PART.match(text, at)
            assert match is not None
            kind = str(match.lastgroup)
            at, part = match.end(), match[kind]
            if kind in ("space", "end", "redirected"):
                begun, opened = self.word, part == "(" and self.word is not None
                self._end_word(dropped=is_target)
                is_target = kind == "redirected" or (is_target and begun is None)
                if opened and begun and _ASSIGNED.fullmatch(begun):
                    array, outer, self.words = self.words.pop(), self.words, []
                elif array and part == ")":
                    self.words, array = [*outer, _APART.join([array, *self.words])], ""
                elif kind == "end" and not array:
                    words, self.words = self.words, []
                    yield from self._command(words)
            elif part in ("'", '"') and kind == "plain":
                raise ValueError(f"no closing quotation: {text[at - 1 :].partition(chr(10))[0]}")
            elif kind != "skipped":
                self._add(kind, part)

    def _end_word(self, *, dropped: bool) -> None:
        if self.word is not None and not dropped:
            self.words.append(self.word)
        self.word = None

    def _add(self, kind: str, part: str) -> None:
        is_list = kind == "double" and re.fullmatch(r"\$\{\w+\[[@*]\]\}", part)
        if kind == "double" and not is_list:
            part = self._quoted(part)
        elif kind == "open" or is_list:
            part = self._value(part)
            if UNKNOWN not in part and not _ASSIGNED.match(self.word or ""):
                pieces = part[1:].split(_APART) if part[:1] == _APART else part.split()
                if pieces:
                    self.word = (self.word or "") + pieces[0]
                for other in pieces[1:]:
                    self._end_word(dropped=False)
                    self.word = other
                return
        self.word = (self.word or "") + part

    def _quoted(self, text: str) -> str:
        """What stands in double quotes, with its expansions."""
        return _IN_QUOTES.sub(lambda m: m[1] if m[2] is None else self._value(m[2]), text)

    def _value(self, expansion: str) -> str:
        if expansion.startswith("$(("):
            known = re.sub(r"\$?([A-Za-z_]\w*)", self._number, expansion[3:-2])
            if re.fullmatch(r"[\s\d*]*\d\s*", known):
                return str(math.prod(int(number) for number in re.findall(r"\d+", known)))
        if named := _VARIABLE.fullmatch(expansion):
            default = None if named[2] is None or "?" in expansion else self._quoted(named[2])
            value = self.variables.get(named[1] or named[3]) or default
            if value is not None:
                return value
        return UNKNOWN + expansion

    def _number(self, name: re.Match[str]) -> str:
        return self.variables.get(name[1], name[1])

    def _command(self, words: list[str]) -> Iterator[ShellCommand]:
        own: dict[str, str] = {}
        while words and (words[0] in _PREFIXES or _ASSIGNED.fullmatch(words[0])):
            own |= self._assigned(words.pop(0))
        if words and words[0] in _DECLARING:
            for word in words[1:]:
                self.variables |= self._assigned(word)
                self.exported.add(word.partition("=")[0].rstrip("+"))
        elif words:
            shared = {n: self.variables[n] for n in self.exported if n in self.variables}
            inner = words[-1] if words[-2:-1] == ["-c"] and _SHELL.intersection(words) else ""
            for command in read_commands(inner) or [ShellCommand(words)]:
                command.environment = shared | own | command.environment
                yield command
        else:
            self.variables |= own

    def _assigned(self, word: str) -> dict[str, str]:
        match = _ASSIGNED.fullmatch(word)
        if match is None:
            return {}
        before = self.variables.get(match[1], "") if match[2] else ""
        return {match[1]: before + match[3]}
