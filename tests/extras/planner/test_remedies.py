"""Settings with which a model would fit, named by the refusal of a plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hetero_framework.cli import main

WIDE = {
    **{"model_type": "llama", "num_hidden_layers": 24, "hidden_size": 4096, "vocab_size": 32000},
    **{"intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
    **{"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"},
}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            [
                "--device",
                "local=RTX 3050 +32GB",
                "--adapter",
                "qlora",
                "--batch-size",
                "4",
                "--max-length",
                "4096",
            ],
            "training.per_device_train_batch_size 1 and training.gradient_accumulation_steps 32",
        ),
        (
            ["--device", "local=RTX 3050 +32GB", "--adapter", "qlora", "--max-length", "16384"],
            "it would fit with data.max_length",
        ),
        (["--device", "local=RTX 3050 +8GB", "--adapter", "lora", "--max-length", "512"], "32 GiB"),
        (
            ["--device", "local=RTX 3050", "--adapter", "none", "--max-length", "512"],
            'a LoRA adapter, or model.quantization "nf4" with a LoRA adapter',
        ),
    ],
)
def test_what_would_fit_is_named(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(WIDE))
    words = ["--model", "./model", "--max-length", "8192", *words]
    assert main(["plan", "--dry-run", *words]) == 2
    printed = capsys.readouterr().err
    assert "embedding and head included" in printed
    assert said in printed
