"""Tiny models of language and vision with their processors, and texts with pictures."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.utils import is_torchvision_available

hf: Any = transformers
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


def save_tokenizer(
    folder: Path, picture: str = "<image>", more: Sequence[str] = (), cls: Any = None
) -> Any:
    """A tokenizer of whole words, whose template writes `picture` for a picture; of single bytes,
    if a class is given. `more` are further tokens; one written "name=token" is also an attribute of
    the tokenizer."""
    named = dict(each.split("=") for each in more if "=" in each)
    added = list(dict.fromkeys([*SPECIAL[3:], *(each.rpartition("=")[2] for each in more)]))
    of_bytes = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words = dict.fromkeys([*(of_bytes if cls else WORDS), *added])
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(" |\n|[^ \n]+"), "isolated")
    how = {"vocab": vocabulary, "merges": []} if cls else {"tokenizer_object": tokenizer}
    fast = (cls or hf.PreTrainedTokenizerFast)(
        **how,
        **{"pad_token": "<pad>", "eos_token": "<|im_end|>", "unk_token": "<unk>"},
        extra_special_tokens={**named, **{f"token_{k}": token for k, token in enumerate(added)}},
        chat_template=TEMPLATE.replace("<image>", picture),
    )
    fast.save_pretrained(folder)
    return fast


def text_sizes(**changes: Any) -> dict[str, Any]:
    return {
        **{"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64},
        **{"num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"max_position_embeddings": 512, "pad_token_id": 0, "eos_token_id": 4, **changes},
    }


def save_model(cls: Any, config: Any, processor: Any, folder: Path) -> Path:
    """Save a random model whose vectors are not the initial ones, so that a lost one shows, and its
    processor."""
    torch.manual_seed(0)
    model = cls(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    if getattr(processor, "video_processor", "") is None:  # it would be saved, too
        processor.image_processor.save_pretrained(folder)
        about = {"processor_class": type(processor).__name__}
        for name in ("image_seq_length", "image_seq_len"):
            about |= {name: value} if (value := getattr(processor, name, None)) else {}
        (folder / "processor_config.json").write_text(json.dumps(about))
    else:
        processor.save_pretrained(folder)
    return folder


def clip(layers: int = 2) -> Any:
    return hf.CLIPVisionConfig(
        **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": layers},
        **{"num_attention_heads": 2, "image_size": 28, "patch_size": 14, "projection_dim": 32},
    )


def save_llava(folder: Path, layers: int = LAYERS, seeing: int = 2) -> Path:
    size = {"height": 28, "width": 28}
    processor = hf.LlavaProcessor(
        image_processor=hf.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=size),
        tokenizer=save_tokenizer(folder),
        **{"patch_size": 14, "vision_feature_select_strategy": "default"},
        num_additional_image_tokens=1,
    )
    config = hf.LlavaConfig(
        text_config=hf.LlamaConfig(**text_sizes(num_hidden_layers=layers)),
        vision_config=clip(seeing),
        **{"image_token_index": 5, "vision_feature_select_strategy": "default"},
    )
    return save_model(hf.LlavaForConditionalGeneration, config, processor, folder)


def save_llava_next(folder: Path) -> Path:
    size, grid = {"height": 28, "width": 28}, [[28, 56], [56, 28], [56, 56]]
    processor = hf.LlavaNextProcessor(
        image_processor=hf.LlavaNextImageProcessorPil(
            **{"size": {"shortest_edge": 28}, "crop_size": size, "image_grid_pinpoints": grid}
        ),
        tokenizer=save_tokenizer(folder),
        **{"patch_size": 14, "vision_feature_select_strategy": "default"},
        num_additional_image_tokens=1,
    )
    config = hf.LlavaNextConfig(
        **{"text_config": hf.LlamaConfig(**text_sizes()), "vision_config": clip()},
        **{"image_token_index": 5, "vision_feature_select_strategy": "default"},
        image_grid_pinpoints=grid,
    )
    return save_model(hf.LlavaNextForConditionalGeneration, config, processor, folder)


def save_idefics3(folder: Path, tile: int = 28) -> Path:
    tags = ["<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    tags += [f"<row_{a}_col_{b}>" for a in range(1, 7) for b in range(1, 7)]
    processor = hf.Idefics3Processor(
        image_processor=hf.Idefics3ImageProcessorPil(
            size={"longest_edge": 2 * tile}, max_image_size={"longest_edge": tile}
        ),
        tokenizer=save_tokenizer(folder, more=tags),
        image_seq_len=4,
    )
    config = hf.Idefics3Config(
        text_config=hf.LlamaConfig(**text_sizes()),
        vision_config={
            **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2},
            **{"num_attention_heads": 2, "image_size": tile, "patch_size": tile // 4},
        },
        **{"image_token_id": 5, "scale_factor": 2, "pad_token_id": 0},
    )
    return save_model(hf.Idefics3ForConditionalGeneration, config, processor, folder)


def save_internvl(folder: Path) -> Path:
    named = ["start_image_token=<img>", "end_image_token=</img>", "video_token=<video>"]
    tokenizer = save_tokenizer(folder, more=[*named, "context_image_token=<image>"])
    processor = without_videos(hf.InternVLProcessor)(
        hf.GotOcr2ImageProcessorPil(
            size={"height": 28, "width": 28}, **{"min_patches": 1, "max_patches": 4}
        ),
        *(tokenizer, None),
        image_seq_length=4,
    )
    config = hf.InternVLConfig(
        text_config=hf.LlamaConfig(**text_sizes()),
        vision_config={
            **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2},
            **{"num_attention_heads": 2, "image_size": [28, 28], "patch_size": [7, 7]},
        },
        **{"image_token_id": 5, "image_seq_length": 4, "downsample_ratio": 0.5},
    )
    return save_model(hf.InternVLForConditionalGeneration, config, processor, folder)


def _save_qwen(
    folder: Path, name: str, processor: Any, text: dict[str, Any], vision: dict[str, Any], *of: Any
) -> Path:
    """A model of Qwen's, whose positions have three axes. `of`: the class of its tokenizer."""
    tags = ["<|vision_start|>", "<|vision_end|>", "video_token=<video>", "image_token=<image>"]
    tokenizer = save_tokenizer(folder, "<|vision_start|><image><|vision_end|>", tags, *of)
    patch = {"patch_size": vision.get("patch_size", 14), "merge_size": 2}
    size = {"shortest_edge": 28 * 28, "longest_edge": 56 * 84}
    made = without_videos(processor)(
        hf.Qwen2VLImageProcessorPil(**patch, size=size), *(tokenizer, None)
    )
    ids = tokenizer.convert_tokens_to_ids
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    config = getattr(hf, f"{name}Config")(
        text_config=text_sizes(**{"rope_parameters": rope, "bos_token_id": None, **text}),
        vision_config={"hidden_size": 32, "depth": 2, "num_heads": 2, **vision},
        **{"image_token_id": 5, "video_token_id": ids("<video>")},
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
    )
    return save_model(getattr(hf, f"{name}ForConditionalGeneration"), config, made, folder)


def save_qwen2_vl(folder: Path) -> Path:
    return _save_qwen(folder, "Qwen2VL", hf.Qwen2VLProcessor, {}, {"embed_dim": 32})


def save_qwen2_5_vl(folder: Path) -> Path:
    windows = {"fullatt_block_indexes": [1], "window_size": 56}
    vision = {"intermediate_size": 32, "out_hidden_size": 32, **windows}
    return _save_qwen(folder, "Qwen2_5_VL", hf.Qwen2_5_VLProcessor, {}, vision)


QWEN3_VISION = {
    **{"intermediate_size": 32, "out_hidden_size": 32, "patch_size": 14},
    "num_position_embeddings": 16,
}
EXPERTS = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "router_aux_loss_coef": 0.0,  # TRL adds it to the loss where it is not zero
}


def save_qwen3_vl(folder: Path) -> Path:
    """Its tower has features for the first layer, too."""
    vision = {**QWEN3_VISION, "deepstack_visual_indexes": [0]}
    return _save_qwen(folder, "Qwen3VL", hf.Qwen3VLProcessor, {"head_dim": 8}, vision)


def save_qwen3_vl_moe(folder: Path) -> Path:
    vision, text = {**QWEN3_VISION, "deepstack_visual_indexes": [0]}, {"head_dim": 8, **EXPERTS}
    return _save_qwen(folder, "Qwen3VLMoe", hf.Qwen3VLProcessor, text, vision)


QWEN3_5 = {
    "vocab_size": 320,  # AutoTokenizer takes its own class, of bytes, and drops whole words
    **{"head_dim": 16, "layer_types": ["linear_attention", "full_attention"] * 2},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "rope_parameters": {
        **{"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
        "partial_rotary_factor": 0.5,
    },
}


def save_qwen3_5(folder: Path) -> Path:
    parts = hf.Qwen3VLProcessor, QWEN3_5, QWEN3_VISION, hf.Qwen3_5Tokenizer
    return _save_qwen(folder, "Qwen3_5", *parts)


def save_qwen3_5_moe(folder: Path) -> Path:
    text = {**QWEN3_5, **EXPERTS, "shared_expert_intermediate_size": 16}
    parts = hf.Qwen3VLProcessor, text, QWEN3_VISION, hf.Qwen3_5Tokenizer
    return _save_qwen(folder, "Qwen3_5Moe", *parts)


def save_mistral3(folder: Path) -> Path:
    tokenizer = save_tokenizer(folder, more=["[IMG_BREAK]", "[IMG_END]"])
    processor = hf.PixtralProcessor(
        image_processor=hf.PixtralImageProcessorPil(size={"longest_edge": 56}, patch_size=7),
        **{"tokenizer": tokenizer, "patch_size": 7, "spatial_merge_size": 2},
        image_token="<image>",
    )
    config = hf.Mistral3Config(
        text_config=hf.MistralConfig(**text_sizes(head_dim=8, sliding_window=None)),
        vision_config={
            **{"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 32},
            **{"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56},
            **{"patch_size": 7, "head_dim": 16},
        },
        **{"image_token_index": 5, "spatial_merge_size": 2},
    )
    return save_model(hf.Mistral3ForConditionalGeneration, config, processor, folder)


def save_aya_vision(folder: Path) -> Path:
    tags = ["<patch>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "TILE_GLOBAL"]
    tokenizer = save_tokenizer(folder, more=[*tags, *(f"TILE_{k}" for k in range(1, 7)), "TILE"])
    processor = hf.AyaVisionProcessor(
        image_processor=hf.GotOcr2ImageProcessorPil(
            size={"height": 28, "width": 28}, **{"min_patches": 1, "max_patches": 4}
        ),
        **{"tokenizer": tokenizer, "patch_size": 7, "img_size": 28, "downsample_factor": 2},
        img_patch_token="<patch>",
    )
    text = {"head_dim": 8, "sliding_window": 8, "logit_scale": 1.0}  # other scales only TRL applies
    config = hf.AyaVisionConfig(
        text_config=hf.Cohere2Config(**text_sizes(**text)),
        vision_config={
            **{"model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 32},
            **{"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28},
            "patch_size": 7,
        },
        **{"image_token_index": tokenizer.convert_tokens_to_ids("<patch>")},
        **{"downsample_factor": 2, "alignment_intermediate_size": 32},
    )
    return save_model(hf.AyaVisionForConditionalGeneration, config, processor, folder)


def save_gemma3(folder: Path) -> Path:
    named = ["boi_token=<boi>", "eoi_token=<eoi>", "image_token=<image>"]
    tokenizer = save_tokenizer(folder, "<boi>", [*named, "\n\n"])
    processor = hf.Gemma3Processor(
        hf.Gemma3ImageProcessorPil(size={"height": 28, "width": 28}),
        **{"tokenizer": tokenizer, "image_seq_length": 4},
    )
    text = {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}
    ids = tokenizer.convert_tokens_to_ids
    config = hf.Gemma3Config(
        text_config=text_sizes(**text, layer_types=["sliding_attention", "full_attention"] * 2),
        vision_config={
            **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2},
            **{"num_attention_heads": 2, "image_size": 28, "patch_size": 7},
        },
        **{"mm_tokens_per_image": 4, "image_token_index": 5},
        **{"boi_token_index": ids("<boi>"), "eoi_token_index": ids("<eoi>")},
    )
    return save_model(hf.Gemma3ForConditionalGeneration, config, processor, folder)


def without_videos(cls: Any) -> Any:
    """A processor's class that takes None for the part for videos, which needs torchvision."""
    return type(cls.__name__, (cls,), {"check_argument_for_proper_class": lambda *_: None})


def processor_of(model: Path) -> Any:
    """The processor of a checkpoint, as AutoProcessor loads it where torchvision is installed."""
    config = hf.AutoConfig.from_pretrained(model)
    cls = without_videos(PROCESSOR_MAPPING[type(config)])
    parts = {
        "tokenizer": hf.AutoTokenizer.from_pretrained(model),
        "image_processor": hf.AutoImageProcessor.from_pretrained(model),
    }
    fields, _ = cls.get_processor_dict(model)
    fields |= {"chat_template": parts["tokenizer"].chat_template}
    return cls.from_args_and_dict([parts.get(name) for name in cls.get_attributes()], fields)


FAMILIES = {
    "llava": save_llava,
    "llava_next": save_llava_next,
    "idefics3": save_idefics3,
    "internvl": save_internvl,
    "aya_vision": save_aya_vision,
    "qwen2_vl": save_qwen2_vl,
    "qwen2_5_vl": save_qwen2_5_vl,
    "qwen3_vl": save_qwen3_vl,
    "qwen3_vl_moe": save_qwen3_vl_moe,
    "qwen3_5": save_qwen3_5,
    "qwen3_5_moe": save_qwen3_5_moe,
    "gemma3": save_gemma3,
}


if is_torchvision_available():  # PixtralProcessor asks for it
    FAMILIES["mistral3"] = save_mistral3


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


def save_rated(folder: Path, placeholder: str | None = None, count: int = 9) -> Path:
    """The chosen answers of `save_pairs`, of which every third is undesirable."""
    path = save_pairs(folder, placeholder, count)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for number, row in enumerate(rows):
        row |= {"completion": row.pop("chosen"), "label": number % 3 > 0}
        del row["rejected"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def save_pairs(folder: Path, placeholder: str | None = None, count: int = 9) -> Path:
    """The prompts of `save_rows` with a chosen and a rejected answer, as messages; as plain texts,
    if `placeholder` is the text that stands for a picture."""
    draw, path = random.Random(1), save_rows(folder, count, pairs=True)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["chosen"] = row.pop("completion")
        said = " ".join(draw.choices(NAMES, k=draw.randint(1, 6)))
        row["rejected"] = [{"role": "assistant", "content": [{"type": "text", "text": said}]}]
        for name in ("prompt", "chosen", "rejected") if placeholder is not None else ():
            parts = row[name][0]["content"]
            row[name] = " ".join(part.get("text", placeholder) for part in parts) + " "
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
