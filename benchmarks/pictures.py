"""What pictures cost the coordinator: memory, and the time that steps wait for them.

    python -m benchmarks.pictures [--rows 10000] [--steps 30] [--batch 1] [--accumulate 8]
    python -m benchmarks.pictures --features

Rows of one JPEG of 4 megapixels each, for a processor of 336 pixels, beside the same texts without
pictures, each in a process of its own. Each row names a file of its own, so that each is read and
checked; the files are links to 200, since 10,000 would be 10 GB. A step sleeps for `--seconds`, as
one does whose time passes on other devices. No step can be shorter than what its pictures take in
two threads; so the default is half more than that, as measured before the first step. Prints one
JSON object: of each way the seconds of reading and of a step, the peak memory in MiB after ten
steps and at the end, and the seconds that steps wait: the first, the median, and the longest after
the tenth. With `--features`: the CPU seconds in which the tower and projector of LLaVA 1.5 7B, with
random weights on this CPU, compute the features of a picture, and in which these are read from the
disk (`data.cache_image_features`), and their bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

FILES = 200
SIZE = (2450, 1633)
WAYS = ("texts", "pictures")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--accumulate", type=int, default=8)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--features", action="store_true")
    arguments = parser.parse_args()
    if arguments.features:
        print(json.dumps(_of_features()))
        return
    if arguments.way:
        print(json.dumps(_measured(arguments)))
        return
    with tempfile.TemporaryDirectory() as name:
        _make(Path(name), arguments.rows)
        names = ("steps", "batch", "accumulate", "seconds")
        told = [a for k in names if getattr(arguments, k) for a in _option(arguments, k)]
        found = {way: _in_a_process(way, name, told) for way in WAYS}
    more = found["pictures"]["peak"] - found["texts"]["peak"]
    print(json.dumps({"rows": arguments.rows, **found, "more_mib": round(more, 1)}))


def _option(arguments: argparse.Namespace, name: str) -> tuple[str, str]:
    return f"--{name}", str(getattr(arguments, name))


def _in_a_process(way: str, folder: str, told: list[str]) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.pictures", "--way", way, "--folder", folder, *told]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HETERO_CACHE": f"{folder}/cache"}
    out = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    found: dict[str, float] = json.loads(out.stdout.splitlines()[-1])
    return found


def _make(folder: Path, count: int) -> None:
    """Pictures of coarse noise, rows that have one each, rows without, and a model's folder."""
    import numpy as np
    from PIL import Image

    draw = np.random.default_rng(0)
    for number in range(FILES):
        coarse = draw.integers(0, 256, (164, 245, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize(SIZE).save(folder / f"{number}.jpg", quality=90)
    texts = [{"role": "user", "content": "what"}, {"role": "assistant", "content": "red"}]
    for way in WAYS:
        with (folder / f"{way}.jsonl").open("w") as file:
            for number in range(count):
                name = folder / f"{number}.jpg"
                if not name.exists():
                    name.hardlink_to(folder / f"{number % FILES}.jpg")
                images = {"images": [name.name]} if way == "pictures" else {}
                file.write(json.dumps({**images, "messages": texts}) + "\n")
    _make_model(folder / "model")


def _make_model(folder: Path) -> None:
    """The configuration, tokenizer and processor of a LLaVA; no weights are needed."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    hf: Any = transformers
    words = ["<pad>", "<eos>", "<unk>", "<image>", "user", "assistant", "what", "red"]
    made = Tokenizer(models.WordLevel({w: k for k, w in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    template = (
        "{% for m in messages %}{{ m.role }} {% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content[0].text }} <eos>{% endgeneration %}{% else %}{% for p in m.content %}"
        "{% if p.type == 'image' %}<image>{% else %} {{ p.text }}{% endif %}{% endfor %}{% endif %}"
        " {% endfor %}"
    )
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=made,
        **special,
        extra_special_tokens={"image_token": "<image>"},
        chat_template=template,
    )
    tokenizer.save_pretrained(folder)
    size = {"height": 336, "width": 336}
    images = hf.CLIPImageProcessorPil(size={"shortest_edge": 336}, crop_size=size)
    how = {"patch_size": 14, "vision_feature_select_strategy": "default"}
    parts = {"image_processor": images, "tokenizer": tokenizer}
    hf.LlavaProcessor(**parts, **how, num_additional_image_tokens=1).save_pretrained(folder)
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = hf.LlamaConfig(**small, intermediate_size=16, vocab_size=len(words))
    sees = hf.CLIPVisionConfig(**small, intermediate_size=16, image_size=336, patch_size=14)
    config = hf.LlavaConfig(text_config=text, vision_config=sees, image_token_index=3)
    config.save_pretrained(folder)


def _of_features() -> dict[str, float]:
    import torch
    import transformers

    from hetero_framework.extras.vision.feature_cache import FeatureCache

    hf: Any = transformers
    sees = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
    sees |= {"intermediate_size": 4096, "image_size": 336, "patch_size": 14}
    text = hf.LlamaConfig(num_hidden_layers=1, intermediate_size=16, vocab_size=8)
    how = {"vision_feature_layer": -2, "vision_feature_select_strategy": "default"}
    config = hf.LlavaConfig(text_config=text, vision_config=hf.CLIPVisionConfig(**sees), **how)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        cache = FeatureCache(hf.LlavaModel(config).get_image_features, b"", Path(folder))
        took: list[list[float]] = [[], []]
        for seconds in took:
            for seed in range(5):
                torch.manual_seed(seed)
                picture = torch.randn(1, 3, 336, 336)
                begun = time.process_time()
                cache(picture)
                seconds.append(time.process_time() - begun)
        size = max(path.stat().st_size for path in Path(folder).glob("*/*"))
    computed, read = (round(statistics.median(seconds), 4) for seconds in took)
    return {"computed_seconds": computed, "read_seconds": read, "bytes": size}


def _measured(arguments: argparse.Namespace) -> dict[str, float]:
    from hetero_framework.config import Config
    from hetero_framework.data.tokenizer import load_tokenizer
    from hetero_framework.data.train_data import load_data

    way, folder = arguments.way, arguments.folder
    sees = {"objective": "image-text-to-text"} if way == "pictures" else {}
    raw = {
        "coordinator": {"ip": "127.0.0.1", "port": 9999},
        "shard_plan": "auto",
        "model": {"name_or_path": str(folder / "model")},
        "data": {"train": str(folder / f"{way}.jsonl")},
        "training": {
            **{**sees, "gradient_accumulation_steps": arguments.accumulate},
            "per_device_train_batch_size": arguments.batch,
        },
    }
    config = Config.from_dict(raw, folder)
    begun = time.perf_counter()
    data = load_data(config, load_tokenizer(config))
    read, waits, early = time.perf_counter() - begun, [], 0.0
    seconds = arguments.seconds or _long_enough(data, arguments.batch * arguments.accumulate)
    for step in range(arguments.steps):
        begun = time.perf_counter()
        assert data.step_batches(step)
        waits.append(time.perf_counter() - begun)
        time.sleep(seconds)
        early = early or (_peak() if step == 9 else 0.0)
    data.close()
    told = {"first": waits[0], "median": statistics.median(waits), "longest": max(waits[10:])}
    return {
        "read_seconds": round(read, 1),
        "step_seconds": round(seconds, 2),
        "peak_of_ten": early,
        "peak": _peak(),
        **{f"{name}_wait": round(seconds, 4) for name, seconds in told.items()},
    }


def _long_enough(data: Any, pictures: int) -> float:
    """Half more than the seconds that two threads take for the pictures of a step."""
    took = []
    for row in range(8):
        begun = time.perf_counter()
        data.micro_batch([row])
        took.append(time.perf_counter() - begun)
    return 1.5 * pictures * statistics.median(took) / 2


def _peak() -> float:
    """The most memory that this process had, in MiB."""
    scale = 1 if sys.platform == "darwin" else 1024
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale / (1 << 20), 1)


if __name__ == "__main__":
    main()
