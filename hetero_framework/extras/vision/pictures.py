"""The pictures of a run: checked when an example is read, kept encoded, decoded for a micro-batch.

The model's own processor says which tokens stand for a picture and makes the model's inputs.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import math
import os
import re
import tempfile
import threading
import warnings
from base64 import b64encode
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property, partial
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from transformers import AutoImageProcessor, PretrainedConfig
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from hetero_framework import repository
from hetero_framework.config import Config
from hetero_framework.config.strict_json import json_type
from hetero_framework.data.batches import PICTURES, MicroBatch
from hetero_framework.data.sources import shorten
from hetero_framework.data.tokenizer import load_tokenizer
from hetero_framework.errors import ConfigError, DataError, HeteroError, ModelError, in_words
from hetero_framework.extras.vision.admission import admit_pictures
from hetero_framework.extras.vision.settings import PictureSettings
from hetero_framework.models.cut.language import on_meta
from hetero_framework.models.cut.tiny import stock_class
from hetero_framework.models.files.source import ModelSource
from hetero_framework.models.library import LIBRARY_ERRORS, briefly, quiet_library

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Pillow hands other formats to programs outside (EPS), or reads little else in them.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
MOST = 1 << 24  # their numbers are kept among targets, as float32
_SMALL = 96  # pixels of the longer side
_THREADS = 2  # that prepare pictures; Pillow and numpy let other threads run meanwhile
_OF_TEXT = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}
_EDGES = {"image_min_pixels": "shortest_edge", "image_max_pixels": "longest_edge"}
_TURNED = (5, 6, 7, 8)  # orientations of EXIF that swap width and height
_HINT = 'a picture is a path, or {"bytes": ..., "path": ...} as datasets\' Image has it'


class PictureStore:
    """The model's processor, and the pictures that were added, by number. Encoded pictures of
    tables lie in a file without a name, so that they take no memory."""

    def __init__(self, processor: Any, config: PretrainedConfig, base_dir: Path) -> None:
        self._spool = tempfile.TemporaryFile()  # noqa: SIM115
        self.processor = processor
        self.placeholder: str = processor.image_token
        self._ids = {*processor.image_token_ids, getattr(config, "image_token_id", None)}
        self._kinds, self._positions = _kinds_and_positions(config)
        self._base_dir = base_dir
        self._places: list[tuple[str | int, int]] = []  # path, or offset in the spool; bytes
        self._digests: list[bytes] = []
        self._known: dict[str, tuple[int, str]] = {}  # number and tokens, by path
        self._tokens: dict[tuple[str, tuple[int, int]], str] = {}
        self._lock = threading.Lock()  # of the spool
        self._own = threading.local()  # a thread's processor; a tokenizer serves one at a time
        self._ahead: dict[tuple[range, ...], Future[MicroBatch]] = {}
        # Once, since another thread's `catch_warnings` would bring back its own filters.
        warnings.filterwarnings("ignore", module=r"PIL\.")

    def __len__(self) -> int:
        return len(self._places)

    def __del__(self) -> None:
        self._spool.close()

    def add(self, given: Any, where: str) -> str:
        """Check a picture of an example and give it the next number. Returns the text of the tokens
        that stand for it. Raises DataError for what is no picture or cannot be used."""
        data = path = None
        if len(self) == MOST:
            raise DataError(f"{where}: the data have more than {MOST:,} pictures", hint="use fewer")
        if isinstance(given, dict):
            data, path = given.get("bytes"), given.get("path")
        elif isinstance(given, str):
            path = given
        if not isinstance(data, bytes) and not (isinstance(path, str) and path):
            found = json_type(given) if given else "nothing"
            text = f"{where}: a picture is a path or an object with bytes, found {found}"
            raise DataError(text, hint=_HINT)
        if isinstance(data, bytes):
            with self._lock:
                place: str | int = self._spool.seek(0, os.SEEK_END)
                self._spool.write(data)
            name = "a picture in the table"
        else:
            assert path is not None
            place, name = str(self._path(path, where)), f"the picture {shorten(path)}"
            if (known := self._known.get(place)) is not None:  # another question about it
                self._places.append(self._places[known[0]])
                self._digests.append(self._digests[known[0]])
                return known[1]
            data = _read(place, f"{where}: {name}")
        text = self._tokens_of(*_checked(data, f"{where}: {name}"), f"{where}: {name}")
        if isinstance(place, str):
            self._known[place] = len(self), text
        self._places.append((place, len(data)))
        self._digests.append(hashlib.sha256(data).digest())
        return text

    def _path(self, path: str, where: str) -> Path:
        if "://" in path:
            raise DataError(
                f"{where}: {shorten(path)} is a URL, and no picture is fetched while a run goes on",
                hint="download the pictures, and give their paths",
            )
        data = re.split(r":\d+$| row \d+$", where)[0]  # the file of the row
        places = self._base_dir, Path(data).parent, Path.cwd()
        found = [place / os.path.expanduser(path) for place in places]
        return next(filter(os.path.exists, found), found[0])

    def _tokens_of(self, mode: str, size: tuple[int, int], what: str) -> str:
        """The text of a picture's tokens, which its size decides."""
        if (mode, size) not in self._tokens:
            try:
                with quiet_library():
                    made = self.processor(
                        images=[[Image.new(mode, size)]],
                        text=[self.placeholder],
                        return_text_replacement_offsets=True,
                        add_special_tokens=False,
                    )
            except LIBRARY_ERRORS as error:
                raise DataError(
                    f"{what}, {size[0]} x {size[1]}: the model's processor refuses it:"
                    f" {briefly(error)}",
                    hint="take the example out, or give the picture another size",
                ) from error
            self._tokens[mode, size] = made["text_replacement_offsets"][0][0]["replacement"]
        return self._tokens[mode, size]

    def image(self, number: int) -> Image.Image:
        """The decoded picture with this number, turned as its EXIF data say, as `datasets` does.
        Raises DataError if its file was changed."""
        place, size = self._places[number]
        if isinstance(place, str):
            data = _read(place, place)
        else:
            with self._lock:
                self._spool.seek(place)
                data = self._spool.read(size)
        if hashlib.sha256(data).digest() != self._digests[number]:
            raise DataError(
                f"the picture {place} has changed since the run began",
                hint="leave pictures alone while a run goes on, and start the run again",
            )
        image: Image.Image = Image.open(BytesIO(data), formats=_FORMATS)
        image.load()
        if image.getexif().get(ExifTags.Base.Orientation) is not None:
            image = ImageOps.exif_transpose(image)
        return image

    @property
    def is_deep(self) -> bool:
        """Whether a picture has numbers beyond 255, which are cut off there as TRL has them cut."""
        return any(mode[0] in "IF" for mode, _ in self._tokens)

    def marks(self, ids: np.ndarray) -> np.ndarray:
        """1 where a token is one that the model puts a picture's features in, or 0; int64."""
        return np.isin(ids, [token for token in self._ids if token is not None]).astype(np.int64)

    def cut_by(self, ids: list[int], most: int) -> bool:
        """Whether a token of a picture is beyond the first `most` of a row."""
        return not self._ids.isdisjoint(ids[most:])

    def inputs(self, rows: Sequence[range], batch: MicroBatch) -> MicroBatch:
        """The inputs of the model for the pictures with these numbers, for each row of a
        micro-batch of text: what the processor makes, the kinds of tokens, and positions."""
        made: MicroBatch = {}
        if any(rows):
            begun = self._ahead.pop((*rows,), None)
            with quiet_library():
                made = self._made(rows) if begun is None else begun.result()
        if self.processor.return_mm_token_type_ids:
            kinds = self.processor.create_mm_token_type_ids(batch["input_ids"].tolist())
            made[self._kinds] = torch.tensor(kinds)
            grid = made.get(PICTURES + "image_grid_thw")
            if self._positions is not None and grid is not None:
                how = {"image_grid_thw": grid, "attention_mask": batch["attention_mask"]}
                found = self._positions(batch["input_ids"], made[self._kinds], **how)
                made["position_ids"] = found[0]
        return made

    def soon(self, batches: Sequence[Sequence[range]]) -> None:
        """Prepare the pictures of these micro-batches, each as for `inputs`, in threads and in this
        order; and no others."""
        wanted = dict.fromkeys((*rows,) for rows in batches if any(rows))
        for key in self._ahead.keys() - wanted.keys():
            self._ahead.pop(key).cancel()
        _ = self._alone  # found before threads ask, since it takes the tokenizer
        for key in [key for key in wanted if key not in self._ahead]:
            self._ahead[key] = self._pool.submit(self._made, key)

    def close(self) -> None:
        """End the threads. `soon` begins anew."""
        self.soon([])
        if (pool := vars(self).pop("_pool", None)) is not None:
            pool.shutdown()

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        own, copies = self._own, [copy.deepcopy(self.processor) for _ in range(_THREADS)]

        def begin() -> None:
            own.processor = copies.pop()

        return ThreadPoolExecutor(_THREADS, "pictures", begin)

    def _made(self, rows: Sequence[range]) -> MicroBatch:
        """The model's inputs for these pictures. Each thread of the pool has its own processor."""
        processor = getattr(self._own, "processor", self.processor)
        return _processed(processor, self.image, rows, self._alone)

    @cached_property
    def _alone(self) -> bool | None:
        """Whether the processor may see one picture after another (True) or one row after another
        (False), so that fewer are decoded at once; None: it makes something else of all together.
        Tried with rows of one, two and no pictures of several shapes."""
        sizes = [(60, 44), (31, 90), (60, 44), (120, 37)]
        tried = [Image.linear_gradient("L").resize(size).convert("RGB") for size in sizes]
        rows = [range(2), range(2, 2), range(2, 3), range(3, 4)]
        with quiet_library(), suppress(*LIBRARY_ERRORS):
            see = partial(_processed, self.processor, tried.__getitem__, rows)
            whole = see(None)
            return next((way for way in (True, False) if _same(see(way), whole)), None)
        return None

    def small(self, number: int) -> str:
        """A small copy of a picture for a page, as a data URL."""
        copied, file = self.image(number).convert("RGB"), BytesIO()
        copied.thumbnail((_SMALL, _SMALL))
        copied.save(file, "JPEG")
        return f"data:image/jpeg;base64,{b64encode(file.getvalue()).decode()}"

    def digest(self, number: int) -> bytes:
        """sha256 of the encoded picture with this number."""
        return self._digests[number]


def _processed(
    processor: Any, image: Callable[[int], Image.Image], rows: Sequence[range], alone: bool | None
) -> MicroBatch:
    """A processor's inputs of the model for these pictures. `alone` is `PictureStore._alone`."""
    if alone is not None and sum(map(len, rows)) > 1:
        seen = [range(k, k + 1) for k in chain.from_iterable(rows)] if alone else [*rows]
        each = {one: _processed(processor, image, [one], None) for one in {*seen} if one}
        some = next(iter(each.values()))
        each[range(0)] = {name: tensor[:1, :0] for name, tensor in some.items()}
        return {name: _joined([each[one][name] for one in seen]) for name in some}
    decoded = {number: image(number) for number in chain.from_iterable(rows)}
    images = [[decoded[number] for number in row] for row in rows]
    text = [processor.image_token * len(row) for row in rows]
    how = {"add_special_tokens": False, "padding": True, "return_tensors": "pt"}
    made = processor(images=images, text=text, **how)
    return {PICTURES + name: made[name] for name in made.keys() - _OF_TEXT}


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors along their first axis, filled with zeros where one is smaller in another."""
    most = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
    joined = parts[0].new_zeros(sum(map(len, parts)), *most)
    for place, part in zip(joined.split([*map(len, parts)]), parts, strict=True):
        place[(..., *map(slice, part.shape[1:]))] = part
    return joined


def _same(one: MicroBatch, other: MicroBatch) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in other)


def _kinds_and_positions(config: PretrainedConfig) -> tuple[str, Callable[..., Any] | None]:
    """The name of the kinds of tokens, where all stages read them, or else the first; and the
    model's function that makes positions of several axes, if it has them. All stages read these,
    and only the first has what they are made of."""
    model: Any = on_meta(stock_class(config), config)
    takes = inspect.signature(model.forward).parameters
    name = "token_type_ids" if "token_type_ids" in takes else f"{PICTURES}mm_token_type_ids"
    return name, getattr(model.base_model, "get_rope_index", None)


def _read(path: str, what: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise DataError(
            f"{what} cannot be read: {in_words(error) if isinstance(error, OSError) else error}",
            hint="relative paths of pictures start at the folder of the configuration, at that of"
            " the data file, or where the command is run",
        ) from error


def _checked(data: bytes, what: str) -> tuple[str, tuple[int, int]]:
    """The mode of an encoded picture, and its width and height as they are shown. Raises DataError
    for bytes that are no picture, for one with too many pixels, and for one that is damaged."""
    try:
        image = Image.open(BytesIO(data), formats=_FORMATS)
        mode, size = image.mode, image.size
        if image.getexif().get(ExifTags.Base.Orientation) in _TURNED:
            size = size[1], size[0]
        image.draft("RGB", (1, 1))  # a JPEG is read whole, but decoded small
        image.load()
    except Image.DecompressionBombError as error:
        raise DataError(
            f"{what} says in its header that it has too many pixels: {error}",
            hint="make it smaller, or take the example out",
        ) from error
    except UnidentifiedImageError as error:
        text = f"{what} is no picture that is read here ({', '.join(_FORMATS)})"
        raise DataError(text, hint="save it as one of these, or take the example out") from error
    except (OSError, SyntaxError, ValueError, *LIBRARY_ERRORS) as error:
        raise DataError(
            f"{what} is damaged: {briefly(error)}", hint="save it again, or take the example out"
        ) from error
    return mode, size


def pictures_of(config: Config, tokenizer: PreTrainedTokenizerBase) -> PictureStore:
    """The pictures of a run, none yet. Raises ModelError for a model that cannot be trained with
    pictures, or without a processor."""
    source = ModelSource.of(config)
    if source.model.name_or_path is None:
        raise ModelError(
            "model.from_config gives no processor, which pictures need",
            hint="name a checkpoint that has one in model.name_or_path",
        )
    if source.form is not None:
        raise ModelError(
            f"pictures are not trained over weights stored as {source.form} yet",
            hint='take a checkpoint in full precision, with model.quantization "nf4"',
        )
    processor = _processor(source, tokenizer)
    store = partial(PictureStore, processor, source.config, config.base_dir)
    admit_pictures(source.config, processor, store)
    if config.data is not None:
        data, kind = PictureSettings.of(config.data), source.config.model_type
        _set_sizes(processor.image_processor, data, kind)
    return store()


def usual(config: Config, tokens: int) -> MicroBatch:
    """The model's inputs for a micro-batch with a picture of 1024 x 1024 pixels in each row of
    `tokens` tokens; empty where no processor can be loaded."""
    file = BytesIO()
    Image.new("RGB", (1024, 1024)).save(file, "PNG")
    with suppress(HeteroError):
        store = pictures_of(config, load_tokenizer(config))
        text = store.add({"bytes": file.getvalue()}, "a picture of usual size")
        ids = store.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        ids_BS = torch.tensor([ids + [0] * (tokens - len(ids))] * config.training.train_rows)
        batch = {"input_ids": ids_BS, "attention_mask": torch.ones_like(ids_BS)}
        return batch | store.inputs([range(1)] * len(ids_BS), batch)
    return {}


def _set_sizes(images: Any, data: PictureSettings, kind: str) -> None:
    """Set the sizes of pictures: Qwen's edges are numbers of pixels, and Idefics3's is the longer
    side, in whole tiles. Raises ConfigError where a setting can mean nothing."""
    given, tile = dict(images.size), getattr(images, "max_image_size", {}).get("longest_edge", 1)
    for name, edge in _EDGES.items():
        if (pixels := getattr(data, name)) is None:
            continue
        if not {edge, "longest_edge"} <= given.keys():
            raise ConfigError(
                f"data.{name}: the processor of {kind} gives pictures a size of its own",
                hint="leave the setting out",
            )
        if "shortest_edge" not in given and not (pixels := math.isqrt(pixels) // tile * tile):
            raise ConfigError(
                f"data.{name} is less than one tile of {kind}, {tile**2:,} pixels",
                hint=f"set it to {tile**2} or more",
            )
        given[edge] = pixels
    if given.get("shortest_edge", 0) > given.get("longest_edge", math.inf):
        raise ConfigError(
            f"pictures would have at least {given['shortest_edge']:,} pixels and at most"
            f" {given['longest_edge']:,}: one number is of data, the other of the processor",
            hint="set both data.image_min_pixels and data.image_max_pixels",
        )
    images.size = type(images.size)(**given)


def _processor(source: ModelSource, tokenizer: PreTrainedTokenizerBase) -> Any:
    """The processor of the model's family, with this tokenizer; without a part for videos, which
    would need torchvision. Raises ModelError where there is none."""
    place, revision = source.place, source.model.revision
    hint = "take that entry out of the file"
    repository.refuse_code(place, revision, repository.PROCESSORS, ModelError, hint)
    cls: Any = PROCESSOR_MAPPING[type(source.config)]
    how = {"revision": revision, "trust_remote_code": False}
    try:
        with quiet_library():
            parts = {
                "tokenizer": tokenizer,
                "image_processor": AutoImageProcessor.from_pretrained(place, **how),
            }
            fields, _ = cls.get_processor_dict(place, revision=revision)
            lax: Any = type(
                cls.__name__, (cls,), {"check_argument_for_proper_class": lambda *_: None}
            )
            return lax.from_args_and_dict([parts.get(n) for n in cls.get_attributes()], fields)
    except LIBRARY_ERRORS as error:
        raise ModelError(
            f"the model {place!r} has no processor for pictures that loads: {briefly(error)}",
            hint="put processor_config.json or preprocessor_config.json beside its weights",
        ) from error
