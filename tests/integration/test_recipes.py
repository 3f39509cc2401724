"""Each recipe of examples/recipes, copied by `hetero init`, is checked and trains two steps with a
tiny model of its family and the rows that its comments show."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from PIL import Image
from transformers import AutoTokenizer

from hetero_framework.cli import main
from hetero_framework.config.strict_json import read_object
from hetero_framework.extras.yaml_files.recipes import recipes
from hetero_framework.models.cut.tiny import TINY_LAYERS
from tests.extras.foreign_formats.test_gguf import STUB
from tests.extras.islands.helpers import StandIn, serving, train_islands
from tests.extras.vision.seeing import LAYERS, save_idefics3
from tests.samples import free_ports, plan_of, read_jsonl, save_tiny
from tests.unit.data_helpers import CHATML

pytestmark = pytest.mark.usefixtures("nothing_left_here")

FAMILIES = {
    **{"Qwen/Qwen3": "qwen3", "Qwen/Qwen2.5": "qwen2", "FacebookAI/roberta": "roberta"},
    **{"meta-llama/Llama": "llama", "HuggingFaceTB/SmolLM2": "llama"},
    "HuggingFaceTB/SmolVLM": "idefics3",
}
STEPS = 2
ROWS = 33  # two steps an epoch of the largest batch, and one or more held out
IN_MAKE_TEST = ("sft-lora", "classification", "dpo", "mixture", "full")
SLOW = ("visualize", "verify_architecture", "probe_longest_batch")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with a tiny model of each family."""
    folder = tmp_path_factory.mktemp("models")
    save_idefics3(folder / "idefics3", tile=512)
    for family in {*FAMILIES.values()} - {"idefics3"}:
        save_tiny(family, folder / family, max_position_embeddings=1200)
        tokenizer = AutoTokenizer.from_pretrained(folder / family)
        tokenizer.chat_template = CHATML
        tokenizer.save_pretrained(folder / family)
    return folder


@pytest.fixture
def prepared(models, tmp_path, monkeypatch):
    """prepared(NAME) copies a recipe into the folder of the test, with its model and data."""

    def prepare(name: str) -> Path:
        monkeypatch.chdir(tmp_path)
        text = recipes()[name].read_text(encoding="utf-8")
        of = re.search(r"name_or_path: (\S+)", text)[1]
        family = next(kind for start, kind in FAMILIES.items() if of.startswith(start))
        save_rows(text)
        assert main(["init", "--recipe", name, "--model", str(models / family)]) == 0
        return tmp_path / "hetero_config.yaml"

    return prepare


def save_rows(text: str) -> None:
    """The files that a recipe names, with the rows that its comments show over and over."""
    rows = re.findall(r"^#   (\{.*|.*,\w+)$", text, re.MULTILINE)
    head = rows[:1] if not rows[0].startswith("{") else []
    rows = rows[len(head) :]
    assert len(rows) == 3
    Path("data").mkdir()
    for name in {*re.findall(r"pictures/\w+.jpg", "".join(rows))}:
        Path("pictures").mkdir(exist_ok=True)
        Image.new("RGB", (60, 40), "red").save(name)
    for file in re.findall(r"^ +.*?(data/\S+)", text, re.MULTILINE):
        lines = [*head, *(rows[k % 3] for k in range(ROWS))]
        place = Path(file.replace("*", "part-1"))
        place.write_text("\n".join(lines) + "\n", encoding="utf-8")


def test_there_are_twelve_and_each_says_what_it_is_and_needs():
    assert len(recipes()) >= 12
    for file in recipes().values():
        text = file.read_text(encoding="utf-8")
        assert re.match(r"# \w.*\.\n#\n", text), file
        assert re.search(r"^# Memory: .*\d", text, re.MULTILINE), file


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] if name not in IN_MAKE_TEST else [])
        for name in recipes()
        if name != "two-islands"
    ],
)
def test_a_recipe_is_checked_and_trains(name, prepared, tmp_path):
    config = prepared(name)
    assert main(["check", "--config", str(config)]) == 0
    [port] = free_ports(1)
    changes = [f"training.max_steps={STEPS}", f"coordinator.port={port}"]
    changes += ["coordinator.device=cpu", *(f"training.{name}=false" for name in SLOW)]
    if name != "sft-lora":  # to plan and to measure takes as long as the steps
        layers = LAYERS if name == "pictures" else TINY_LAYERS
        changes.append(f"shard_plan={json.dumps(plan_of(('local', layers)))}")
    if "eval_steps:" in config.read_text(encoding="utf-8"):
        changes += ["training.eval_steps=1", "training.save_steps=1"]
    assert main(["train", "--config", str(config), *(f"--set={one}" for one in changes)]) == 0
    output = tmp_path / "runs" / name
    lines = read_jsonl(output / "metrics.jsonl")
    assert sum("loss" in line for line in lines) == STEPS
    evaluations = [line for line in lines if line.keys() & {"eval_loss", "eval_math_loss"}]
    assert bool(evaluations) == ("eval_strategy" in read_object(config)["training"])
    assert (output / "adapter").exists() or (output / "model").exists()


@pytest.mark.long
def test_the_commands_of_the_recipe_for_llama_cpp_run_as_they_stand(prepared, tmp_path):
    config = prepared("gguf")
    scripts = tmp_path / "llama.cpp"
    scripts.mkdir()
    (scripts / "convert_hf_to_gguf.py").write_text(STUB)
    (scripts / "told.json").write_text(json.dumps({"content": "GGUF...", "code": 0}))
    changes = ["--set=training.max_steps=1", f"--set=coordinator.port={free_ports(1)[0]}"]
    assert main(["train", "--config", str(config), *changes]) == 0
    commands = re.findall(r"^#   hetero (.*)$", config.read_text(encoding="utf-8"), re.MULTILINE)
    assert [main(command.split()) for command in commands] == [0, 0]
    assert [*(tmp_path / "gguf").glob("*.gguf")]


@pytest.mark.long
def test_two_islands_of_a_recipe_agree(prepared, tmp_path):
    raw = read_object(prepared("two-islands"))
    assert main(["check", "--config", "hetero_config.yaml"]) == 0
    quorums, raws = StandIn(), {}
    quorums.least = 2
    with serving(quorums) as lighthouse:
        for name, port in zip(("garage", "shed"), free_ports(2), strict=True):
            training = {**raw["training"], "output_dir": str(tmp_path / name), "max_steps": STEPS}
            raws[name] = {
                **{**raw, "shard_plan": plan_of(("local", TINY_LAYERS)), "training": training},
                "coordinator": {"ip": "127.0.0.1", "device": "cpu", "port": port},
                "data": {**raw["data"], "train": str(tmp_path / "data" / "train.jsonl")},
                "island": {**raw["island"], "name": name, "sync_steps": 2, "min_islands": 2}
                | {"lighthouse": f"127.0.0.1:{lighthouse.port}"},
            }
        train_islands(raws)
    weights = [tmp_path / name / "adapter" / "adapter_model.safetensors" for name in raws]
    assert weights[0].read_bytes() == weights[1].read_bytes()
