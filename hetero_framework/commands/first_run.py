"""The configuration of `hetero train --model`: this machine with all its cards, and their plan left
to the run. It stays in the output directory, where it can be edited and given further machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from hetero_framework.cluster.roles import devices_here
from hetero_framework.commands.init import Answers, beside, checked_data, propose, settled
from hetero_framework.commands.options import DEFAULT_CONFIG
from hetero_framework.config import COORDINATOR_PORT, Config, load_config
from hetero_framework.config.load import apply_override
from hetero_framework.config.strict_json import read_object
from hetero_framework.config.text_limits import PATHS
from hetero_framework.core import addresses
from hetero_framework.core.files import NamingOf, write_json
from hetero_framework.errors import UserError

_HERE = "127.0.0.1"


@dataclass(frozen=True)
class FirstRun:
    """What was asked for: answers, the output directory (None: runs/NAME of the model), and
    settings such as "training.max_steps=10"."""

    answers: Answers
    output_dir: str | None = None
    settings: Sequence[str] = ()

    @property
    def file(self) -> Path:
        """Where the configuration goes."""
        name = Path(str(self.answers.model)).expanduser().resolve().name
        given = [text.partition("=") for text in self.settings]
        asked = [value for path, _, value in given if path == "training.output_dir"]
        place = self.output_dir or (asked[-1] if asked else f"runs/{name}")
        return Path(place).expanduser().absolute() / DEFAULT_CONFIG

    def config(self) -> Config:
        """The configuration, which is not written. Raises UserError."""
        return load_config(self._raw(), (), self.file.parent)

    def written(self, *, fresh: bool = False) -> Path:
        """Write the configuration, and return its path. One that is there is used if it is the
        same, and is replaced with `fresh`. Raises UserError where it is another one."""
        from hetero_framework.models.files.source import ModelSource  # imports torch

        file, raw = self.file, self._raw()
        # Names all problems before anything is written.
        _ = ModelSource.of(load_config(raw, (), file.parent)).config
        if file.exists() and not fresh:
            if _without_port(read_object(file)) != _without_port(raw):
                raise UserError(
                    f"{file} is there, and says something else than these options",
                    hint=f"hetero train --config {file} trains as it says; --fresh replaces it, and"
                    " --output-dir DIR leaves it alone",
                )
            return file
        with NamingOf(file):
            file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, raw)
        return file

    def _raw(self) -> dict[str, Any]:
        if self.answers.data is None:
            raise UserError("--model needs training data: --data FILE, or a dataset's name")
        checked_data(self.answers.data)
        raw = proposed(settled(self.answers, self.file))
        if any(setting.startswith("training.max_steps=") for setting in self.settings):
            del raw["training"]["num_train_epochs"]  # it would have no effect
        for setting in self.settings:
            path, _, text = setting.partition("=")
            local = PATHS.fullmatch(path) and beside(text, self.file)
            apply_override(raw, f"{path}={local}" if local else setting)
        raw["training"]["output_dir"] = "."
        return raw


def proposed(answers: Answers) -> dict[str, Any]:
    """The configuration of this machine with all its devices, or with the device of `answers`.
    Raises UserError."""
    devices = [answers.device] if answers.device else devices_here()
    port = next(p for p in count(COORDINATOR_PORT) if addresses.port_is_free(_HERE, p))
    answers = replace(answers, coordinator=f"{_HERE}:{port}:{devices[0]}")
    raw = propose(answers, None, hostname=None, own_address=_HERE)
    if len(devices) > 1:
        del raw["coordinator"]["device"]
        raw["coordinator"]["devices"] = devices
    return raw


def _without_port(raw: dict[str, Any]) -> dict[str, Any]:
    """Which port is free changes from one call to the next."""
    return {**raw, "coordinator": {**raw["coordinator"], "port": None}}
