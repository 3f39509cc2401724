"""Features that frozen towers make of pictures, kept on the disk of the first stage's machine.

Features are kept of all pictures that were computed at once, those of a micro-batch: of a picture
alone some kernels make other bits. They are found by all that decides the bits: the model's inputs,
its weights and settings, and the device. So no cut, worker or resume makes a difference.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from hetero_framework.config import Config
from hetero_framework.core.cache import cache_directory
from hetero_framework.core.devices import Device
from hetero_framework.core.files import rename
from hetero_framework.data.token_cache import make_room
from hetero_framework.errors import ConfigError
from hetero_framework.extras.vision.settings import PictureSettings
from hetero_framework.file_trust import untrusted_reason
from hetero_framework.models.cut.shard import Shard, weakly

_log = logging.getLogger(__name__)
MOST_BYTES = 32 << 30  # of a model's features, and of the others' when a run begins
_FREE = 0.1  # of the disk stays free
_READ = ("pooler_output", "deepstack_features")  # what models read of their `get_image_features`
_NAME = "data.cache_image_features"


class FeatureCache:
    """Stands for a model's `get_image_features`."""

    def __init__(self, compute: Callable[..., Any], identity: bytes, folder: Path) -> None:
        self._compute, self._identity = compute, identity
        self._folder = folder / hashlib.sha256(identity).hexdigest()[:32]
        self._folder.mkdir(parents=True, exist_ok=True)
        os.utime(self._folder)  # the least recently used is deleted first
        make_room(folder, MOST_BYTES)
        self._room = MOST_BYTES - sum(file.stat().st_size for file in self._folder.iterdir())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = {**{str(k): value for k, value in enumerate(args)}, **kwargs}
        given.pop("num_items_in_batch", None)  # of the loss; some models hand it on
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        device = next(iter(tensors.values())).device
        others = sorted((name, repr(v)) for name, v in given.items() if name not in tensors)
        how = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
        about = self._identity + repr([others, how]).encode() + _stored(tensors)
        key = hashlib.sha256(about).digest()
        place = self._folder / f"{key.hex()}.features"
        if (flat := self._read(place, key)) is None:
            found = self._compute(*args, **kwargs)
            flat = dict(part for n in _READ for part in _flat(n, getattr(found, n, None)))
            if not any(tensor.requires_grad for tensor in flat.values()):
                self._write(place, key, _stored(flat))
        flat = {name: tensor.to(device) for name, tensor in flat.items()}
        # As it is when it is read, so that a model that needs more of it fails at once.
        return SimpleNamespace(**{name: _whole(flat, name) for name in _READ})

    def _read(self, place: Path, key: bytes) -> dict[str, Tensor] | None:
        with suppress(OSError, SafetensorError):
            content = b"" if untrusted_reason(place) else place.read_bytes()
            if content[:32] == hashlib.sha256(key + content[32:]).digest():
                return load(content[32:])
        return None

    def _write(self, place: Path, key: bytes, content: bytes) -> None:
        """Keep features if there is room."""
        unfinished = place.with_suffix(f".{os.urandom(4).hex()}.tmp")
        try:
            disk = shutil.disk_usage(self._folder)
            if len(content) > self._room or disk.free - len(content) < _FREE * disk.total:
                return
            unfinished.write_bytes(hashlib.sha256(key + content).digest() + content)
            rename(unfinished, place)
            self._room -= len(content)
        except OSError as error:
            self._room = 0
            _log.warning("%s: no more features are kept: %s", _NAME, error.strerror or error)
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)


def keep_features(shard: Shard, config: Config, device: Device) -> None:
    """Have a first shard keep what its towers make, where the data section asks for it. Raises
    ConfigError where that is not the same in each epoch."""
    if config.data is None or not PictureSettings.of(config.data).cache_image_features:
        return
    if (folder := cache_directory()) is None:
        raise ConfigError(f"{_NAME}: HETERO_CACHE is empty", hint="let it name a folder")
    model, about, towers = shard.model.base_model, shard.config, dict(shard.towers())
    if problem := _problem(about, towers):
        text = f"{_NAME}: the part of the model that sees {problem}"
        raise ConfigError(text, hint="leave the setting out")
    digest = hashlib.sha256()
    for name, tensor in towers.items():
        digest.update(_stored({name: tensor}))
    identity = [
        *(torch.__version__, transformers.__version__, digest.hexdigest(), about.to_dict()),
        *(about._attn_implementation, device.label, torch.backends.cpu.get_cpu_capability()),
        *(torch.get_num_threads(), torch.get_float32_matmul_precision()),
    ]
    told = json.dumps(identity, default=str, sort_keys=True).encode()
    compute = weakly(model.get_image_features)
    try:
        model.get_image_features = FeatureCache(compute, told, folder / "features")
    except OSError as error:
        _log.warning("%s: no features are kept: %s", _NAME, error.strerror or error)


def _problem(about: Any, towers: Mapping[str, Tensor]) -> str | None:
    """What makes features differ from one epoch to the next; None if nothing does."""
    if not towers or any(tensor.requires_grad for tensor in towers.values()):
        return "is trained"
    if any(name.endswith("running_mean") for name in towers):
        return "has statistics that change"
    parts = {name: getattr(about, name, None) for name in about.sub_configs}
    seeing = [vars(part) for part in parts.values() if part and part is not about.get_text_config()]
    drops = [(n, v) for fields in seeing for n, v in fields.items() if "drop" in n]
    drawn = [f"{name} {value:g}" for name, value in drops if isinstance(value, float) and value]
    return f"draws random numbers ({drawn[0]})" if drawn else None


def _stored(tensors: Mapping[str, Tensor]) -> bytes:
    kept = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    stored: bytes = save(kept)
    return stored


def _flat(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    for number, part in enumerate(value if isinstance(value, (list, tuple)) else ()):
        yield from _flat(f"{name}.{number}", part)


def _whole(flat: Mapping[str, Tensor], name: str) -> Any:
    """What stood under a name before `_flat`."""
    if name in flat:
        return flat[name]
    begun = [key.removeprefix(f"{name}.") for key in flat if key.startswith(f"{name}.")]
    count = len({key.partition(".")[0] for key in begun})
    return tuple(_whole(flat, f"{name}.{number}") for number in range(count)) or None
