"""A checkpoint is complete or absent, and is read as it was written."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from hetero_framework.errors import CheckpointError, ResourceError
from hetero_framework.trainer import checkpoint as checkpoint_module
from hetero_framework.trainer.checkpoint import CheckpointReader, CheckpointStore


def tensors_of(step: int) -> dict[str, torch.Tensor]:
    return {
        "weights/a": torch.full((3, 5), float(step)),
        "optimizer/exp_avg/a": torch.arange(15.0).view(3, 5) / (step + 1),
    }


def save(store: CheckpointStore, step: int, **manifest: object) -> Path:
    with store.begin(step) as writer:
        writer.add(0, 0, tensors_of(step))
        writer.add(1, 0, {"weights/b": torch.full((4,), step, dtype=torch.bfloat16)})
        return writer.commit({"seed": 1, **manifest})


def read_all(reader: CheckpointReader) -> dict[str, torch.Tensor]:
    return dict(reader.read(reader.names()))


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "checkpoints")


def test_read_returns_every_tensor_bit_for_bit(store):
    special = {
        "weights/nan": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
        "weights/half": torch.randn(7).to(torch.bfloat16),
        "weights/transposed": torch.randn(3, 4).t(),
        "weights/scalar": torch.tensor(3),
        "weights/empty": torch.zeros(0, 2),
        "weights/names with / and ü": torch.zeros(1, dtype=torch.bool),
    }
    with store.begin(1) as writer:
        writer.add(0, 0, special)
        writer.commit({})
    found = read_all(store.open(1))
    assert set(found) == set(special)
    for name, tensor in special.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert raw_bytes(found[name]) == raw_bytes(tensor)


def test_tied_weights_are_saved_twice_and_equal(store):
    weight = torch.randn(4, 4)
    with store.begin(1) as writer:
        writer.add(0, 0, {"weights/embedding": weight, "weights/head": weight})
        writer.commit({})
    found = read_all(store.open(1))
    assert torch.equal(found["weights/embedding"], weight)
    assert torch.equal(found["weights/head"], weight)
    assert found["weights/embedding"].data_ptr() != found["weights/head"].data_ptr()


def test_manifest_names_files_hashes_and_tensors(store):
    directory = save(store, 7, plan=[{"id": "local"}])
    manifest = store.open(7).manifest
    assert (manifest["step"], manifest["seed"], manifest["plan"]) == (7, 1, [{"id": "local"}])
    assert manifest["format_version"] == 1
    assert sorted(p.name for p in directory.iterdir()) == sorted(
        ["manifest.json", *(entry["name"] for entry in manifest["files"])]
    )
    for entry in manifest["files"]:
        content = (directory / entry["name"]).read_bytes()
        assert entry["bytes"] == len(content)
        assert entry["sha256"] == hashlib.sha256(content).hexdigest()
    assert manifest["files"][1]["tensors"] == ["weights/b"]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no modes")
def test_only_the_owner_may_read_a_checkpoint(store):
    before = os.umask(0)
    try:
        directory = save(store, 1)
    finally:
        os.umask(before)
    assert [oct(path.stat().st_mode & 0o777) for path in (store.root, directory)] == ["0o700"] * 2
    assert {oct(path.stat().st_mode & 0o777) for path in directory.iterdir()} == {"0o600"}


def test_read_missing_names_are_listed_at_once(store):
    save(store, 3)
    with pytest.raises(CheckpointError, match=r"lacks 2 of 3 tensors: weights/x, weights/y"):
        store.open(3).read(["weights/a", "weights/x", "weights/y"])


def test_writer_refuses_a_name_twice_and_leaves_nothing(store):
    with store.begin(1) as writer:
        writer.add(0, 0, tensors_of(1))
        with pytest.raises(CheckpointError, match="'optimizer/exp_avg/a' from two stages"):
            writer.add(1, 0, tensors_of(1))
    assert list(store.root.iterdir()) == []


def test_writer_without_commit_leaves_nothing(store):
    save(store, 1)

    def interrupted() -> None:
        with store.begin(2) as writer:
            writer.add(0, 0, tensors_of(2))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [p.name for p in store.root.iterdir()] == ["step_1"]


def test_commit_replaces_the_same_step(store):
    save(store, 4, attempt=1)
    save(store, 4, attempt=2)
    assert store.open(4).manifest["attempt"] == 2
    assert [p.name for p in store.root.iterdir()] == ["step_4"]


def test_commit_deletes_the_lowest_beyond_the_limit(tmp_path):
    store = CheckpointStore(tmp_path, save_total_limit=2)
    for step in (10, 20, 30):
        save(store, step)
    assert store.complete_steps() == [20, 30]
    save(store, 5)  # resumed from an early step: the new one is kept although it is the lowest
    assert store.complete_steps() == [5, 30]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_30", "step_5"]


@pytest.mark.parametrize(("limit", "kept"), [(1, [10, 40]), (2, [10, 40]), (3, [10, 30, 40])])
def test_the_best_one_is_kept_and_counts(limit, kept, tmp_path):
    store = CheckpointStore(tmp_path, save_total_limit=limit)
    store.best_steps = [10, 25]  # the latter has none
    for step in (10, 20, 30, 40):
        save(store, step)
    assert store.complete_steps() == kept


def test_a_failed_rotation_is_reported_and_does_not_end_the_run(tmp_path, logged, monkeypatch):
    store = CheckpointStore(tmp_path, save_total_limit=1)
    save(store, 1)
    replace = os.replace

    def busy(source: Path, target: Path) -> None:
        if str(target).endswith(".trash"):
            raise PermissionError(errno.EACCES, "in use")
        replace(source, target)

    monkeypatch.setattr(os, "replace", busy)
    save(store, 2)
    assert store.complete_steps() == [1, 2]
    assert len(logged) == 1
    assert "could not delete the old checkpoint" in logged[0]


def test_resolve_latest_and_number(store):
    for step in (2, 10):
        save(store, step)
    assert store.resolve("latest").step == 10
    assert store.resolve(2).step == 2
    assert store.resolve("2").step == 2


@pytest.mark.parametrize("which", ["newest", "-1", "1.5", True, ""])
def test_resolve_nonsense_is_refused(store, which):
    with pytest.raises(CheckpointError, match="give a step number or 'latest'"):
        store.resolve(which)


def test_resolve_absent_number_lists_the_complete_ones(store):
    for step in (20, 100):
        save(store, step)
    (store.root / "step_50").mkdir()
    with pytest.raises(CheckpointError, match=r"no checkpoint 40(.|\n)*complete in .*: 20, 100"):
        store.resolve(40)
    with pytest.raises(CheckpointError, match=r"50 is incomplete(.|\n)*complete in .*: 20, 100"):
        store.resolve(50)


def test_resolve_without_any_checkpoint_says_so(store):
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        store.resolve("latest")
    with pytest.raises(CheckpointError, match="there is no complete one"):
        store.resolve(3)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 4
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def rewrite_manifest(path: Path, **changes: object) -> None:
    content = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps(content), encoding="utf-8")


DAMAGES = {
    "flipped bit": ("stage-1.0.safetensors", flip_a_bit, r"stage-1\.0.*sha256"),
    "truncated": ("stage-0.0.safetensors", truncate, r"stage-0\.0.* bytes instead of"),
    "missing file": ("stage-1.0.safetensors", Path.unlink, r"stage-1\.0\S+ is missing"),
    "no manifest": ("manifest.json", Path.unlink, "has no manifest"),
    "empty manifest": ("manifest.json", lambda p: p.write_bytes(b""), "cannot be read"),
    "not UTF-8": ("manifest.json", lambda p: p.write_bytes(b"\xff\xfe{"), "cannot be read"),
    "not an object": ("manifest.json", lambda p: p.write_bytes(b"[]"), "not an object"),
    "deep": ("manifest.json", lambda p: p.write_bytes(b"[" * 200_000), "cannot be read"),
    "edited": ("manifest.json", lambda p: rewrite_manifest(p, seed=2), "changed after"),
    "odd format": ("manifest.json", lambda p: rewrite_manifest(p, format_version="x"), "'x'"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_number_is_refused_and_latest_falls_back(store, logged, kind):
    name, damage, text = DAMAGES[kind]
    for step in (1, 2):
        save(store, step)
    assert store.resolve("latest").step == 2
    damage(store.root / "step_2" / name)
    with pytest.raises(CheckpointError) as caught:
        store.resolve(2)
    assert re.search(text, str(caught.value))
    assert "complete in" in str(caught.value)
    assert logged == []
    assert store.resolve("latest").step == 1
    assert len(logged) == 1
    assert logged[0].startswith("checkpoint 2 ")
    assert logged[0].endswith("; using checkpoint 1")


def test_a_checkpoint_that_lost_its_manifest_is_not_passed_over_in_silence(store):
    (save(store, 2) / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"(?s)checkpoint 2 is incomplete.*no valid"):
        store.resolve("latest")


def test_a_disk_that_dies_after_the_commit_is_reported(tmp_path, logged, monkeypatch):
    """Found by the sweep: what rotation could not look at raised OSError, which ended the run."""
    store = CheckpointStore(tmp_path, save_total_limit=1)
    save(store, 1)
    lstat = Path.lstat

    def dead(path: Path) -> os.stat_result:
        if path.parent == tmp_path and (tmp_path / "step_2").exists():
            raise OSError(errno.EIO, "Input/output error")
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", dead)
    save(store, 2)
    monkeypatch.undo()
    assert store.resolve("latest").step == 2


@pytest.mark.parametrize("operation", ["directory", "size", "tensors"])
def test_a_disk_that_cannot_be_read_makes_a_damaged_checkpoint(
    store, logged, monkeypatch, operation
):
    """Found by the sweep: these raised OSError or RuntimeError."""
    save(store, 1)
    save(store, 2)
    ill = store.root / "step_2"

    def refuse(real: Any, error: Exception, below: Path) -> Any:
        def call(path: Path, *args: Any, **kwargs: Any) -> Any:
            if path.is_relative_to(below):
                raise error
            return real(path, *args, **kwargs)

        return call

    stale = OSError(errno.ESTALE, "Stale file handle")
    if operation == "tensors":
        torn = RuntimeError("unable to mmap 336 bytes: Stale file handle (116)")
        safe_open = refuse(checkpoint_module.safe_open, torn, ill)
        monkeypatch.setattr(checkpoint_module, "safe_open", safe_open)
        with pytest.raises(CheckpointError, match=r"2 is damaged: stage-0.0\S+ cannot be read"):
            read_all(store.resolve("latest"))
        return
    below = ill if operation == "directory" else ill / "stage-0.0.safetensors"
    monkeypatch.setattr(Path, "lstat", refuse(Path.lstat, stale, below))
    monkeypatch.setattr(Path, "stat", refuse(Path.stat, stale, below))
    assert store.resolve("latest").step == 1
    assert len(logged) == 1
    assert "Stale file handle" in logged[0]
    assert logged[0].endswith("; using checkpoint 1")


def test_latest_names_every_damaged_checkpoint(store):
    for step in (1, 2):
        flip_a_bit(save(store, step) / "stage-0.0.safetensors")
    with pytest.raises(CheckpointError, match=r"(?s)checkpoint 2 .*checkpoint 1 .*no valid"):
        store.resolve("latest")


def test_manifest_cannot_name_a_file_elsewhere(store):
    path = save(store, 1) / "manifest.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content.pop("digest")
    content["files"][0]["name"] = "../step_2/stage-0.0.safetensors"
    content["digest"] = checkpoint_module._digest(content)
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(CheckpointError, match="is not a file of a checkpoint"):
        store.open(1)


def test_leftovers_are_removed_and_reported(store, logged):
    save(store, 1)
    for name in ("step_2.tmp", "step_3.trash"):
        (store.root / name).mkdir()
        (store.root / name / "manifest.json").write_text("{}", encoding="utf-8")
    (store.root / "notes.tmp").mkdir()
    assert store.complete_steps() == [1]
    save(store, 4)
    assert sorted(p.name for p in store.root.iterdir()) == ["notes.tmp", "step_1", "step_4"]
    assert [line.split(",")[0] for line in logged] == ["removed step_2.tmp", "removed step_3.trash"]


def test_interrupted_replacement_is_found_and_put_back(store, logged):
    save(store, 5).rename(store.root / "step_5.old")
    assert store.resolve("latest").step == 5
    store.clean()
    assert [p.name for p in store.root.iterdir()] == ["step_5"]
    assert "put checkpoint 5 back" in logged[0]


def test_root_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("x", encoding="utf-8")
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        store = CheckpointStore(root)
        with pytest.raises(ResourceError, match=r"a file is in the way"):
            save(store, 1)
        with pytest.raises(CheckpointError, match=r"is a file"):
            store.complete_steps()


def test_root_that_cannot_be_written_is_refused(store, monkeypatch):
    def refuse(self: Path, *args: object, **kwargs: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ResourceError, match=r"(?s)Permission denied.*make the directory writable"):
        save(store, 1)


@pytest.mark.skipif(os.name == "nt", reason="symbolic links need a privilege on Windows")
def test_symbolic_links_in_the_way_are_refused_and_untouched(store, tmp_path):
    save(store, 1)
    elsewhere = tmp_path / "elsewhere"
    save(CheckpointStore(elsewhere), 2)
    (store.root / "step_2").symlink_to(elsewhere / "step_2")
    assert store.complete_steps() == [1]
    with pytest.raises(CheckpointError, match="symbolic link"):
        store.open(2)
    with pytest.raises(ResourceError, match="in the way"):
        save(store, 2)
    (store.root / "step_3.tmp").symlink_to(elsewhere)
    with pytest.raises(ResourceError, match="in the way"):
        save(store, 3)
    assert CheckpointStore(elsewhere).resolve(2).step == 2


@pytest.mark.parametrize(
    ("operation", "error"),
    [
        ("save_file", SafetensorError("I/O error: No space left on device (os error 28)")),
        ("sync_file", OSError(errno.ENOSPC, "No space left on device")),
        ("sync_directory", OSError(errno.ENOSPC, "No space left on device")),
    ],
)
def test_full_disk_is_a_resource_error_and_keeps_the_old(store, monkeypatch, operation, error):
    save(store, 1)

    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr(checkpoint_module, operation, fail)
    with pytest.raises(ResourceError, match=r"needs at least [\d.]+ \w+, [\d.]+ .iB are free"):
        save(store, 2)
    assert [p.name for p in store.root.iterdir()] == ["step_1"]
    assert store.resolve("latest").step == 1


@pytest.mark.skipif(sys.platform == "win32", reason="no RLIMIT_FSIZE")
def test_disk_that_fills_for_real_keeps_the_old(tmp_path):
    """The operating system itself refuses the bytes (a limit on the size of files)."""
    script = """
        import resource, sys, torch
        from hetero_framework.errors import ResourceError
        from hetero_framework.trainer.checkpoint import CheckpointStore
        store = CheckpointStore(sys.argv[1])
        with store.begin(1) as writer:
            writer.add(0, 0, {"weights/a": torch.zeros(8)})
            writer.commit({})
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        try:
            with store.begin(2) as writer:
                writer.add(0, 0, {"weights/a": torch.zeros(4096)})
        except ResourceError as error:
            print(error)
        print(store.complete_steps(), store.resolve("latest").step)
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "no space for checkpoint 2" in result.stdout
    assert result.stdout.endswith("[1] 1\n")
    assert [p.name for p in tmp_path.iterdir()] == ["step_1"]


# Kills the process at the n-th operation on files, before and after it, for every n. One parent has
# torch loaded; each case is a fork of it.
_KILL_SCRIPT = """
    import os, shutil, signal, sys
    from pathlib import Path
    import torch
    from hetero_framework.trainer import checkpoint
    from hetero_framework.trainer.checkpoint import CheckpointStore

    base, countdown = Path(sys.argv[1]), 0

    def killing(function):
        def wrapper(*args, **kwargs):
            global countdown
            countdown -= 1
            if countdown == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            result = function(*args, **kwargs)
            countdown -= 1
            if countdown == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return result
        return wrapper

    def save(root, step, value):
        store = CheckpointStore(root, save_total_limit=2)
        with store.begin(step) as writer:
            writer.add(0, 0, {"weights/a": torch.full((64,), float(value))})
            writer.add(1, 0, {"weights/b": torch.full((64,), float(value))})
            writer.commit({"value": value})

    def attempt(root, step, number):
        global countdown
        countdown = number
        for name in ("replace", "fsync", "unlink", "rmdir", "open", "mkdir"):
            setattr(os, name, killing(getattr(os, name)))
        checkpoint.save_file = killing(checkpoint.save_file)
        Path.write_text = killing(Path.write_text)
        shutil.rmtree = killing(shutil.rmtree)
        save(root, step, 3)

    save(base / "start", 1, 1)
    save(base / "start", 2, 2)
    for step in (2, 3):
        for number in range(1, 1000):
            root = base / f"{step}-{number}"
            shutil.copytree(base / "start", root)
            child = os.fork()
            if child == 0:
                attempt(root, step, number)
                os._exit(0)
            _, status = os.waitpid(child, 0)
            if os.WIFEXITED(status):
                assert os.WEXITSTATUS(status) == 0
                break
            assert os.WTERMSIG(status) == signal.SIGKILL
        print(step, number)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_kill_at_every_file_operation_leaves_old_or_new(tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_KILL_SCRIPT), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    cases = dict(map(int, line.split()) for line in result.stdout.splitlines())
    assert min(cases.values()) > 25, "the failpoints do not reach the file operations"
    outcomes = set()
    for written, count in cases.items():
        for number in range(1, count):
            store = CheckpointStore(tmp_path / f"{written}-{number}")
            for step in store.complete_steps():
                store.open(step)
            reader = store.resolve("latest")
            values = {float(v) for t in read_all(reader).values() for v in t}
            assert values == {float(reader.manifest["value"])}, (written, number)
            assert values in ({2.0}, {3.0}), (written, number)
            outcomes.add((written, values.pop()))
            save(store, 9)  # and the next run goes on
            assert not [p for p in store.root.iterdir() if "." in p.name]
    assert outcomes == {(2, 2.0), (2, 3.0), (3, 2.0), (3, 3.0)}
