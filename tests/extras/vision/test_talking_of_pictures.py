"""`hetero chat` about pictures, and samples with pictures: the class's `generate` is the oracle."""

from __future__ import annotations

import io
import json
import random
import zlib
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel
from PIL import Image
from transformers import AutoModelForImageTextToText

from hetero_framework.cli import main
from hetero_framework.extras.talking.result_model import Talk
from hetero_framework.trainer.coordinator import train
from tests.cases import seldom
from tests.extras.vision.seeing import FAMILIES, LAYERS, encoded, picture, processor_of, save_rows
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


def shown(file: str) -> Image.Image:
    return Image.open(io.BytesIO(Path(file).read_bytes()))


def generated(model: Any, processor: Any, messages: Any, files: list[str]) -> list[int]:
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    opened = [[shown(file) for file in files]]
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


@pytest.mark.parametrize("towers", [False, True])
@pytest.mark.parametrize("family", seldom([*FAMILIES], *FAMILIES.keys() - {"llava", "qwen2_5_vl"}))
def test_chat_answers_as_generate_of_the_class_with_the_adapter(
    family, towers, models, files, tokens, tmp_path, monkeypatch, verdicts
):
    model = models(family)
    how = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "exclude_modules": TOWERS}
    how = {"target_modules": "all-linear"} if towers else how
    adapter = save_adapter(*(model, tmp_path / "adapter"), **how, lora_alpha=64)
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


@pytest.mark.parametrize("family", seldom(["llava", "qwen3_vl"], "llava"))
def test_samples_of_a_run_have_pictures(family, models, files, configured, tmp_path, verdicts):
    model, rows = models(family), tmp_path / "prompts.jsonl"
    asked = {"role": "user", "content": parts("what is it ?", 2)}
    rows.write_text(json.dumps({"images": files, "prompt": [asked]}) + "\n")
    training = {"objective": "image-text-to-text", "max_steps": 2, "learning_rate": 1e-2}
    training |= {"sample_prompts": str(rows), "sample_steps": 1, "sample_max_new_tokens": MOST}
    data = {"train": str(save_rows(tmp_path / "rows"))}
    sections = {"model": {"name_or_path": str(model)}, "data": data, "training": training}
    for cuts in ([], [2]):
        train(configured(cuts, f"run-{len(cuts)}", layers=LAYERS, **sections))
    first, last = (read_jsonl(tmp_path / f"run-{k}" / "samples.jsonl") for k in range(2))
    assert first == last
    assert [line["prompt"] for line in last] == ["what is it ?"] * len(last)
    small = [
        Image.open(io.BytesIO(b64decode(each.partition(",")[2]))) for each in last[-1]["pictures"]
    ]
    assert [image.size for image in small] == [shown(file).size for file in files]
    stock = AutoModelForImageTextToText.from_pretrained(tmp_path / "run-1" / "model")
    found = generated(stock, processor_of(model), [asked], files)
    assert last[-1]["text"] == processor_of(model).tokenizer.decode(found, skip_special_tokens=True)
    assert last[-1]["tokens"] == len(found)


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
