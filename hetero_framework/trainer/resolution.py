"""The configuration that a run uses: the user's settings, with all open ones decided."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from hetero_framework.config import Config


@dataclass(frozen=True)
class Decision:
    """A setting that the program chose: its path in the configuration, the value, and why."""

    setting: str
    value: Any
    reason: str


@dataclass(frozen=True)
class Resolved:
    """One configuration for the whole run, and its decisions. Everything that runs reads `config`;
    `given`, what the user wrote, says whether a checkpoint belongs to this run."""

    given: Config
    config: Config
    decisions: tuple[Decision, ...] = ()

    @classmethod
    def start(cls, config: Config) -> Resolved:
        """The configuration with nothing decided yet."""
        return cls(config, config)

    def decide(self, setting: str, value: Any, reason: str) -> Resolved:
        """A copy with one more setting decided; the whole configuration is validated again.

        `setting` is a section, "section.key" or "shard_plan[k].key". Raises ConfigError for a
        value that the configuration does not allow.
        """
        section, _, key = setting.partition(".")
        if entry := re.fullmatch(r"shard_plan\[(\d+)\]", section):
            plan = self.config.to_dict()["shard_plan"]
            plan[int(entry[1])][key] = value
            config = self.config.with_changes(shard_plan=plan)
        else:
            config = self.config.with_changes(**{section: {key: value} if key else value})
        decision = Decision(setting, value, reason)
        return replace(self, config=config, decisions=(*self.decisions, decision))
