from __future__ import annotations

import ast
from itertools import pairwise
from pathlib import Path

from hetero_framework.core import timeouts

PACKAGE = Path(timeouts.__file__).parents[1]


def test_times_of_links_and_processes_are_in_one_place():
    files = [*(PACKAGE / "cluster").glob("*.py"), PACKAGE / "core" / "connection.py"]
    found = [
        f"{file.name}: {target.id}"
        for file in files
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id.endswith("_S")
    ]
    assert found == []


def test_every_timeout_is_positive_and_has_a_docstring():
    body = ast.parse(Path(timeouts.__file__).read_text(encoding="utf-8")).body
    for node, after in pairwise(body):
        if isinstance(node, ast.Assign):
            if not isinstance(node.value, ast.Call):  # the deadlines of one kind of link
                assert ast.literal_eval(node.value) > 0
            assert isinstance(after, ast.Expr), ast.unparse(node)
