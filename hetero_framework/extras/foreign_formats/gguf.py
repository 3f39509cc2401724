"""A result as GGUF, converted by llama.cpp's own scripts, with a Modelfile for Ollama.

The scripts are in the user's copy of llama.cpp and run in a process of their own. A result that
they would refuse late, or convert wrongly without a word, is refused before they run.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open

from hetero_framework import repository
from hetero_framework.errors import ModelError, UserError, in_words
from hetero_framework.models.adapters.adapter_plan import ADAPTER_WEIGHTS
from hetero_framework.models.files.export import OutputDirectory

ADAPTER_CONFIG = "adapter_config.json"
MODELFILE = "Modelfile"
_SCRIPTS = {"adapter": "convert_lora_to_gguf.py", "model": "convert_hf_to_gguf.py"}
_LONGEST_S = 24 * 3600.0
# GGUF has one alpha, and its reader scales by alpha/rank.
_ELSEWHERE = {
    "use_dora": "DoRA's magnitudes",
    "use_rslora": "rank-stabilised scaling",
    "alpha_pattern": "an alpha for each module",
    "target_parameters": "adapted parameters of experts",
}
# Tensors that need no refusal: the script leaves frozen embeddings out, and takes norms over.
_CONVERTED = re.compile(
    r".*\.(lora_[AB]\.weight|lora_embedding_[AB]|base_layer\.weight)|.*(_layernorm|\.norm).*"
)


def convert_to_gguf(
    source: Path, llama_cpp: Path, output: OutputDirectory, outtype: str
) -> tuple[Path, Path]:
    """Write the GGUF of an adapter or model directory and a Modelfile into `output`; return both
    paths. Raises ModelError for a part that GGUF cannot hold, UserError where the script is absent
    or fails."""
    kind = "adapter" if (source / ADAPTER_CONFIG).is_file() else "model"
    settings = ADAPTER_CONFIG if kind == "adapter" else repository.CONFIG
    script = llama_cpp / _SCRIPTS[kind]
    if not script.is_file():
        hint = "give the directory of a clone of llama.cpp, which has it"
        raise UserError(f"there is no {script}", hint=hint)
    config = repository.read_json(source / settings, ModelError)
    if kind == "adapter" and (lost := [*_lost(config, source / ADAPTER_WEIGHTS)]):
        raise ModelError(
            f"GGUF has no place for a part of {source}: {', '.join(lost)}",
            hint="fold it into its model with `hetero merge`, and convert the merged model",
        )
    base, words = _base(config) if kind == "adapter" else ("./model.gguf", [])
    output.check(source)
    with output.writing() as folder:
        made = folder / f"{kind}.gguf"
        command = [sys.executable, str(script.absolute()), str(source.absolute()), *words]
        _run([*command, "--outfile", str(made), "--outtype", outtype], made)
        lines = [f"FROM {base}", *["ADAPTER ./adapter.gguf"] * (kind == "adapter")]
        (folder / MODELFILE).write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")
    return output.path / made.name, output.path / MODELFILE


def _lost(config: Mapping[str, Any], weights: Path) -> Iterator[str]:
    """The parts of an adapter that the script leaves out or converts wrongly."""
    yield from (what for name, what in _ELSEWHERE.items() if config.get(name))
    if config.get("peft_type") != "LORA":
        yield f"the method {config.get('peft_type')}"
    if config.get("init_lora_weights", True) not in (True, False, "gaussian", "orthogonal"):
        yield f"a change of the base ({config['init_lora_weights']})"
    try:
        with safe_open(weights, framework="pt") as file:
            names = [name for name in file.keys() if not _CONVERTED.fullmatch(name)]  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot read {weights}: {in_words(error)}") from error
    if names:
        yield f"the {'tensor' if len(names) == 1 else 'tensors'} {', '.join(names[:4])}" + (
            f" and {len(names) - 4} more" if len(names) > 4 else ""
        )


def _base(config: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The base model for the Modelfile (its directory where this machine has it), and the options
    of the script that name the base model."""
    name = config.get("base_model_name_or_path")
    if not isinstance(name, str):
        raise ModelError(
            f"{ADAPTER_CONFIG} names no base model", hint="add base_model_name_or_path"
        )
    place = Path(name)
    if not place.is_dir():
        try:
            cached = try_to_load_from_cache(
                name, repository.CONFIG, revision=config.get("revision")
            )
        except ValueError:  # no hub name
            raise ModelError(f"the base model {name} is not here") from None
        if not isinstance(cached, str):
            return name, ["--base-model-id", name]
        place = Path(cached).parent
    return str(place.absolute()), ["--base", str(place.absolute())]


def _run(command: list[str], made: Path) -> None:
    """Run a script, whose lines go to the terminal. Raises UserError unless it makes the file."""
    name = Path(command[1]).name
    try:
        code = subprocess.run(command, timeout=_LONGEST_S, check=False).returncode
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{name} could not be run: {in_words(error)}") from error
    begin = b""
    with suppress(OSError), made.open("rb") as content:
        begin = content.read(4)
    if code or begin != b"GGUF":
        how = f"ended with exit code {code}" if code else f"wrote no GGUF file {made.name}"
        hint = f"its lines above say why; by hand: {subprocess.list2cmdline(command)}"
        raise UserError(f"{name} {how}", hint=hint)
