"""Megatron-LM's indexed data sets (`.bin` and `.idx`), and the samples that its GPTDataset makes.

The documents of a corpus follow one another in a shuffled order, and sample k is the tokens from
k * length to (k + 1) * length of that stream, both included: `length` + 1 tokens. Megatron feeds
the first `length` of them and takes the last `length` as labels. The models here shift labels
themselves, so a row has all `length` + 1 tokens. Its loss is of the same `length` predictions: the
prediction after the last token has no label.

Files are memory-mapped, and the pages that were read are soon given back to the system. The index
of documents and samples lies in a temporary file, which is treated likewise.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import struct
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np

from hetero_framework.config import DataConfig, TrainingConfig
from hetero_framework.core.cache import cache_directory
from hetero_framework.data.batches import SampleOrder
from hetero_framework.data.sources import Source
from hetero_framework.data.splits import SplitReader
from hetero_framework.data.train_data import Corpus
from hetero_framework.errors import DataError, in_words

_MMAP = b"MMIDIDX\0\0"
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are no integers
_HEAD_BYTES = 34
_PAIR = "the .idx belongs to another .bin, or one of the two was not copied whole"
_CHUNK = 1 << 20  # sequences looked at together
_SAMPLED = 256, 4096  # pieces of a .bin that its fingerprint covers, and bytes of each
_AROUND = 6 << 16  # extra bytes that the system reads for one document, in all files together
_MOST_TOUCHED = 32 << 20
_SEPARATE_BELOW = 0.80  # a smaller part of a last epoch is shuffled by itself
_MEANINGLESS = (
    *("format", "dataset_config", "dataset_text_field", "truncation_mode", "add_eos"),
    *("completion_only_loss", "assistant_only_loss"),
)
_SURPLUS = 0.005  # share of samples that each part of a blend has in reserve


class IndexedFile:
    """The sequences of a `.bin` by its `.idx`, in Megatron's format MMIDIDX.

    `lengths` holds the number of tokens of each sequence, `starts` its first byte in the `.bin`.
    Raises DataError, with the file's name, where the two files do not fit.
    """

    def __init__(self, idx: Path) -> None:
        self.idx, self.bin = idx, idx.with_suffix(".bin")
        self._index, self._tokens = _mapped(self.idx), _mapped(self.bin)
        head = self._index[:_HEAD_BYTES]
        if not head.startswith(_MMAP):
            raise DataError(
                f"{idx} is not an index of Megatron's: it begins with {head[:9]!r}, not {_MMAP!r}"
            )
        try:
            version, code, count, documents = struct.unpack_from("<QBQQ", head, len(_MMAP))
        except struct.error as error:
            raise DataError(f"{idx} ends within its header", hint=_PAIR) from error
        if version != 1:
            raise DataError(f"{idx} has version {version} of its format; only 1 is known")
        if code not in _TYPES:
            known = ", ".join(map(str, _TYPES))
            raise DataError(f"{idx}: its type of tokens has the code {code}, not one of {known}")
        self.dtype = np.dtype(_TYPES[code])
        kinds = [("<i4", count), ("<i8", count), ("<i8", documents)]
        sizes = (np.dtype(kind).itemsize * n for kind, n in kinds)
        *places, whole = accumulate(sizes, initial=_HEAD_BYTES)
        modes = len(self._index) - whole
        if modes not in (0, count):
            parts = f"{count:,} sequences and {documents:,} bounds of documents"
            text = f"{idx} has {len(self._index):,} bytes, but {parts} take {whole:,}"
            raise DataError(text, hint=_PAIR)
        self.lengths, self.starts, bounds = (
            np.frombuffer(self._index, kind, n, place)
            for (kind, n), place in zip(kinds, places, strict=True)
        )
        self._check(bounds, np.frombuffer(self._index, "i1", modes, whole))

    def __len__(self) -> int:
        return len(self.lengths)

    def _check(self, bounds: np.ndarray, modes: np.ndarray) -> None:
        """Raise DataError where the index contradicts itself or the .bin."""
        size, item = len(self._tokens), self.dtype.itemsize
        total = _tokens(self, range(len(self)))
        if total * item != size:
            text = f"{total:,} tokens of {item} bytes, which is {total * item:,} bytes"
            raise DataError(f"{self.idx} lists {text}, but {self.bin} has {size:,}", hint=_PAIR)
        for part in _chunks(len(self)):
            lengths, starts = self.lengths[part].astype(np.int64), self.starts[part]
            wrong = (lengths < 0) | (starts < 0) | (starts > size - lengths * item)
            for k in part.start + np.flatnonzero(wrong):
                text = f"{self.lengths[k]:,} tokens from byte {self.starts[k]:,} on, is outside"
                text = f"{self.idx}: sequence {k}, {text} {self.bin} of {size:,} bytes"
                raise DataError(text, hint=_PAIR)
            for k in part.start + np.flatnonzero(modes[part]):
                text = f"{self.idx}: sequence {k} has mode {modes[k]}"
                raise DataError(f"{text}; only text (mode 0) is trained here")
            _give_back(self.lengths)
        if not len(bounds) or bounds[0] != 0 or bounds[-1] != len(self):
            text = f"{self.idx}: its documents do not go from sequence 0 to {len(self):,}"
            raise DataError(text, hint=_PAIR)

    def tokens(self, sequence: int, begin: int, most: int) -> np.ndarray:
        """At most `most` tokens of a sequence from its token `begin` on, as a view of the file."""
        count = min(most, int(self.lengths[sequence]) - begin)
        place = int(self.starts[sequence]) + begin * self.dtype.itemsize
        return np.frombuffer(self._tokens, self.dtype, count, place)

    @cached_property
    def fingerprint(self) -> bytes:
        """Digest of the index, and of the size and evenly spaced pieces of the .bin: a corpus is
        too large to be read at every start."""
        digest = hashlib.sha256(str(len(self._tokens)).encode())
        for first in range(0, len(self._index), 1 << 24):
            digest.update(self._index[first : first + (1 << 24)])
            _give_back(self.lengths)
        count, size = _SAMPLED
        for k in range(count):
            first = (len(self._tokens) - size) * k // (count - 1)
            digest.update(self._tokens[max(first, 0) : max(first, 0) + size])
        return digest.digest()


def _mapped(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise DataError(f"cannot read {path}: {in_words(error)}") from error


def _chunks(count: int) -> Iterator[slice]:
    return (slice(first, first + _CHUNK) for first in range(0, count, _CHUNK))


def _tokens(file: IndexedFile, numbers: range) -> int:
    lengths = file.lengths[numbers.start : numbers.stop]
    return sum(int(lengths[part].sum(dtype=np.int64)) for part in _chunks(len(lengths)))


def _give_back(*arrays: np.ndarray) -> None:
    """Release the pages of these arrays' files from this process's memory."""
    for each in arrays:
        file = getattr(each.base, "obj", None)
        if isinstance(file, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            file.madvise(mmap.MADV_DONTNEED)


def _stored(parts: Iterable[np.ndarray]) -> np.ndarray:
    """The parts as one array in a temporary file of the cache directory, memory-mapped; in memory
    where there is no such directory."""
    directory = cache_directory()
    if directory is None:
        return np.concatenate(list(parts))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            for part in parts:
                file.write(part.data)
            file.flush()
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), part.dtype)
    except OSError as error:
        text = f"cannot write the index of the samples into {directory}: {in_words(error)}"
        hint = "HETERO_CACHE names another folder for caches; empty, the index is kept in memory"
        raise DataError(text, hint=hint) from error


class _Stream:
    """The samples that Megatron's GPTDataset makes of some of a file's sequences.

    Args:
        numbers: The sequences that are taken.
        length: Predictions of a sample.
        samples: The least number of samples, of one or several epochs; None: one epoch's samples.
    """

    def __init__(
        self, file: IndexedFile, numbers: range, length: int, samples: int | None, seed: int
    ) -> None:
        self.file, self.length = file, length
        tokens = _tokens(file, numbers)
        epochs = 1 if samples is None else max(1, -(-(samples * length + 1) // tokens))
        before = ((epochs - 1) * tokens - 1) // length  # samples of all epochs but the last
        of_epoch = (tokens - 1) // length
        last = math.inf if samples is None else samples - before
        separate = epochs > 1 and last < int(_SEPARATE_BELOW * of_epoch)
        self.rule = [epochs, separate]
        self._touched = 0  # bytes of the files in memory, at most
        self._count = (epochs * tokens - 1) // length
        state = np.random.RandomState(seed)
        once = np.arange(numbers.start, numbers.stop, dtype=np.int32)
        groups = [epochs - 1, 1] if separate else [epochs]
        self._documents = _stored(_shuffled(np.tile(once, n), state) for n in groups)
        self._ends = _stored(self._sums())  # where each document ends in the stream
        _give_back(file.lengths)
        kind = np.uint32 if self._count < 2**32 - 2 else np.int64
        bounds = [0, before, self._count] if separate else [0, self._count]
        self._order = _stored(
            _shuffled(np.arange(a, b, dtype=kind), state) for a, b in pairwise(bounds)
        )

    def __len__(self) -> int:
        return self._count

    def _sums(self) -> Iterator[np.ndarray]:
        end = 0
        for part in _chunks(len(self._documents)):
            sums = np.cumsum(self.file.lengths[self._documents[part]], dtype=np.int64) + end
            end = int(sums[-1])
            yield sums

    def pieces(self, index: int) -> Iterator[tuple[int, np.ndarray]]:
        """Pairs of the number of a sequence and the tokens that the sample takes from it."""
        at = int(self._order[index]) * self.length
        place = int(np.searchsorted(self._ends, at, side="right"))
        missing = self.length + 1
        while missing:
            sequence, end = int(self._documents[place]), int(self._ends[place])
            begin = int(self.file.lengths[sequence]) - (end - at)
            part = self.file.tokens(sequence, begin, missing)
            yield sequence, part
            missing, at, place = missing - len(part), end, place + 1
            self._touched += part.nbytes + _AROUND
            if self._touched > _MOST_TOUCHED:
                _give_back(part, self.file.lengths, self._documents, self._ends, self._order)
                self._touched = 0


def _shuffled(values: np.ndarray, state: np.random.RandomState) -> np.ndarray:
    state.shuffle(values)
    return values


class _Blend:
    """Chooses the part of a blend that each sample comes from: the part that lags furthest behind
    its weight, as in Megatron's `build_blending_indices`. With `limits`, the samples of each part,
    it chooses as `build_exhaustive_blending_indices` does. Choices are made on demand."""

    def __init__(self, weights: Sequence[float], limits: Sequence[int] | None = None) -> None:
        total = float(np.sum(np.array(weights, dtype=np.float64)))
        self.weights = [weight / total for weight in weights]
        self._limits = limits
        self._counts = [0] * len(weights)
        self._parts, self._numbers = array("h"), array("q")

    def __getitem__(self, index: int) -> tuple[int, int]:
        """The part, and the number of the sample in it."""
        while len(self._parts) <= index:
            at = max(len(self._parts), 1.0)
            lags = [w * at - n for w, n in zip(self.weights, self._counts, strict=True)]
            for k, limit in enumerate(self._limits or ()):
                if self._counts[k] >= limit:
                    lags[k] = -math.inf
            part = lags.index(max(lags))
            self._parts.append(part)
            self._numbers.append(self._counts[part])
            self._counts[part] += 1
        return self._parts[index], self._numbers[index]


class StreamOrder(SampleOrder):
    """The order of Megatron-LM: samples one after another in whole steps, also across the end of an
    epoch. `num_examples` counts the samples of one epoch."""

    mixes_epochs = True  # the epochs of a run are shuffled together

    @property
    def batches_per_epoch(self) -> int:
        steps = max(1, self.num_examples // self.samples_per_step)
        return steps * self.training.gradient_accumulation_steps

    def step_indices(self, step: int) -> list[np.ndarray]:
        if step < 0:
            raise IndexError(f"step {step} is negative")
        first = step * self.samples_per_step
        numbers = np.arange(first, first + self.samples_per_step)
        return np.split(numbers, self.training.gradient_accumulation_steps)

    def largest(
        self, tokens: np.ndarray, first_step: int, *, packed: bool = False, multiple: int = 1
    ) -> tuple[int, int] | None:
        """The first micro-batch, since all are equally large."""
        return (first_step, 0) if first_step < self.total_steps else None

    def padded(self, tokens: np.ndarray, multiple: int = 1) -> float:
        """0: no micro-batch has padding."""
        return 0.0


@dataclass(frozen=True)
class MegatronCorpus(Corpus):
    """The corpus that `data.train` or `data.eval` names: files, the sequences taken of each, and
    the weights of a blend. `known` is the number of token ids that the model has embeddings for."""

    files: list[IndexedFile]
    numbers: list[range]
    weights: list[float] | None
    length: int
    known: float

    @cached_property
    def tokens(self) -> int:
        return sum(map(_tokens, self.files, self.numbers))

    @cached_property
    def pass_samples(self) -> list[int]:
        """The samples in one pass over each part. Raises DataError for a part without samples."""
        counts = list(map(_tokens, self.files, self.numbers))
        for file, tokens in zip(self.files, counts, strict=True):
            if tokens <= self.length:
                text = f"{file.bin} holds {tokens:,} tokens, and a sample takes {self.length + 1:,}"
                raise DataError(text, hint="lower data.max_length")
        return [(tokens - 1) // self.length for tokens in counts]

    @property
    def line(self) -> str:
        return (
            f"{sum(self.pass_samples):,} samples of {self.length + 1:,} tokens in one pass over "
            f"{self.tokens:,} tokens of {{}}, in Megatron's order"
        )

    def train(self, training: TrainingConfig) -> tuple[Samples, StreamOrder]:
        if training.data_kind != "text":
            raise DataError(
                f"training.objective {training.objective!r} is not trained on Megatron's files,"
                " which hold texts",
                hint="leave it out, or name data that docs/objectives.md has for it",
            )
        if training.train_sampling_strategy != "random":
            raise DataError(
                "training.train_sampling_strategy: Megatron's files are read in Megatron's own"
                " order",
                hint="leave it out",
            )
        order = StreamOrder(sum(self.pass_samples), training)
        return self.samples(order.total_steps * order.samples_per_step, order.seed), order

    def held_out(self, seed: int) -> Samples:
        return self.samples(None, seed)

    def samples(self, count: int | None, seed: int) -> Samples:
        """The samples of a run that takes `count` of them; None: the samples of one pass.

        As in Megatron, a list without weights is taken in proportion to the samples of its parts.
        Megatron stops after one pass. Here the run goes on as if the numbers of samples were the
        weights.
        """
        sizes, weights = self.pass_samples, self.weights
        if len(self.files) == 1:
            wanted, blend = [count], None
        elif weights is None and (count is None or count <= sum(sizes)):
            blend = _Blend(sizes, sizes if count is None else None)
            wanted = [None] * len(sizes)
        else:
            count = sum(sizes) if count is None else count
            blend = _Blend(weights or sizes)
            wanted = [math.ceil(math.ceil(count * w) * (1 + _SURPLUS)) for w in blend.weights]
        streams = [
            _Stream(file, numbers, self.length, n, seed)
            for file, numbers, n in zip(self.files, self.numbers, wanted, strict=True)
        ]
        return Samples(self, streams, blend, sum(sizes) if count is None else count)


def find_corpus(
    name: str, sources: Sequence[Source], split: str, data: DataConfig, known: float
) -> MegatronCorpus:
    """The corpus that data.train or data.eval (`name`) means. Raises DataError for settings that
    have no meaning for token ids."""
    if others := [source.name for source in sources if not source.is_parted]:
        raise DataError(f"data.{name} mixes Megatron's files with others: {', '.join(others)}")
    for setting in _MEANINGLESS:
        if getattr(data, setting) != DataConfig.model_fields[setting].default:
            text = f"data.{setting} has no meaning for Megatron's files: they hold token ids"
            raise DataError(text, hint="leave it out")
    if data.max_length is None:
        raise DataError("Megatron's files need data.max_length", hint="it is Megatron's seq-length")
    files = [IndexedFile(source.path) for source in sources if source.path is not None]
    reader = SplitReader(split, ("train",) if name == "train" else ("test", "train"))
    numbers = [reader.of_rows(str(file.bin), len(file)) for file in files]
    weights = [source.weight for source in sources if source.weight is not None]
    return MegatronCorpus(files, numbers, weights or None, data.max_length, known)


@dataclass(frozen=True)
class Samples:
    """`count` rows of `length` + 1 tokens, in the order in which a run takes them."""

    corpus: MegatronCorpus
    streams: list[_Stream]
    blend: _Blend | None
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and labels, int64. Raises DataError for an id beyond the model's embeddings."""
        stream, number = self._place(index)
        parts, known = [], self.corpus.known
        for sequence, part in stream.pieces(number):
            if part.size and not 0 <= part.min() <= part.max() < known:
                wrong = part.max() if part.min() >= 0 else part.min()
                text = f"the token id {wrong}, but the model has {known} embeddings, from 0 on"
                text = f"{stream.file.bin}: document {sequence} has {text}"
                hint = "the files were made with another tokenizer than this model's"
                raise DataError(text, hint=hint)
            parts.append(part.astype(np.int64))
        ids = np.concatenate(parts)
        return ids, ids.copy()

    def where(self, index: int) -> str:
        """The files and documents of a row."""
        stream, number = self._place(index)
        documents = [str(sequence) for sequence, part in stream.pieces(number) if part.size]
        return f"{stream.file.bin} document {', '.join(documents)}"

    def _place(self, index: int) -> tuple[_Stream, int]:
        part, number = (0, index) if self.blend is None else self.blend[index]
        return self.streams[part], number

    @property
    def tokens(self) -> int:
        """Tokens of one pass."""
        return self.corpus.tokens

    @property
    def lengths(self) -> np.ndarray:
        return np.broadcast_to(np.int64(self.longest), len(self))

    @property
    def longest(self) -> int:
        return self.corpus.length + 1

    @cached_property
    def fingerprint(self) -> str:
        """sha256, in hex, of the files' `fingerprint` and of all else that decides the samples,
        except the seed."""
        digest = hashlib.sha256(f"megatron 1 {self.longest} {self.corpus.weights}".encode())
        for stream, numbers in zip(self.streams, self.corpus.numbers, strict=True):
            digest.update(stream.file.fingerprint)
            digest.update(str([numbers, stream.rule]).encode())
        return digest.hexdigest()
