"""Results as GGUF: what the scripts of llama.cpp are given, and what is refused before they run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from hetero_framework.cli import main
from tests.samples import save_llama

# It writes its arguments where a test finds them, and what a test has put beside it.
STUB = """
import argparse, json, pathlib, sys
here = pathlib.Path(__file__).parent
parser = argparse.ArgumentParser()
parser.add_argument("source", type=pathlib.Path)
for name in ("--outfile", "--outtype", "--base", "--base-model-id"):
    parser.add_argument(name)
arguments = parser.parse_args()
(here / "seen.json").write_text(json.dumps([sys.argv[0], vars(arguments)], default=str))
told = json.loads((here / "told.json").read_text())
pathlib.Path(arguments.outfile).write_bytes(told["content"].encode())
sys.exit(told["code"])
"""


@pytest.fixture
def llama_cpp(tmp_path):
    (place := tmp_path / "llama.cpp").mkdir()
    for name in ("convert_lora_to_gguf.py", "convert_hf_to_gguf.py"):
        (place / name).write_text(STUB)
    (place / "told.json").write_text(json.dumps({"content": "GGUF...", "code": 0}))
    return place


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("base model"), layers=1)


def save_adapter(base: Path, place: Path, **settings: Any) -> Path:
    """As PEFT saves it, over the model of a directory."""
    model = AutoModelForCausalLM.from_pretrained(base)
    settings = {"target_modules": ["q_proj", "v_proj"], **settings}
    get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM", **settings)).save_pretrained(place)
    return place


def convert(source: Path, llama_cpp: Path, *words: str) -> int:
    output = str(source.parent / "gguf")
    given = ["--gguf", str(source), "--llama-cpp", str(llama_cpp), "--output", output]
    return main(["export", *given, *words])


def seen(llama_cpp: Path) -> Any:
    return json.loads((llama_cpp / "seen.json").read_text())


def test_an_adapter_is_converted_with_its_base(base, tmp_path, llama_cpp, capsys):
    adapter, output = save_adapter(base, tmp_path / "adapter"), tmp_path / "gguf"
    assert convert(adapter, llama_cpp, "--outtype", "f16") == 0
    script, words = seen(llama_cpp)
    assert script == str(llama_cpp / "convert_lora_to_gguf.py")
    assert Path(words.pop("outfile")).name == "adapter.gguf"
    expected = {"source": str(adapter), "outtype": "f16", "base": str(base), "base_model_id": None}
    assert words == expected
    assert (output / "adapter.gguf").read_bytes() == b"GGUF..."
    assert (output / "Modelfile").read_text() == f"FROM {base}\nADAPTER ./adapter.gguf\n"
    files = json.loads((output / "hetero_export.json").read_text())["files"]
    assert files == ["Modelfile", "adapter.gguf"]
    assert f"ollama create NAME -f {output / 'Modelfile'}" in capsys.readouterr().out
    assert convert(adapter, llama_cpp) == 2  # not over what is there
    assert convert(adapter, llama_cpp, "--overwrite") == 0
    assert seen(llama_cpp)[1]["outtype"] == "bf16"


def test_a_model_is_converted_alone(base, tmp_path, llama_cpp):
    (tmp_path / "model").symlink_to(base, target_is_directory=True)
    assert convert(tmp_path / "model", llama_cpp) == 0
    script, words = seen(llama_cpp)
    assert script == str(llama_cpp / "convert_hf_to_gguf.py")
    assert (words["base"], words["base_model_id"]) == (None, None)
    assert (tmp_path / "gguf" / "Modelfile").read_text() == "FROM ./model.gguf\n"


def test_a_base_of_the_hub_is_named_or_found_in_the_cache(base, tmp_path, llama_cpp, monkeypatch):
    config = save_adapter(base, tmp_path / "adapter") / "adapter_config.json"
    fields = json.loads(config.read_text())
    config.write_text(json.dumps({**fields, "base_model_name_or_path": "org/base"}))
    assert convert(config.parent, llama_cpp) == 0
    assert seen(llama_cpp)[1]["base_model_id"] == "org/base"
    assert (tmp_path / "gguf" / "Modelfile").read_text().startswith("FROM org/base\n")
    monkeypatch.setattr(
        "hetero_framework.extras.foreign_formats.gguf.try_to_load_from_cache",
        lambda *a, **k: str(base / "config.json"),
    )
    assert convert(config.parent, llama_cpp, "--overwrite") == 0
    assert seen(llama_cpp)[1]["base"] == str(base)


@pytest.mark.filterwarnings("ignore:Setting .save_embedding_layers. to .True.:UserWarning")
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"use_dora": True}, "DoRA's magnitudes, the tensors base_model."),
        ({"use_rslora": True}, "rank-stabilised scaling"),
        ({"alpha_pattern": {"q_proj": 2}}, "an alpha for each module"),
        ({"modules_to_save": ["lm_head"]}, "the tensor base_model.model.lm_head.weight\n"),
        ({"bias": "lora_only"}, None),  # Llama has none
        ({"modules_to_save": ["norm"]}, None),
        ({"rank_pattern": {"q_proj": 2}}, None),
        ({"target_modules": ["embed_tokens", "q_proj"]}, None),
        ({"init_lora_weights": "gaussian"}, None),
        ({"init_lora_weights": "pissa"}, "a change of the base (pissa)"),
        ({"target_parameters": ["q_proj.weight"], "target_modules": []}, "parameters of experts"),
    ],
)
def test_what_gguf_cannot_hold_is_refused_beforehand(
    base, tmp_path, llama_cpp, capsys, settings, said
):
    adapter = save_adapter(base, tmp_path / "adapter", **settings)
    assert convert(adapter, llama_cpp) == (0 if said is None else 2)
    assert (llama_cpp / "seen.json").exists() == (said is None)
    if said is not None:
        error = capsys.readouterr().err
        assert said in error
        assert "convert the merged model" in error
        assert not (tmp_path / "gguf").exists()


def test_a_script_that_fails_leaves_nothing(base, tmp_path, llama_cpp, capsys):
    adapter = save_adapter(base, tmp_path / "adapter")
    for content, code, said in (
        ("GGUF", 3, "ended with exit code 3"),
        ("oops", 0, "wrote no GGUF file adapter.gguf"),
    ):
        (llama_cpp / "told.json").write_text(json.dumps({"content": content, "code": code}))
        assert convert(adapter, llama_cpp) == 2
        error = capsys.readouterr().err
        assert f"convert_lora_to_gguf.py {said}" in error
        assert "by hand: " in error
        assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter", "llama.cpp"]


def test_wrong_places_are_named(base, tmp_path, llama_cpp, capsys):
    def refused(*words: str) -> str:
        assert main(["export", "--output", str(tmp_path / "gguf"), *words]) == 2
        return capsys.readouterr().err

    there, tool = ("--gguf", str(base)), ("--llama-cpp", str(llama_cpp))
    assert "--gguf DIR; neither was given" in refused()
    assert "--gguf DIR; both were given" in refused(*there, "--checkpoint", "x")
    assert "--gguf and --llama-cpp go together" in refused(*there)
    assert "--gguf and --llama-cpp go together" in refused("--checkpoint", "x", *tool)
    assert "there is no directory" in refused("--gguf", str(tmp_path / "no"), *tool)
    said = refused(*there, "--llama-cpp", str(tmp_path))
    assert f"there is no {tmp_path / 'convert_hf_to_gguf.py'}" in said
    (empty := tmp_path / "empty").mkdir()
    assert "config.json is not readable JSON" in refused("--gguf", str(empty), *tool)
    (empty / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (empty / "adapter_model.safetensors").write_bytes(b"short")
    assert "cannot read" in refused("--gguf", str(empty), *tool)
    save_file({"a.lora_A.weight": torch.zeros(1)}, empty / "adapter_model.safetensors")
    assert "names no base model" in refused("--gguf", str(empty), *tool)
    config = {"peft_type": "LORA", "base_model_name_or_path": "/gone/base"}
    (empty / "adapter_config.json").write_text(json.dumps(config))
    assert "the base model /gone/base is not here" in refused("--gguf", str(empty), *tool)
