"""Permitted imports and forbidden calls: read from the source, not run."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.installed import needs

pytestmark = pytest.mark.xdist_group("layering")  # one process reads all files
ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hetero_framework"
# Imports point to a lower number. Parts of the same number do not know each other.
LAYERS = {
    "_version": 0,
    "errors": 0,
    "units": 0,
    "file_trust": 1,
    "registry": 1,
    "repository": 1,
    "tables": 1,
    "versions": 1,
    "log": 2,
    "core": 3,
    "control": 4,
    "config": 4,
    "data": 5,
    "security": 5,
    "models": 6,
    "engine": 7,
    "cluster": 8,
    "trainer": 9,
    "commands": 10,
    "extras": 11,
    "api": 12,
    "cli": 12,
    "__main__": 13,
}
MODULES = sorted(PACKAGE.rglob("*.py"))
PROGRAMS = sorted(
    file
    for folder in (PACKAGE, ROOT / "examples", ROOT / "benchmarks", ROOT / "docs", ROOT / "tests")
    for file in folder.rglob("*.py")
) + [ROOT / "init_config.py"]
SOCKETS = {f"core/{name}.py" for name in ("stream", "dial", "addresses", "tls")}
CALLS = {"eval", "exec", "compile", "__import__", "torch.load", "joblib.load"}
UNPICKLERS = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}


def imported(node: ast.AST) -> Iterator[str]:
    """Every module of an import; with `from a import b` both a and a.b, since b may be a module."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        yield str(node.module)
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports(tree: ast.AST) -> Iterator[str]:
    return (module for node in ast.walk(tree) for module in imported(node))


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@pytest.fixture(scope="module", autouse=True)
def _forgotten():
    """Millions of nodes, at which every collection of later tests would look."""
    yield
    parsed.cache_clear()


def part(module: str) -> str | None:
    """The part of this package that a dotted name belongs to; None for other packages' names."""
    package, _, rest = module.partition(".")
    first = rest.partition(".")[0]
    return first if package == "hetero_framework" and first in LAYERS else None


def part_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def wrong_imports(file: Path, tree: ast.AST) -> list[str]:
    own = part_of(file)
    used = {found for module in imports(tree) if (found := part(module)) not in (None, own)}
    return sorted(str(other) for other in used if LAYERS[str(other)] >= LAYERS[own])


def test_every_part_has_a_layer():
    assert {part_of(file) for file in MODULES} - {"__init__"} == set(LAYERS)


def test_core_and_config_do_not_know_each_other():
    for room, other in (("core", "config"), ("config", "core")):
        for file in (PACKAGE / room).rglob("*.py"):
            assert other not in {part(module) for module in imports(parsed(file))}, file


def circle(arrows: dict[str, set[str]]) -> set[str]:
    """Modules that import each other, directly or through others."""
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        return set(error.args[1])
    return set()


def test_no_modules_import_each_other():
    """Imports within functions and those of types alone count as well."""
    trees = {
        f.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): parsed(f) for f in MODULES
    }
    arrows = {name: set(imports(tree)) & trees.keys() for name, tree in trees.items()}
    assert circle(arrows) == set()
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == {"b", "c"}


def test_no_class_name_is_defined_twice():
    nodes = [node for file in MODULES for node in ast.walk(parsed(file))]
    names = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


def modules_used(folder: Path) -> set[str]:
    """The modules of this package that those of a folder import from outside of it."""
    start = ".".join(folder.relative_to(ROOT).parts)
    files = folder.rglob("*.py")
    used = {module for file in files for module in imports(parsed(file)) if part(module)}
    return {module for module in used if not module.startswith(start)}


def test_schedules_are_times_alone():
    """Neither models nor processes: the planner simulates with them."""
    used = modules_used(PACKAGE / "engine" / "schedule")
    assert {part(module) for module in used} <= {"config", "core", "units"}


# Modules below the extras that import one all the same. None is added; this list ends empty.
STILL: set[str] = set()


def test_imports_point_one_way():
    files = {f.relative_to(PACKAGE).as_posix(): f for f in MODULES if part_of(f) != "__init__"}
    found = {name: wrong_imports(file, parsed(file)) for name, file in files.items()}
    wrong = {name: parts for name, parts in found.items() if parts}
    assert wrong == {name: ["extras"] for name in STILL}


def test_the_version_comes_from_its_own_module():
    for file in MODULES:
        nodes = (n for n in ast.walk(parsed(file)) if isinstance(n, ast.Attribute))
        used = {ast.unparse(node) for node in nodes if node.attr == "__version__"}
        assert "hetero_framework.__version__" not in used | set(imports(parsed(file))), file


def test_the_hearts_tests_need_no_extra():
    """They pass where its folder is taken away; within functions an import may be tried."""
    for file in [*(ROOT / "tests").glob("*.py"), *(ROOT / "tests" / "unit").rglob("*.py")]:
        nodes = (n for n in parsed(file).body if isinstance(n, (ast.Import, ast.ImportFrom)))
        for module in (module for node in nodes for module in imports(node)):
            assert not module.startswith(("hetero_framework.extras.", "tests.extras.")), file


def test_an_upward_import_is_noticed():
    up = ast.parse("def f():\n    from hetero_framework.engine import stage")
    assert wrong_imports(PACKAGE / "models" / "shard.py", up) == ["engine"]
    sideways = ast.parse("from hetero_framework import security")
    assert wrong_imports(PACKAGE / "data" / "load.py", sideways) == ["security"]


@pytest.mark.parametrize(
    ("one", "other"),
    [("trainer.coordinator", "cluster.worker"), ("cluster.worker", "trainer.coordinator")],
)
def test_two_sides_do_not_import_each_other(one, other):
    """Not even through third modules."""
    seen: set[str] = set()
    waiting = [f"hetero_framework.{one}"]
    while waiting:
        module = waiting.pop()
        file = ROOT / Path(*module.split(".")).with_suffix(".py")
        if module not in seen and file.is_file():
            seen.add(module)
            waiting += [found for found in imports(parsed(file)) if part(found)]
    assert f"hetero_framework.{other}" not in seen
    assert len(seen) > 5


def test_sockets_are_in_few_modules():
    users = {
        str(file.relative_to(PACKAGE).as_posix())
        for file in MODULES
        if {"socket", "ssl", "selectors", "asyncio", "socketserver"} & set(imports(parsed(file)))
    }
    assert users == SOCKETS


def forbidden(tree: ast.AST) -> list[str]:
    """Whatever runs code out of data: unpickling, eval and exec, code from a model hub."""
    found = []
    for node in ast.walk(tree):
        found += [m for m in imported(node) if m.partition(".")[0] in UNPICKLERS]
        if isinstance(node, ast.Call):
            last = getattr(node.func, "id", getattr(node.func, "attr", None))
            called = ast.unparse(node.func) if last in CALLS | {"load"} else ""
            if called in CALLS:
                found.append(called)
            if any(k.arg == "allow_pickle" for k in node.keywords):
                found.append("allow_pickle")
            if called.endswith(".eval"):
                found.append(called)  # train(False), so that a search for eval( finds nothing
        elif isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
            found += [] if ast.unparse(node.value) == "False" else ["trust_remote_code"]
    return found


def test_nothing_runs_code_out_of_data():
    for file in PROGRAMS:
        assert forbidden(ast.parse(file.read_text(encoding="utf-8"))) == [], file


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "def f():\n    from cloudpickle import loads",
        "torch.load('x')",
        "eval(text)",
        "model.eval()",
        "AutoModel.from_pretrained(x, trust_remote_code=True)",
        "AutoModel.from_pretrained(x, trust_remote_code=flag)",
        "numpy.load(x, allow_pickle=True)",
    ],
)
def test_code_out_of_data_is_noticed(code):
    assert len(forbidden(ast.parse(code))) >= 1


def test_light_modules_do_not_import_torch():
    """Help, configuration and protocol answer at once and run where torch is broken."""
    light = "hetero_framework, hetero_framework.config, hetero_framework.cli"
    light += ", hetero_framework.core.frames, hetero_framework.core.session"
    light += ", hetero_framework.control, hetero_framework.cluster.roles"
    light += ", hetero_framework.cluster.local_workers"
    code = (
        f"import sys, {light}\n"
        "hetero_framework.cli.build_parser().format_help()\n"
        "print(sorted({'torch', 'numpy', 'transformers', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Where an error nobody expected is handed to whoever waits: the outermost loop of a process, of a
# thread, what records how a run ended and raises it again, or a vendor's package of devices.
BROAD = {
    "cli.py": 1,
    "control.py": 1,  # code of the user's: the error is raised again as theirs
    "cluster/worker.py": 2,
    "core/threads.py": 1,
    "core/devices.py": 3,
    "core/link.py": 3,
    "engine/boundary_io.py": 1,
    "trainer/coordinator.py": 1,
    "extras/host_memory/streamed_layers.py": 1,  # raised again in the thread that waits
    "extras/reporting/hub_upload.py": 1,
    "extras/reporting/predictions.py": 1,
}


def broad(tree: ast.AST) -> int:
    handlers = [node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)]
    names = [ast.unparse(h.type) if h.type is not None else "" for h in handlers]
    tuples = (node.elts for node in ast.walk(tree) if isinstance(node, ast.Tuple))
    names += [ast.unparse(part) for parts in tuples for part in parts]
    return sum(name in ("", "Exception", "BaseException") for name in names)


@needs("reporting")
def test_all_exceptions_are_caught_only_in_outermost_loops():
    found = {str(f.relative_to(PACKAGE).as_posix()): broad(parsed(f)) for f in MODULES}
    assert {file: count for file, count in found.items() if count} == BROAD
