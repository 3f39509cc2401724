"""The exception tree. Every error a user or a peer can cause says what to change."""

from __future__ import annotations

import errno
import re
import traceback
from collections.abc import Callable
from typing import TypeVar

_NO_MEMORY = (
    *("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory"),
    "std::bad_alloc",
    # cuBLAS and cuDNN when torch's allocator holds everything; Intel's runtime.
    *("alloc_failed", "out_of_device_memory", "out_of_host_memory", "out_of_resources"),
)
T = TypeVar("T")
_NO_DISK = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))


class HeteroError(Exception):
    """Base of all errors of this package; `hint` is one further line that says what to do."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  {self.hint}" if self.hint else self.message

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: the sentence; with an error behind it, the traceback as well."""
        plain = [f"{type(self).__name__}: {self}"]
        return traceback.format_exception(self) if self.__cause__ else plain


class UserError(HeteroError):
    """Something the user can fix."""

    exit_code = 2


def attempt(work: Callable[[], T]) -> T | UserError:
    """The result of `work`, or its UserError."""
    try:
        return work()
    except UserError as error:
        return error


class ConfigError(UserError):
    """The configuration file is missing, broken or contradicts itself."""


class CallbackError(UserError):
    """A callback of the user's raised an error."""


class PlanError(ConfigError):
    """The shard plan does not cover the model exactly once, in order."""


class DataError(UserError):
    """The data, the tokenizer or the chat template cannot be used."""


class ModelError(UserError):
    """The model cannot be found or loaded."""


class ArchitectureError(ModelError):
    """The model cannot be cut without changing what it computes."""


class DeviceError(UserError):
    """A device is absent or lacks an ability that was asked for."""


class NetworkError(UserError):
    """An address cannot be bound or a peer cannot be reached."""


class IdentityError(NetworkError):
    """A peer has the wrong identity, or keys are missing, wrong or readable by others."""

    exit_code = 3


class ProtocolError(UserError):
    """The peer sent something that this version does not understand."""


class CheckpointError(UserError):
    """A checkpoint is absent, incomplete, damaged or belongs to another run."""


class PeerLostError(HeteroError):
    """A peer went away while a run needed it."""

    exit_code = 4


class PeerSilentError(PeerLostError):
    """Nothing came from a peer for too long, though its connection is open."""


class PeerAwayError(PeerLostError):
    """A peer stayed away for longer than a run waits; the run can go on when it is back."""

    exit_code = 75


class NumericError(HeteroError):
    """Losses or gradients stayed non-finite."""

    exit_code = 5


class ResourceError(HeteroError):
    """Memory or disk ran out."""

    exit_code = 6


class OutOfMemory(ResourceError):
    """A device's memory ran out."""


class StoppedEarly(HeteroError):
    """The run was stopped on request and can be resumed."""

    exit_code = 75


class GroupFinished(HeteroError):
    """The other islands have finished the training without this one."""

    exit_code = 0


def error_from_peer(kind: str, message: str) -> HeteroError:
    """Rebuild a peer's error by its class name; an unknown name becomes a plain HeteroError."""
    tree: list[type[HeteroError]] = [HeteroError]
    for cls in tree:
        if cls.__name__ == kind:
            return cls(message)
        tree.extend(cls.__subclasses__())
    return HeteroError(f"{kind}: {message}")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether host or device memory ran out. torch has a class of error for GPUs; the CPU, MPS and
    the libraries below torch raise a plain RuntimeError with certain words."""
    if isinstance(error, (MemoryError, OutOfMemory)):
        return True
    if any(cls.__name__ == "OutOfMemoryError" for cls in type(error).__mro__):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    lower = _first_line(error).lower()
    return isinstance(error, RuntimeError) and any(words in lower for words in _NO_MEMORY)


def as_hetero_error(error: BaseException) -> HeteroError | None:
    """`error` if it is a HeteroError; ResourceError if memory or a file failed; None for a bug."""
    if isinstance(error, HeteroError):
        return error
    if is_out_of_memory(error):
        return OutOfMemory(
            f"memory ran out: {_first_line(error)}",
            hint="give this machine fewer layers, or lower per_device_train_batch_size or"
            " data.max_length; `hetero check` shows what each stage needs",
        )
    if (refusal := of_system(error)) is not None:
        where = f" ({refusal.filename})" if refusal.filename else ""
        if refusal.errno in _NO_DISK:
            hint = "free space, or lower save_total_limit"
            return ResourceError(f"the disk is full{where}", hint=hint)
        # An error without a file name is from `tempfile`; its text lists the folders without room.
        is_of_file = where or isinstance(error, FileNotFoundError)
        if is_of_file and not isinstance(error, ConnectionError):
            return ResourceError(f"the system refuses a file: {in_words(error)}{where}")
    return None


def of_system(error: BaseException | None) -> OSError | None:
    """`error` if it is an OSError, or the OSError in the text of a Rust library's error."""
    if isinstance(error, OSError):
        return error
    told = re.search(r"([^:]*) \(os error (\d+)\)", str(error))
    return OSError(int(told[2]), told[1].strip(), None, int(told[2])) if told else None


def of_disk(error: BaseException, kind: type[HeteroError]) -> type[HeteroError]:
    """The class of error for a failed write: ResourceError if the disk is full, or if the file may
    not be so large, else `kind`."""
    return ResourceError if getattr(error, "errno", None) in (*_NO_DISK, errno.EFBIG) else kind


def in_words(error: BaseException) -> str:
    """The reason why a file or a program could not be used, without numbers and names of codecs."""
    if isinstance(error, UnicodeError):
        return "it is no text in UTF-8"
    if isinstance(error, LookupError):
        return f"it lacks {error}"
    return getattr(of_system(error), "strerror", None) or _first_line(error)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
