"""Facts about a setting stand at its field: no module lists names of settings."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

from hetero_framework.config import effects
from tests.installed import whole

PACKAGE = Path(__file__).resolve().parents[3] / "hetero_framework"
INNER = [name for name in effects.effects() if "." in name and not name.startswith("shard_plan")]
NAMES = {part for name in INNER for part in (name, name.partition(".")[2])}
# Facts about another format or about one step of a command, which no field could have.
LEFT = {
    "extras/planner/estimate.py": 1,  # what it takes out of a file: it has not been given the data
    "commands/init.py": 1,  # the LoRA that it writes
    "config/expressions.py": 1,  # the text that PEFT puts around each
    "extras/foreign_formats/gguf.py": 1,  # what the format cannot hold
    "extras/foreign_formats/megatron.py": 1,  # what has no meaning for token ids
    "extras/observe/trace_file.py": 1,  # what the times of a file were taken with
    "extras/planner/fleet.py": 1,  # what it takes from a coordinator's file
}


def texts_of(node: ast.AST) -> Iterator[str]:
    """The texts of a literal, those within starred parts and the words of a text too."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from node.value.split()
    elif isinstance(node, ast.Starred):
        yield from texts_of(node.value)
    elif isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        for part in node.elts:
            yield from texts_of(part)


def lists(tree: ast.Module) -> list[ast.AST]:
    """Literals that are mostly names of three settings or more, outermost ones only. A dictionary
    within a function is a part of a file that is written; one of a module is a list."""
    constants = [node.value for node in tree.body if isinstance(node, (ast.Assign, ast.AnnAssign))]
    nodes = [node for node in ast.walk(tree) if isinstance(node, (ast.List, ast.Tuple, ast.Set))]
    texts = {node: list(texts_of(node)) for node in nodes}
    for node in constants:
        if isinstance(node, ast.Dict):
            keys = [text for key in node.keys if key is not None for text in texts_of(key)]
            values = [text for value in node.values for text in texts_of(value)]
            texts |= {node: max(keys, values, key=lambda found: len(NAMES & {*found}))}
    found = [
        node
        for node, words in texts.items()
        if len(NAMES & {*words}) >= 3 and sum(w in NAMES for w in words) >= 0.6 * len(words)
    ]
    inner = {part for node in found for part in ast.walk(node) if part is not node}
    return [node for node in found if node not in inner]


@whole
def test_no_module_lists_names_of_settings():
    counts = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        place = file.relative_to(PACKAGE)
        is_schema = place.name == "settings.py" or place.as_posix() == "config/schema.py"
        is_translation = place.parts[:2] == ("extras", "convert")
        if is_schema or is_translation:
            continue
        if number := len(lists(ast.parse(file.read_text(encoding="utf-8")))):
            counts[place.as_posix()] = number
    assert counts == LEFT, "mark the fields (config/section.py) and ask for the marks"


@whole
def test_every_setting_is_read():
    """In the code, or as the condition of an extra. The adapter section is handed to PEFT as a
    whole, and losses are called with arguments of these names."""
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in PACKAGE.rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    read |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    for file in PACKAGE.rglob("*.toml"):
        conditions = chain(*tomllib.loads(file.read_text(encoding="utf-8")).values())
        read |= {condition.rpartition(".")[2] for condition in conditions}
    others = [name for name in effects.effects() if not name.startswith("adapter.")]
    unread = {name for name in others if name.rpartition(".")[2] not in read}
    assert unread == {"workers.num_gpus"}, "take out settings that nothing reads"


@pytest.mark.parametrize(
    "code",
    [
        "A = ('seed', 'bf16', 'fp16')",
        "A = {'training': 'learning_rate seed bf16'}",
        "A = {'seed': 1, 'bf16': 2, 'optim': 3}",
        "def f():\n    for name in ['training.seed', *('training.bf16', 'training.fp16')]: pass",
    ],
)
def test_a_list_of_settings_is_noticed(code):
    assert len(lists(ast.parse(code))) == 1
    assert lists(ast.parse("def f():\n    return {'seed': 1, 'bf16': True, 'optim': 'sgd'}")) == []
