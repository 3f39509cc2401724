"""The workflows of .github run what the pages say, with versions that somebody chose."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / ".github").rglob("*.yml"))
WORKFLOWS = [file for file in FILES if file.parent.name == "workflows"]


def read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return found


def steps(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def test_tests_run_on_the_systems_and_versions_that_the_package_names():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = " ".join(project["classifiers"])
    matrix = read(ROOT / ".github" / "workflows" / "tests.yml")["jobs"]["tests"]["strategy"][
        "matrix"
    ]
    assert matrix["python"] == re.findall(r"Python :: (3\.\d+)", named)
    assert [system.partition("-")[0] for system in matrix["os"]] == ["ubuntu", "macos", "windows"]


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_actions_have_versions_and_only_publishing_may_write(file):
    workflow = read(file)
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert name == "publish" or "permissions" not in job
    for step in steps(workflow):
        assert re.fullmatch(
            r"actions/[\w-]+@v\d+|[\w/-]+@v\d+\.\d+\.\d+", step.get("uses", "a/b@v1.0.0")
        )


def test_every_make_target_of_a_workflow_exists():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    used = {t for file in WORKFLOWS for s in steps(read(file)) for t in targets(s.get("run", ""))}
    assert used == {"dist", "docs"}
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in used)


def targets(script: str) -> list[str]:
    return re.findall(r"\bmake (\w+)", script)


def test_publishing_needs_no_token():
    publish = read(ROOT / ".github" / "workflows" / "release.yml")["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert "with" not in publish["steps"][-1]
    assert publish["environment"] == "pypi"


def test_a_bug_is_reported_with_what_the_doctor_says():
    forms = [
        file for file in FILES if file.parent.name == "ISSUE_TEMPLATE" and "body" in read(file)
    ]
    assert len(forms) == 2
    for form in forms:
        assert "`hetero doctor`" in form.read_text(encoding="utf-8")


def test_every_page_is_in_the_sites_menu():
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    pages = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md")}
    pages |= {path.name for path in ROOT.glob("*.md")}
    assert set(re.findall(r"[\w/-]+\.md", text)) == {*pages, "benchmarks/README.md"}
