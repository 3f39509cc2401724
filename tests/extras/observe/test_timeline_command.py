"""The command `hetero timeline`."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero_framework import cli
from tests.extras.observe.timeline_samples import record
from tests.unit.test_cli import run_process

ALONE = {"devices": [0], "micro_batches": 1, "forward_s": [1], "backward_s": [1]}


def test_timeline_explains_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = {"devices": [0, 1], "micro_batches": 2, "forward_s": [1, 1], "backward_s": [2, 2]}
    record(tmp_path, steps, steps=[1, 2])
    assert cli.main(["timeline", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("steps 2 to 3: 2 micro-batches through 2 stages")


def test_timeline_reports_wrong_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["timeline", str(tmp_path)]) == 2
    assert "there is no timeline" in capsys.readouterr().err
    record(tmp_path, ALONE, steps=[1])
    (tmp_path / "timeline.json").write_text("{", encoding="utf-8")
    assert cli.main(["timeline", str(tmp_path)]) == 2
    assert "is damaged" in capsys.readouterr().err


def test_timeline_does_not_import_torch(tmp_path: Path) -> None:
    record(tmp_path, ALONE, steps=[1])
    program = (
        "import sys\n"
        "import hetero_framework.cli as cli\n"
        "code = cli.main(['timeline', sys.argv[1]])\n"
        "sys.exit(code or ('imported torch' if 'torch' in sys.modules else 0))\n"
    )
    done = run_process("-c", program, str(tmp_path))
    assert done.returncode == 0, done.stderr
