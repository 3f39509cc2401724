"""Tiny models of language and vision with their processors, and texts with pictures."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

SPECIAL = ["<pad>", "<eos>", "<unk>", "<|im_start|>", "<|im_end|>", "<image>"]
NAMES = ["red", "green", "blue", "square", "circle", "line"]
TEXT = "user assistant system what is on the picture a and ?"
WORDS = [*SPECIAL, *NAMES, *TEXT.split(), "\n"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m['role'] }} {% if m['role'] == 'assistant' %}"
    "{% generation %}{% for p in m['content'] %} {{ p['text'] }}{% endfor %} <|im_end|>"
    "{% endgeneration %}{% else %}{% for p in m['content'] %}{% if p['type'] == 'image' %}<image>"
    "{% else %} {{ p['text'] }}{% endif %}{% endfor %} <|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)
LAYERS = 4


def save_tokenizer(folder: Path, template: str = TEMPLATE, more: list[str] | None = None) -> Any:
    """A tokenizer of whole words."""
    words = [*WORDS, *(more or [])]
    tokenizer = Tokenizer(
        models.WordLevel({word: k for k, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **{"pad_token": "<pad>", "eos_token": "<|im_end|>", "unk_token": "<unk>"},
        additional_special_tokens=[*SPECIAL[3:], *(more or [])],
        chat_template=template,
    )
    fast.save_pretrained(folder)
    return fast


def text_sizes() -> dict[str, int]:
    return {
        **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64},
        **{"num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"max_position_embeddings": 256, "pad_token_id": 0, "eos_token_id": 4},
    }


def save_model(model: Any, folder: Path) -> Path:
    """Save a model whose vectors are not the initial ones, so that a lost one shows."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def save_llava(folder: Path) -> Path:
    tokenizer = save_tokenizer(folder)
    size = {"height": 28, "width": 28}
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=size),
        tokenizer=tokenizer,
        **{"patch_size": 14, "vision_feature_select_strategy": "default"},
        **{"chat_template": TEMPLATE, "num_additional_image_tokens": 1},
    )
    processor.save_pretrained(folder)
    config = LlavaConfig(
        text_config=LlamaConfig(**text_sizes()),
        vision_config=CLIPVisionConfig(
            **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2},
            **{"num_attention_heads": 2, "image_size": 28, "patch_size": 14, "projection_dim": 32},
        ),
        **{"image_token_index": 5, "vision_feature_select_strategy": "default"},
    )
    torch.manual_seed(0)
    return save_model(LlavaForConditionalGeneration(config), folder)


FAMILIES = {"llava": save_llava}


def picture(draw: random.Random, width: int, height: int) -> Image.Image:
    """A picture of random pixels, no two alike."""
    data = bytes(draw.randrange(256) for _ in range(3 * width * height))
    return Image.frombytes("RGB", (width, height), data)


def encoded(image: Image.Image, kind: str = "PNG", **how: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **how)
    return file.getvalue()


def save_rows(folder: Path, count: int = 9, pairs: bool = False) -> Path:
    """Rows with one, two and no pictures of mixed sizes, as JSON lines with paths."""
    draw = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(count):
        paths = []
        for k in range((1, 2, 0)[number % 3]):
            path = folder / f"{number}-{k}.png"
            path.write_bytes(encoded(picture(draw, draw.randint(20, 60), draw.randint(20, 60))))
            paths.append(str(path))
        text = {"type": "text", "text": " ".join(draw.choices(NAMES, k=draw.randint(1, 6)))}
        asked = [{"role": "user", "content": [*[{"type": "image"}] * len(paths), text]}]
        said = " ".join(draw.choices(NAMES, k=draw.randint(1, 6)))
        answer = [{"role": "assistant", "content": [{"type": "text", "text": said}]}]
        parts = {"prompt": asked, "completion": answer} if pairs else {"messages": asked + answer}
        rows.append({"images": paths, **parts})
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
