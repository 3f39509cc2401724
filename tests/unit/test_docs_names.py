"""Each `code span` of the pages names something that exists.

It is a file of the repository or of a run, a command or option, a setting, a name of the code, or a
text that the code says; the few words that belong to others are listed.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from hetero_framework import registry
from hetero_framework.cli import build_parser
from hetero_framework.config import effects
from tests.installed import whole
from tests.unit.test_troubleshooting import templates

pytestmark = [whole, pytest.mark.xdist_group("layering")]  # one process reads all files
ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hetero_framework"
# Names of transformers' architectures, written by `hetero verify --all`.
GENERATED = {ROOT / "docs" / "architectures.md"}
PAGES = sorted(
    {*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")} - GENERATED - {ROOT / "CHANGELOG.md"}
)
CODE = sorted(
    file for folder in ("hetero_framework", "benchmarks", "docs", "examples", "tests")
    for file in (ROOT / folder).rglob("*.py")
)  # fmt: skip

# What is not ours, and therefore not looked up: libraries' roots, other programs, and single words.
LIBRARIES = {"bytes", "build", "datasets", "logging", "peft", "ssl", "torch", "transformers"}
PROGRAMS = {
    *(".", "accelerate", "git", "hf", "hostname", "ip", "kill", "nohup", "pip", "sysctl"),
    *("tailscale", "timedatectl", "wsl"),
}
PROGRAMS |= {"docker", "sbatch", "sh", "sky", "ssh"}
OTHERS = {
    "Python": "assert except recv_into socket ssl MemoryBIO SSLSocket SSL_CERT_FILE",
    "the system and its tools": "/etc/hosts chmod chown gso_max_size mypy ruff tbf"
    " MALLOC_MMAP_THRESHOLD_=131072 GOMP_SPINCOUNT=300000",
    "torch": "nn.Sequential Dataset chain.load_state_dict(load_file(...))"
    " GradScaler _multi_tensor_adam abs amax aminmax aot_eager cuda:1 dynamic=True"
    " padding_mask.all() record_stream requires_grad vector_norm",
    "transformers": "AutoModelForCausalLM.from_pretrained AutoModelForImageTextToText AutoProcessor"
    " MtpModel label_ids logit_scale padding_side"
    " on_substep_end on_prediction_step on_predict"
    " align_special_tokens from_pretrained num_items_in_batch _..._implementation_internal",
    "TRL and axolotl": "DataCollatorWithFlattening DPOConfig DPOTrainer KTOConfig KTOTrainer"
    " RewardConfig SFTTrainer device_map early_stopping_patience lora_r micro_batch_size"
    " sample_packing sequence_len train_dataset",
    "tinker": "save_state",
    "peft": "PeftModel.from_pretrained pissa_niter_N",
    "WireGuard, WSL and Docker": "[Interface] [Peer] .wslconfig [wsl2]",
    "datasets and its hub": "ClassLabel Json configs load_dataset remove_none_values save_to_disk"
    " tatsu-lab/alpaca train+validation HF_TOKEN context response",
    "pydantic": "model_copy",
    "torchft": "Manager",
    "a chat template of Gemma": "<|tool_response>",
    "Megatron-LM": "preprocess_data.py MMIDIDX seq-length GPTDataset"
    " BlendedDataset full_validation eod_mask_loss reset_position_ids reset_attention_mask",
    "launchers": "~/.ssh/config hetero_launch/cluster hetero-worker-1 hetero-JOB-worker-1.log"
    " TORCH_INDEX VARIANT",
    "GitHub and PyPI": "gh-pages pypi release.yml",
    "the Makefile": "TORCH_SPEC=... VENV=DIR",
    "PyTorch's index of builds": "cu126",
    "file names that a user may choose": ".venv runs/Qwen3-0.6B runs/Qwen3-0.6B/hetero_config.json"
    " data/train.json data/train.parquet data/train.txt"
    " data/train.csv data/train.arrow"
    " data/part-*.jsonl data/validation-00000-of-00001.parquet test/a.txt runs/chaos"
    " runs/default/adapter a.jsonl b.parquet cluster.json corpus.bin corpus.idx meta-llama/*",
    "shapes of names": "test_<thing>_<condition>_<result> model.layers.17..."
    " hetero://CLUSTER/coordinator hetero://CLUSTER/worker/ID worker-<id>"
    " eval_token_loss eval_math_loss eval_chat_loss math_loss",
}
_OTHERS = {word for words in OTHERS.values() for word in words.split()}


class Names:
    """Every name and text of the code, and which of them belong to which class and module."""

    def __init__(self) -> None:
        self.words: set[str] = set()
        self.texts = templates()
        self.members: dict[str, set[str]] = defaultdict(set)
        self.bases: dict[str, set[str]] = defaultdict(set)
        self.modules: dict[str, set[str]] = defaultdict(set)
        for file in CODE:
            self._read(file)
        for table in registry._tables().values():
            self.words |= table.keys()
            self.words.update(*(entry.facts.get("files", ()) for entry in table.values()))

    def _read(self, file: Path) -> None:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        self.words |= {file.stem, file.parent.name}
        tested = file.is_relative_to(ROOT / "tests")
        for node in ast.walk(tree):
            if not tested or isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                self.words |= set(_named(node))
            if isinstance(node, ast.ClassDef):
                inside = {name for part in ast.walk(node) for name in _named(part)}
                self.members[node.name] |= inside
                self.bases[node.name] |= {ast.unparse(base).split(".")[-1] for base in node.bases}
        top = {name for node in tree.body for name in _named(node)}
        parts = file.relative_to(ROOT).with_suffix("").parts
        for start in range(len(parts)):
            self.modules[".".join(parts[start:]).removesuffix(".__init__")] |= top

    def has(self, owner: str, name: str) -> bool:
        """Whether a class or module of this name has a member of that name."""
        inherited = any(self.has(base, name) for base in self.bases[owner])
        return name in self.members[owner] or name in self.modules[owner] or inherited


def _named(node: ast.AST) -> Iterator[str]:
    """The names that a node gives, and short texts, which may be keys or values."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, ast.ImportFrom):
        yield from (alias.asname or alias.name for alias in node.names)
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
        yield node.id if isinstance(node, ast.Name) else node.attr
    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (target.id for target in targets if isinstance(target, ast.Name))
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value


@cache
def names() -> Names:
    return Names()


@cache
def of_config() -> frozenset[str]:
    return frozenset(effects.effects())


@cache
def of_other_tools() -> frozenset[str]:
    """Settings of transformers, peft, trl and others, which have their own lists and test."""
    found: set[str] = set()
    for file in PACKAGE.rglob("alias_*.json"):
        for names in re.findall(r'"([\w. ]+)"', file.read_text(encoding="utf-8")):
            found |= set(names.split())
    return frozenset(found)


@cache
def architectures() -> str:
    """The page with the names of transformers' architectures."""
    return (ROOT / "docs" / "architectures.md").read_text(encoding="utf-8")


@cache
def options() -> dict[str, set[str]]:
    """Each command's options, those of its own commands included."""

    def of(parser: argparse.ArgumentParser) -> set[str]:
        found = set(parser._option_string_actions)
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                found |= {o for inner in action.choices.values() for o in of(inner)}
        return found

    (commands,) = build_parser()._subparsers._group_actions  # type: ignore[union-attr]
    assert isinstance(commands, argparse._SubParsersAction)
    return {name: of(parser) for name, parser in commands.choices.items()}


def spans(page: Path) -> list[str]:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = re.findall(r"(?<!`)`([^`]+)`(?!`)", text)
    return list(dict.fromkeys(" ".join(span.split()) for span in found))


def is_known(span: str, page: Path) -> bool:
    first = span.split()[0]
    if first in PROGRAMS or not re.search("[A-Za-z]", re.sub("[0-9]e-?[0-9]", "", span)):
        return True
    if _word(span) or first in ("from", "import"):
        return (
            first not in ("from", "import") or importlib.util.find_spec(span.split()[1]) is not None
        )
    if first in ("hetero", "make", "python", ".venv/bin/python"):
        return _command(span.split()) or _message(span)
    if span.startswith("--"):
        return any(first in found for found in options().values())
    if span[0] in '"[{':
        return all(_word(word) for word in re.findall(r'"([\w.*/+-]+)"', span)) or _message(span)
    if "::" in span:
        return _test(*span.split("::"))
    return _file(span, page) or _name(span) or _message(span)


def _command(words: list[str]) -> bool:
    program, command, *rest = [*words, ""]
    if not command:
        return True
    if program == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        return re.search(rf"^{command}:", makefile, re.MULTILINE) is not None
    if program != "hetero":
        if command == "-m":
            return rest[0] in LIBRARIES or importlib.util.find_spec(rest[0]) is not None
        return (ROOT / command).is_file()
    flags = {word.partition("=")[0] for word in rest if word.startswith("--")}
    return command in options() and flags <= options()[command]


def _test(file: str, function: str) -> bool:
    path = ROOT / "tests" / file
    return path.is_file() and f"def {function}(" in path.read_text(encoding="utf-8")


def _file(span: str, page: Path) -> bool:
    """A file of the repository, or the name of one that a run writes."""
    if " " in span:
        return False
    pattern = re.sub("<[a-z]+>", "*", span).rstrip("/")
    room = PACKAGE / "extras" / page.stem  # planner.md names the files of extras/planner/
    for folder in (ROOT, PACKAGE, room, ROOT / "tests", ROOT / "tests" / "unit", page.parent):
        if pattern and not pattern.startswith("/") and any(folder.glob(pattern)):
            return True
    if re.fullmatch(r"\w+\.py", span):
        return any(file.name == span for file in CODE)
    if not re.fullmatch(r"[\w.*/<>-]*[./-][\w.*/<>-]*", span):
        return False
    texts = names().texts | of_config() | {"output_dir"}
    return all(texts & _shapes(part) for part in span.strip("/").split("/"))


def _shapes(file: str) -> set[str]:
    """How the code may spell a file's name, with "..." for what it fills in."""
    file = re.sub(r"ID|(?<=[-_.])N\b|DIGEST|NAME|<id>|[0-9]+|\*", "...", file)
    ending = re.sub(r"(?<=\.)(png|svg|pdf)$", "...", file)
    stem = re.sub(r"^[\w.-]+(?=\.(before|npy|pem)$)", "...", file)
    return {file, ending, stem, file.removesuffix("...")}


def _name(span: str) -> bool:
    """`name`, `owner.name`, each with what may follow it: a call's arguments, a value."""
    match = re.fullmatch(r"@?([\w.]+?)\.?(\(.*\).*|\[.*\]|(=|: | = ).*|:[A-Z]+)?", span)
    if match is None:
        return False
    name = match[1]
    owner, _, member = name.rpartition(".")
    if not owner or name in of_config():
        return _word(name)
    if owner.split(".")[0] in LIBRARIES or name in names().modules:
        return True
    return any(names().has(o, member) for o in (owner, owner.split(".")[-1], owner.capitalize()))


# Files of others, which are only read, and words that look like files.
NOT_WRITTEN = """
.absmax .arrow .bin .cache .ckpt .csv .gz .id .idx .ip .ipynb .joblib .local .ndjson .npz .offload
.parquet .pickle .pkl .port .pt .pth .quantization .start .text .tsv .txt .weight .xz .yaml .yml
.zst arrow.json chat_template.json dataset_dict.json alias_names.json alias_settings.json
alias_trainers.json dataset_info.json
known_devices.json preprocessor_config.json processor_config.json state.json tokenizer.json
tokenizer_config.json
train.jsonl rows.jsonl video_preprocessor_config.json
"""


def test_every_file_that_is_written_is_in_the_table():
    page = (ROOT / "docs" / "maintainers" / "state_on_disk.md").read_text(encoding="utf-8")
    listed = {shape for part in re.findall(r"[\w.*-]+", page) for shape in _shapes(part)}
    endings = {f".{name.rpartition('.')[2]}" for name in listed}
    file = re.compile(
        r"\.[a-z][a-z.-]*|[\w.-]+\.(jsonl?|safetensors|pem|npy|lock|log|pause|old|tmp)"
    )
    found = {text for text in names().texts if file.fullmatch(text)}
    assert len(found) > 40
    whole = {text for text in found if text.lstrip(".") and text not in listed | endings}
    missing = {text for text in whole if re.sub(r"^\.+", ".", text) not in endings}
    assert missing - set(NOT_WRITTEN.split()) == set(), (
        "list it in docs/maintainers/state_on_disk.md"
    )


def _word(word: str) -> bool:
    return (
        word in names().words
        or word in of_config()
        or word in of_other_tools()
        or word in options()
        or word in _OTHERS
        or word in CONFIG_MAPPING_NAMES  # a model_type
        or f"`{word}`" in architectures()
    )


def _message(span: str) -> bool:
    return " " in span and any(span.strip() in " ".join(text.split()) for text in names().texts)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_in_a_page_exist(page):
    assert [span for span in spans(page) if not is_known(span, page)] == []


INVENTED = """
Pipeline._handle ReplicaGroup.reduce should_commit training.no_such_setting no_such_setting
core/no_such_module.py no_such_module.py docs/nothing.md --no-such-option NoSuchClass
planner.nothing core.link.Nothing no_such_function() output_dir/nothing.json
faults/test_networks.py::test_nothing hetero-join/1
"""
LONGER = (
    *("hetero fly", "hetero train --no-such-option", "make nothing", "python docs/nothing.py"),
    *("python -m benchmarks.nothing", "the model has no such message", '"no_such_value"'),
)


@pytest.mark.parametrize("span", [*INVENTED.split(), *LONGER])
def test_a_name_that_does_not_exist_is_noticed(span):
    assert not is_known(span, ROOT / "README.md")


def test_every_word_of_others_is_used():
    text = " ".join(" ".join(page.read_text(encoding="utf-8").split()) for page in PAGES)
    assert sorted(word for word in _OTHERS if word not in text) == []


def test_pages_that_the_code_names_exist():
    files = [file for file in CODE if file != Path(__file__)]
    texts = {file: file.read_text(encoding="utf-8") for file in [*files, ROOT / "Makefile"]}
    pages = {
        page: file for file, text in texts.items() for page in re.findall(r"docs/[\w/]+\.md", text)
    }
    assert [(page, file) for page, file in pages.items() if not (ROOT / page).is_file()] == []
