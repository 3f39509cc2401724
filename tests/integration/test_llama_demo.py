"""The 4-bit Llama example trains: a tiny checkpoint stored in 4 bits takes the model's place."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tests.pools import read_metrics
from tests.samples import module_of, save_llama, save_tokenizer

pytestmark = pytest.mark.xdist_group("pool")
EXAMPLE = Path(__file__).parents[2] / "examples" / "demo_llama8b4bit_distributed.py"


def test_llama_example_trains_a_tiny_model_stored_in_4_bits(pool, texts, tmp_path):
    full = save_llama(tmp_path / "full", hidden_size=64, intermediate_size=128)
    quantised = tmp_path / "4bit"
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = AutoModelForCausalLM.from_pretrained(
        full, quantization_config=settings, device_map={"": "cpu"}
    )
    model.save_pretrained(quantised)
    save_tokenizer(quantised)

    example = module_of(EXAMPLE)
    here = [("coordinator", pool.machines["coordinator"])]
    here += [(f"workers[{i}]", pool.machines["workers"][i]) for i in range(2)]
    places = [
        f"--set={name}.{key}={json.dumps(machine[key])}"
        for name, machine in here
        for key in ("hostname", "ip", "port", "device")
    ]
    code = example.run(
        ["--model", str(quantised), "--data", str(texts), "--role", "coordinator"]
        + ["--output-dir", str(tmp_path / "run"), "--set=training.max_steps=2", *places]
    )
    assert code == 0
    assert len(read_metrics(tmp_path / "run")) == 2
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").exists()
