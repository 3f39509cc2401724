"""Pictures that cannot be trained on are refused with their row; the rest is read as it is."""

from __future__ import annotations

import json
import random
import shutil
import threading
import weakref
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from PIL import ExifTags, Image
from transformers import AutoModelForImageTextToText, LlavaProcessor

from hetero_framework.data.batches import PICTURES
from hetero_framework.data.kinds import objectives_of
from hetero_framework.data.sources import Record
from hetero_framework.data.tokenizer import load_tokenizer
from hetero_framework.data.train_data import load_data
from hetero_framework.errors import DataError, ModelError, PlanError, UserError
from hetero_framework.extras.vision import admission
from hetero_framework.extras.vision.pictures import PictureStore
from hetero_framework.trainer.setup import prepare
from tests.extras.vision.seeing import (
    encoded,
    picture,
    processor_of,
    save_gemma3,
    save_idefics3,
    save_llava,
    save_llava_next,
    save_pairs,
    save_qwen2_5_vl,
    save_qwen3_vl,
    save_rows,
)
from tests.extras.vision.test_vision import TRAINING, data_of
from tests.samples import config_for

ASKED = [{"type": "image"}, {"type": "text", "text": "what is on the picture"}]
ANSWER = {"role": "assistant", "content": "a red square"}


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    return save_llava(tmp_path_factory.mktemp("llava"))


def row(images: Any, content: Any = None, **fields: Any) -> dict[str, Any]:
    asked = {"role": "user", "content": ASKED if content is None else content}
    return {"images": images, "messages": [asked, ANSWER], **fields}


def save(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path


def refusal(model: Path, path: Path, **data: Any) -> str:
    with pytest.raises(UserError) as error:
        data_of(model, path, **data)
    return f"{error.value} {error.value.hint}"


def header(width: int, height: int) -> bytes:
    """A PNG of one pixel whose header says another size."""
    data = bytearray(encoded(Image.new("RGB", (1, 1))))
    data[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return bytes(data)


PNG = encoded(picture(random.Random(1), 40, 30))
JPEG = encoded(picture(random.Random(1), 40, 30), "JPEG")
BAD = {
    "no picture": (b"hello", "no picture that is read here"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no picture that is"),
    "empty": (b"", "no picture that is read here"),
    "half a PNG": (PNG[: len(PNG) // 2], "is damaged"),
    "half a JPEG": (JPEG[: len(JPEG) // 2], "is damaged"),
    "a bomb": (header(30_000, 30_000), "says in its header that it has too many pixels"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_picture_is_refused_with_its_row(name, llava, tmp_path):
    data, said = BAD[name]
    (tmp_path / "bad.png").write_bytes(data)
    (tmp_path / "good.png").write_bytes(PNG)
    images = [[str(tmp_path / "good.png")], [str(tmp_path / "bad.png")]]
    text = refusal(llava, save(tmp_path, *map(row, images)))
    assert text.startswith(f"{tmp_path / 'rows.jsonl'}:2: the picture ")
    assert said in text


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"images": ["absent.png"]}, "absent.png cannot be read: No such file"),
        ({"images": ["https://example.org/a.png"]}, "is a URL, and no picture is fetched"),
        ({"images": [7]}, "a picture is a path or an object with bytes, found a number"),
        ({"images": [""]}, "a picture is a path or an object with bytes, found nothing"),
        ({"images": []}, "0 pictures, and 1 place for them"),
        ({"images": [], "image": None, "content": "what <image> is"}, "0 pictures, and 1 place"),
        ({"images": ["good.png"] * 2}, "2 pictures, and 1 place for them"),
        ({"images": ["good.png"], "content": ASKED + ASKED}, "1 picture, and 2 places for it"),
        (
            {"images": ["good.png"], "content": [{"type": "image", "url": "good.png"}]},
            "put pictures into the column images",
        ),
        ({"images": ["good.png"], "content": [{"type": "video"}]}, "content that is not text"),
        ({"images": ["good.png"], "videos": ["a.mp4"]}, "has the field videos"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_row(given, said, llava, tmp_path, monkeypatch):
    (tmp_path / "good.png").write_bytes(PNG)
    images = [str(tmp_path / name) if name == "good.png" else name for name in given.pop("images")]
    text = refusal(llava, save(tmp_path, row(images, **given)))
    assert said in text
    assert "rows.jsonl:1" in text


@pytest.mark.parametrize("place", ["data", "here"])
def test_a_relative_path_starts_at_one_of_three_folders(place, llava, tmp_path, monkeypatch):
    """That of the configuration comes first; recipes' and saved rows' paths start there."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "data").mkdir()
    (tmp_path / place / "good.png").write_bytes(PNG)
    assert len(data_of(llava, save(tmp_path / "data", row(["good.png"]))).examples) == 1


def test_nothing_is_cut_within_a_picture(llava, tmp_path):
    (tmp_path / "good.png").write_bytes(PNG)
    path = save(tmp_path, row([str(tmp_path / "good.png")]))
    whole = data_of(llava, path).longest
    assert "a picture would be cut" in refusal(llava, path, max_length=5)
    assert data_of(llava, path, max_length=whole - 2).longest == whole - 2
    assert "keep_end would cut pictures" in refusal(llava, path, truncation_mode="keep_end")


@pytest.mark.parametrize("mode", ["L", "1", "P", "RGBA", "CMYK", "I;16"])
def test_pictures_of_any_mode_are_those_of_the_processor(mode, llava, tmp_path):
    """Also of one pixel, of several frames, and turned by EXIF: as `datasets` and TRL have them."""
    draw = random.Random(2)
    image = Image.new(mode, (40, 30)) if mode == "I;16" else picture(draw, 40, 30).convert(mode)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6  # turned by a quarter
    frames = [picture(draw, 30, 30) for _ in range(2)]
    files = [
        encoded(image, "TIFF" if mode in ("CMYK", "I;16") else "PNG"),
        encoded(picture(draw, 1, 1)),
        encoded(picture(draw, 40, 20), "JPEG", exif=exif),
        encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]),
    ]
    made = [row([{"bytes": data, "path": None}], "what") for data in files]
    rows = datasets.Dataset.from_list(made).cast_column("images", datasets.List(datasets.Image()))
    rows.to_parquet(tmp_path / "rows.parquet")
    rows.save_to_disk(tmp_path / "saved")
    images = [each["images"] for each in rows]
    expected = processor_of(llava)(images=images, return_tensors="pt")["pixel_values"]
    for name in ("rows.parquet", "saved"):
        data = data_of(llava, tmp_path / name)
        assert any("16 bits a colour" in line for line in data.report) == (mode == "I;16")
        batch = data.micro_batch(np.arange(4))
        assert torch.equal(batch[f"{PICTURES}pixel_values"], expected)


def test_pictures_stand_before_the_first_question_where_no_part_says_more(llava, tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    said = row(None, "what is on the picture", image=str(tmp_path / "a.png"))
    parts = row([str(tmp_path / "a.png")])
    one, other = (
        data_of(llava, save(tmp_path, each)).micro_batch(np.arange(1)) for each in (said, parts)
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert int((one["input_ids"] == 5).sum()) == 4


def test_mixtures_and_held_out_rows_keep_their_pictures(llava, tmp_path):
    path = save_rows(tmp_path / "rows")
    whole = data_of(llava, path)
    sources = [{"path": str(path), "max_samples": 4}, {"path": str(path), "name": "again"}]
    mixed = data_of(llava, None, train=sources, val_set_size=3)
    assert len(mixed.examples) == 10
    everything = [whole.micro_batch(np.array([k])) for k in range(9)]
    for rows in (mixed.examples, mixed.eval_sets[""]):
        for number in range(len(rows)):
            made = mixed.collate(rows, np.array([number]))
            alike = [
                each for each in everything if torch.equal(each["input_ids"], made["input_ids"])
            ]
            assert any(
                each.keys() == made.keys() and all(torch.equal(each[n], made[n]) for n in made)
                for each in alike
            )
    lines = [line for line in whole.report if " pictures, at" in line or "its pictures" in line]
    seen = [int((whole.examples[row][0] == 5).sum()) for row in range(9)]
    least, most = min(seen), max(seen)
    assert lines == [
        "train: 9 pictures, at most 2 in an example",
        f"train: tokens of its pictures: least {least}, mean {sum(seen) / 9:.0f}, most {most}",
    ]
    assert (least, most) == (0, 8)
    other = data_of(llava, path)
    assert other.fingerprint == whole.fingerprint
    (tmp_path / "rows" / "0-0.png").write_bytes(PNG)
    assert data_of(llava, path).fingerprint != whole.fingerprint
    with pytest.raises(DataError, match="has changed since the run began"):
        whole.micro_batch(np.array([0]))


def test_other_objectives_models_and_settings_refuse_pictures_by_name(llava, tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    path = save(tmp_path, row([str(tmp_path / "a.png")]))

    def said(
        folder: Path, objective: Any = TRAINING["objective"], layers: int = 4, **sections: Any
    ) -> str:
        sections = {"model": {"name_or_path": str(folder)}, **sections}
        sections["data"] = {"train": str(path), **sections.get("data", {})}
        sections["training"] = {"objective": objective, "max_steps": 1}
        with pytest.raises(UserError) as error:
            prepare(config_for(("local", layers), **sections))
        return f"{error.value} {error.value.hint}"

    assert '"training.objective": "image-text-to-text"' in said(llava, "sft")
    for setting in ("packing", "padding_free"):
        text = f"data.{setting} is for texts"
        assert text in said(llava, data={setting: True})
    stored = tmp_path / "stored"
    shutil.copytree(llava, stored)
    about = json.loads((stored / "config.json").read_text())
    about["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (stored / "config.json").write_text(json.dumps(about))
    text = said(stored, adapter={"target_modules": ["q_proj"]})
    assert "not trained over weights stored as fp8 yet" in text
    for name in ("processor_config.json", "tokenizer.json"):
        assert (llava / name).is_file()
    bare = tmp_path / "bare"
    shutil.copytree(llava, bare)
    (bare / "processor_config.json").unlink()
    assert "has no processor for pictures" in said(bare)


def test_features_behind_the_first_layer_stay_on_the_first_stage(tmp_path, monkeypatch):
    """DeepStack adds them there: a cut in front of the layer would drop them without a word."""
    model, path = save_qwen3_vl(tmp_path), save_rows(tmp_path / "rows")
    sections: dict[str, Any] = {"model": {"name_or_path": str(model)}, "training": TRAINING}
    sections["data"] = {"train": str(path)}
    stages = ("local", 0), ("local", 4)
    with pytest.raises(PlanError, match="end is 0: the model also adds pictures to layer 0"):
        prepare(config_for(*stages, **sections))
    sections["training"] = {"max_steps": 1}
    (tmp_path / "texts.jsonl").write_text('{"text": "a red square"}\n')
    prepare(config_for(*stages, **sections | {"data": {"train": str(tmp_path / "texts.jsonl")}}))
    assert data_of(model, path).longest
    monkeypatch.setattr(admission, "seeing_layers", lambda config: 0)
    with pytest.raises(ModelError, match="a qwen3_vl model: its later layers need more"):
        data_of(model, path)


@pytest.mark.parametrize("what", ["writes", "needs a name"])
def test_a_processor_that_does_something_else_is_refused(what, llava, tmp_path, monkeypatch):
    """As PaliGemma's, which puts a token before the text, or one without a token for pictures."""
    if what == "writes":
        call = LlavaProcessor.__call__

        def changed(self: Any, text: Any = None, **how: Any) -> Any:
            return call(self, text=[f"{each} a" for each in text], **how)

        monkeypatch.setattr(LlavaProcessor, "__call__", changed)
        said = "a llava model: its processor .* changes more of a text than a picture's place"
    else:
        monkeypatch.setattr(LlavaProcessor, "image_token_ids", property(lambda self: 1 / 0))
        said = "a llava model: its processor "
    with pytest.raises(ModelError, match=said):
        data_of(llava, save_rows(tmp_path))


def test_the_weights_of_the_tower_are_counted_on_the_first_stage(llava, tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    path = save(tmp_path, row([str(tmp_path / "a.png")]))
    sections = {"model": {"name_or_path": str(llava)}, "data": {"train": str(path)}}
    made = prepare(config_for(("local", 2), ("local", 4), training=TRAINING, **sections))
    model = AutoModelForImageTextToText.from_pretrained(llava)
    parts = (model.model.vision_tower, model.model.multi_modal_projector)
    tower = sum(parameter.nbytes for part in parts for parameter in part.parameters())
    (tmp_path / "texts.jsonl").write_text('{"text": "a red square"}\n')
    sections["data"] = {"train": str(tmp_path / "texts.jsonl")}
    plain = prepare(config_for(("local", 2), ("local", 4), **sections))
    more = [
        one.weights - other.weights for one, other in zip(made.memory, plain.memory, strict=True)
    ]
    assert more == [tower, 0]


def test_pictures_are_told_by_their_column():
    fields = row(["a.png"])
    assert objectives_of(Record("a:1", fields)) == ["image-text-to-text", "sft"]
    assert objectives_of(Record("a:1", {"messages": fields["messages"]})) == ["sft"]
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    found = objectives_of(Record("a:1", {**pair, "image": "a.png"}))
    assert found[:3] == ["image-dpo", "image-kto", "image-text-to-text"]
    rated = {"prompt": "a", "completion": "b", "label": True, "image": "a.png"}
    assert objectives_of(Record("a:1", rated))[:3] == ["image-kto", "image-text-to-text", "kto"]


def sizes(pixels: int) -> dict[str, int]:
    return {"image_max_pixels": pixels}


@pytest.mark.parametrize(
    ("save_model", "settings", "size"),
    [
        (
            save_qwen2_5_vl,
            {"image_min_pixels": 3200, "image_max_pixels": 4000},
            {"shortest_edge": 3200, "longest_edge": 4000},
        ),
        (save_qwen2_5_vl, sizes(800), {"shortest_edge": 784, "longest_edge": 800}),
        (save_idefics3, sizes(84 * 84 + 99), {"longest_edge": 84}),
        (save_idefics3, sizes(28 * 28), {"longest_edge": 28}),
    ],
)
def test_pictures_have_the_pixels_that_the_processor_gives_with_its_own_setting(
    save_model, settings, size, tmp_path
):
    model = save_model(tmp_path / "model")
    path = save_rows(tmp_path / "rows")
    images = [Image.open(name) for name in json.loads(path.read_text().splitlines()[1])["images"]]
    processor = processor_of(model)
    found, usual = (
        data_of(model, path, **given).micro_batch(np.arange(1, 2)) for given in (settings, {})
    )
    made = processor(
        images=[images],
        text=[processor.image_token * 2],
        **{"images_kwargs": {"size": size}, "return_tensors": "pt", "add_special_tokens": False},
    )
    shown = {n.removeprefix(PICTURES): t for n, t in found.items() if n.startswith(PICTURES)}
    shown.pop("mm_token_type_ids", None)
    assert all(torch.equal(tensor, made[name]) for name, tensor in shown.items())
    assert found["input_ids"].numel() != usual["input_ids"].numel()
    tokens = (found["input_ids"] == 5).sum()
    assert tokens == (made["input_ids"] == 5).sum()
    assert shown["pixel_values"].shape != usual[f"{PICTURES}pixel_values"].shape


@pytest.mark.parametrize(
    ("save_model", "settings", "said"),
    [
        (save_llava, sizes(4000), "image_max_pixels: the processor of llava gives pictures"),
        (save_gemma3, {"image_min_pixels": 9}, "image_min_pixels: the processor of gemma3"),
        (save_idefics3, {"image_min_pixels": 9}, "image_min_pixels: the processor of idefics3"),
        (save_idefics3, sizes(700), "less than one tile of idefics3, 784 pixels"),
        (save_qwen2_5_vl, {"image_min_pixels": 9999}, "at least 9,999 pixels and at most 4,704"),
        (
            save_qwen2_5_vl,
            {"image_min_pixels": 9, "image_max_pixels": 8},
            "image_min_pixels is more than image_max_pixels",
        ),
    ],
)
def test_pixels_that_can_mean_nothing_are_refused_by_name(save_model, settings, said, tmp_path):
    model = save_model(tmp_path / "model")
    assert said in refusal(model, save_rows(tmp_path / "rows"), **settings)


def test_threads_read_the_bytes_of_a_table_at_once(llava, tmp_path):
    images = [[{"bytes": encoded(picture(random.Random(k), 9 + k, 9))}] for k in range(20)]
    rows = datasets.Dataset.from_list([row(each, "what") for each in images])
    rows.to_parquet(tmp_path / "rows.parquet")
    store = data_of(llava, tmp_path / "rows.parquet").examples.pictures
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(store.image, [*range(20)] * 200)]  # raises for the bytes of another
    assert [image.width for image in found] == [*range(9, 29)] * 200


@pytest.mark.parametrize(
    ("save_model", "most"), [(save_llava, 1), (save_llava_next, 1), (save_idefics3, 2)]
)
def test_few_pictures_of_a_micro_batch_are_decoded_at_once(save_model, most, tmp_path, monkeypatch):
    """One, or those of a row where the processor puts a row's pictures together."""
    model, rows = save_model(tmp_path / "model"), save_rows(tmp_path / "rows")
    data, decoded, kept, counts = data_of(model, rows), PictureStore.image, [], []

    def image(store: PictureStore, number: int) -> Image.Image:
        found = decoded(store, number)
        kept.append(weakref.ref(found))
        counts.append(sum(one() is not None for one in kept))
        return found

    given = [
        [Image.open(path).convert("RGB") for path in json.loads(line)["images"]]
        for line in rows.read_text().splitlines()
    ]
    processor = processor_of(model)
    text = [processor.image_token * len(images) for images in given]
    expected = processor(images=given, text=text, padding=True, return_tensors="pt")
    monkeypatch.setattr(PictureStore, "image", image)
    batch = data.micro_batch(np.arange(len(given)))
    assert max(counts) == most
    assert torch.equal(batch[f"{PICTURES}pixel_values"], expected["pixel_values"])


@pytest.mark.parametrize("objective", ["image-text-to-text", "image-dpo"])
def test_pictures_are_prepared_ahead_in_threads_that_end_with_the_data(
    objective, llava, tmp_path, monkeypatch
):
    path = (save_pairs if objective == "image-dpo" else save_rows)(tmp_path / "rows")
    training = {**TRAINING, "objective": objective, "per_device_train_batch_size": 1}
    sections = {"model": {"name_or_path": str(llava)}, "data": {"train": str(path)}}
    config = config_for(("local", 4), training=training, **sections)
    plain, ahead = (load_data(config, load_tokenizer(config)) for _ in range(2))
    store = getattr(ahead.examples, "rows", ahead.examples).pictures
    names, decoded, watched = set(), PictureStore.image, id(store)

    def image(store: PictureStore, number: int) -> Image.Image:
        if id(store) == watched:
            names.add(threading.current_thread().name[:8])
        return decoded(store, number)

    monkeypatch.setattr(PictureStore, "image", image)
    for step in range(3):
        made = ahead.step_batches(step)
        expected = [plain.micro_batch(rows) for rows in plain.order.step_indices(step)]
        for one, other in zip(made, expected, strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[name], other[name]) for name in one)
    assert names == {"pictures"}
    for file in path.parent.glob("*.png"):
        file.write_bytes(PNG)
    with pytest.raises(DataError, match="has changed since the run began"):
        ahead.step_batches(0)
    ahead.close()
    assert not any(thread.name.startswith("pictures") for thread in threading.enumerate())
