from __future__ import annotations

import shutil

import pytest

from hetero_framework.cluster.run_id import RUN_FILE, run_id_of


def test_a_directory_keeps_its_run_id(tmp_path):
    folder = tmp_path / "runs" / "new"
    run_id = run_id_of(folder)
    assert len(bytes.fromhex(run_id)) == 8
    assert run_id_of(folder) == run_id
    assert run_id_of(tmp_path / "other") != run_id


def test_a_copied_directory_has_another_run_id(tmp_path):
    run_id = run_id_of(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    assert run_id_of(tmp_path / "two") != run_id
    assert run_id_of(tmp_path / "one") == run_id


@pytest.mark.parametrize("content", [b"", b"no second line", b"\xff\xfe", b"id\nelsewhere:/x"])
def test_an_invalid_run_id_is_replaced(tmp_path, content):
    (tmp_path / RUN_FILE).write_bytes(content)
    run_id = run_id_of(tmp_path)
    assert len(bytes.fromhex(run_id)) == 8
    assert run_id_of(tmp_path) == run_id


def test_a_run_id_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        run_id_of(tmp_path / "file")
