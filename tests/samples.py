"""Small real things for tests: a tokenizer, models with random weights, data files."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import random
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from hetero_framework.config import Config
from hetero_framework.core.messages import BoundaryTensor, Coded, Message
from hetero_framework.core.tensors import to_wire
from hetero_framework.engine.stage_api import StepInfo
from hetero_framework.models.cut.language import towers
from hetero_framework.models.cut.tiny import tiny_config

DEVICE = os.environ.get("HETERO_TEST_DEVICE", "cpu")
"""Of the machines in those tests of several processes that run on any device."""

TEXT = "the a model trains on many small machines and every layer keeps its own weights"
WORDS = TEXT.split()


def save_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of about 300 tokens, saved into `directory`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    fast.save_pretrained(directory)
    return fast


def save_llama(directory: Path, *, seed: int = 0, layers: int = 6, **changes: Any) -> Path:
    """A tiny random Llama with its tokenizer, saved as a Hugging Face checkpoint."""
    tokenizer = save_tokenizer(directory)
    settings: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        **changes,
    }
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(LlamaConfig(**settings)).save_pretrained(directory)
    return directory


def save_tiny(model_type: str, directory: Path, **changes: Any) -> Path:
    """A tiny random model of another architecture, with the same tokenizer and other settings."""
    tokenizer = save_tokenizer(directory)
    config = tiny_config(model_type)
    config = type(config).from_dict({**config.to_dict(), **changes})
    names = ("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size")
    config.update({name: 320 for name in names if hasattr(config, name)})
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(config, name, getattr(tokenizer, name))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def save_texts(path: Path, count: int, *, seed: int = 0, longest: int = 24) -> Path:
    """`count` lines of {"text": ...} with uneven lengths."""
    draw = random.Random(seed)
    lines = (
        json.dumps({"text": " ".join(draw.choices(WORDS, k=draw.randint(3, longest)))})
        for _ in range(count)
    )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def read_jsonl(path: Path) -> list[Any]:
    """The records of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def module_of(file: Path) -> Any:
    """A program outside of the package, as a module."""
    spec = importlib.util.spec_from_file_location(f"program_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Below the ports that Linux (32768), macOS and Windows (49152) hand out by themselves: a test's
# proxy once got, by asking for any port, the one that a coordinator was about to listen on. Each
# process of the tests begins elsewhere.
_PORTS = range(10_000, 32_000)
_candidates = itertools.cycle(_PORTS)
next(itertools.islice(_candidates, os.getpid() * 211 % len(_PORTS), None))


def free_ports(count: int) -> list[int]:
    """Ports of the loopback that nobody uses now, and that the system gives to nobody who asks for
    any port. No port comes twice before all have come."""
    ports: list[int] = []
    for port in itertools.islice(_candidates, len(_PORTS)):
        if len(ports) == count:
            break
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.append(port)
    return ports


def plan_of(*parts: tuple[str | int, int]) -> list[dict[str, Any]]:
    """A shard plan of these owners, each with the layer before which its part ends."""
    starts = (0, *(end for _, end in parts))
    return [
        {"id": owner, "start": start, "end": end}
        for (owner, end), start in zip(parts, starts, strict=False)
    ]


def config_for(*parts: tuple[str | int, int], device: str = "cpu", **sections: Any) -> Config:
    """A configuration of machines on the loopback that own these parts, as in `plan_of`."""
    machine = {"hostname": "localhost", "ip": "127.0.0.1", "device": device}
    owners = dict.fromkeys(owner for owner, _ in parts if owner != "local")
    machines = {
        "coordinator": {**machine, "port": 9000},
        "workers": [{**machine, "id": k, "port": 9000 + int(k)} for k in owners],
    }
    return Config.from_dict({**machines, "shard_plan": plan_of(*parts), **sections})


def machines_here(*parts: tuple[str | int, int], **machine: Any) -> dict[str, Any]:
    """A coordinator and workers of this machine at free ports, with `plan_of(*parts)`; `machine`
    are settings of each."""
    owners = [owner for owner in dict.fromkeys(owner for owner, _ in parts) if owner != "local"]
    entry = {"hostname": "localhost", "ip": "127.0.0.1", "device": "cpu", **machine}
    first, *ports = free_ports(1 + len(owners))
    return {
        "coordinator": {**entry, "port": first},
        "workers": [{**entry, "id": k, "port": p} for k, p in zip(owners, ports, strict=True)],
        "shard_plan": plan_of(*parts),
    }


def boundary_message(
    kind: type[BoundaryTensor],
    info: StepInfo,
    stage: int,
    micro_batch: int,
    *parts: torch.Tensor,
    coded: Coded | None = None,
) -> Message:
    """FORWARD or BACKWARD with these tensors."""
    body = kind(info.step, info.attempt, stage, micro_batch, coded)
    return Message(body, tuple(map(to_wire, parts)))


def save_multimodal(directory: Path, name: str, **changes: Any) -> Path:
    """A tiny random model of a multimodal class of transformers, with the same tokenizer, as its
    own `save_pretrained` writes it. Its tokens for pictures and sound are none of the tokenizer's.
    `changes` are those of `save_pretrained`."""
    tokenizer = save_tokenizer(directory)
    config = tiny_config(name)
    towers(config)  # has parts stood in for whose package is not here
    special = ("pad_token_id", "bos_token_id", "eos_token_id")
    media = sorted(f for f in config.to_dict() if f.endswith(("token_id", "token_index")))
    text = config.get_text_config()
    text.vocab_size = 320 + len(media)
    for number, field in enumerate(field for field in media if field not in special):
        setattr(config, field, 320 + number)
    for part in (config, text):
        part.update({field: getattr(tokenizer, field) for field in special if hasattr(part, field)})
    torch.manual_seed(0)
    model = getattr(transformers, name)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(directory, **changes)
    return directory
