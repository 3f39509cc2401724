"""`hetero chat` about pictures, and samples with pictures: the class's `generate` is the oracle."""

from __future__ import annotations

import io
import json
import random
import zlib
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel
from PIL import Image
from transformers import AutoModelForImageTextToText

from hetero_framework.cli import main
from hetero_framework.extras.talking.result_model import Talk
from tests.cases import seldom
from tests.extras.vision.seeing import FAMILIES, LAYERS, encoded, picture, processor_of
from tests.integration.oracles import save_adapter
from tests.samples import machines_here, read_jsonl

pytestmark = pytest.mark.xdist_group("pool2")
TOWERS = ".*(vision|visual|projector|connector|merger).*"
MOST = 12


@pytest.fixture
def files(tmp_path):
    draw = random.Random(3)
    paths = [tmp_path / f"{number}.png" for number in range(2)]
    for path, size in zip(paths, ((50, 34), (30, 56)), strict=True):
        path.write_bytes(encoded(picture(draw, *size)))
    return [*map(str, paths)]


@pytest.fixture
def tokens(monkeypatch):
    """The tokens of each answer."""
    answers: list[list[int]] = []
    answer = Talk.answer

    def recorded(talk: Talk, cluster: Any, prompts: Any, choice: Any, take_token: Any) -> Any:
        answers.append([])

        def take(prompt: int, sample: int, token: int) -> None:
            answers[-1].append(token)
            take_token(prompt, sample, token)

        return answer(talk, cluster, prompts, choice, take)

    monkeypatch.setattr(Talk, "answer", recorded)
    return answers


def generated(model: Any, processor: Any, messages: Any, files: list[str]) -> list[int]:
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    opened = [[Image.open(file) for file in files]]
    inputs = processor(images=opened, text=[text], return_tensors="pt", add_special_tokens=False)
    how = {"max_new_tokens": MOST, "do_sample": False, "pad_token_id": 0, "eos_token_id": 4}
    return model.generate(**inputs, **how)[0, inputs["input_ids"].shape[1] :].tolist()


def chat(monkeypatch: Any, config: Path, words: list[str], lines: list[str]) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    return main(["chat", "--config", str(config), "--local", *words])


def configured(folder: Path, model: Path, objective: str = "image-text-to-text") -> Path:
    raw = {**machines_here(("local", LAYERS)), "model": {"name_or_path": str(model)}}
    training = {"objective": objective, "output_dir": str(folder / "run")}
    path = folder / "run.json"
    path.write_text(json.dumps({**raw, "training": training}))
    return path


def parts(text: str, pictures: int) -> list[dict[str, str]]:
    return [*[{"type": "image"}] * pictures, {"type": "text", "text": text}]


@pytest.mark.parametrize("family", seldom([*FAMILIES], *FAMILIES.keys() - {"llava", "qwen2_5_vl"}))
def test_chat_answers_as_generate_of_the_class_with_the_adapter(
    family, models, files, tokens, tmp_path, monkeypatch, verdicts
):
    model = models(family)
    adapter = save_adapter(
        *(model, tmp_path / "adapter"),
        **{"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "exclude_modules": TOWERS},
        lora_alpha=64,
    )
    said, words = tmp_path / "said.jsonl", ["--max-new-tokens", str(MOST), "--result", str(adapter)]
    lines = ["what is on the picture ?", f"/image {files[1]}", "red and green ?", f"/save {said}"]
    words += ["--image", files[0]]
    assert chat(monkeypatch, configured(tmp_path, model), words, lines) == 0
    [row] = read_jsonl(said)
    assert row["images"] == files
    asked, answered, again, _ = row["messages"]
    assert (asked["content"], again["content"]) == (parts(lines[0], 1), parts(lines[2], 1))
    stock = AutoModelForImageTextToText.from_pretrained(model)
    merged = PeftModel.from_pretrained(stock, adapter).merge_and_unload()
    processor = processor_of(model)
    answer = {"role": "assistant", "content": parts(answered["content"], 0)}
    expected = [
        generated(merged, processor, [asked], files[:1]),
        generated(merged, processor, [asked, answer, again], files),
    ]
    assert tokens == expected


def bomb(path: Path) -> None:
    data = bytearray(encoded(picture(random.Random(0), 4, 4)))
    data[16:24] = (60000).to_bytes(4, "big") * 2  # the width and height of the header
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    path.write_bytes(data)


BAD = {
    "missing": (lambda path: None, "image-text-to-text", " cannot be read: "),
    "no_picture": (lambda path: path.write_text("red"), "image-dpo", "is no picture that is read"),
    "bomb": (bomb, "image-text-to-text", "says in its header that it has too many pixels"),
    "unseen": (bomb, "sft", "the model is shown no picture: it was not trained with any"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_picture_that_cannot_be_shown_is_named(
    case, models, files, tmp_path, monkeypatch, capsys, verdicts
):
    make, objective, said = BAD[case]
    make(path := tmp_path / "bad.png")
    config = configured(tmp_path, models("llava"), objective)
    assert chat(monkeypatch, config, ["--base", "--image", str(path)], []) == 2
    assert said in capsys.readouterr().err
    assert chat(monkeypatch, config, ["--base"], [f"/image {path}", "/exit"]) == 0
    assert said in capsys.readouterr().out
