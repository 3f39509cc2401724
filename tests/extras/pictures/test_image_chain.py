from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForImageClassification,
    BeitConfig,
    ConvNextConfig,
    CvtConfig,
    EfficientNetConfig,
    PretrainedConfig,
    PvtV2Config,
    ResNetConfig,
    SegformerConfig,
    SwinConfig,
    ViTConfig,
)

from hetero_framework.config import Config, ModelConfig
from hetero_framework.errors import ArchitectureError, ModelError
from hetero_framework.extras.chains.chain import bundles
from hetero_framework.extras.pictures.image_chain import ImageConfig, ImagePart
from hetero_framework.models.cut.partition import ranges_between
from hetero_framework.models.files.source import ModelSource
from hetero_framework.models.verify.equivalence import compare
from tests.cases import seldom
from tests.samples import machines_here

FORMS = {"input": ((3, 32, 32), "float32"), "target": ((), "int64")}
_TEXTLIKE = {
    **{"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"intermediate_size": 48, "image_size": 32, "patch_size": 8, "num_labels": 5},
}
_STAGES = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 2, 1, 1], "num_labels": 5}
CLASSIFIERS: dict[str, Any] = {
    "vit": ViTConfig(**_TEXTLIKE),
    "resnet": ResNetConfig(embedding_size=8, layer_type="basic", **_STAGES),
    "swin": SwinConfig(
        **{"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 2, 1]},
        **{"num_heads": [2, 2, 4], "window_size": 4, "drop_path_rate": 0.0, "num_labels": 5},
    ),
    "convnext": ConvNextConfig(**_STAGES),
    "beit": BeitConfig(drop_path_rate=0.0, **_TEXTLIKE),
    # Blocks that repeat, and a head with dropout.
    "efficientnet": EfficientNetConfig(
        **{"width_coefficient": 0.2, "depth_coefficient": 0.3, "hidden_dim": 256},
        **{"dropout_rate": 0.0, "drop_connect_rate": 0.0, "num_labels": 5},
    ),
    "segformer": SegformerConfig(
        **{"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 24, 32], "num_labels": 5},
        **{"num_attention_heads": [1, 2, 2, 4], "drop_path_rate": 0.0},
        **{"hidden_dropout_prob": 0.0, "classifier_dropout_prob": 0.0},
    ),
    # Code between two blocks changes the hidden state's axes.
    "pvt_v2": PvtV2Config(
        **{"image_size": 32, "depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 24, 32]},
        **{"num_attention_heads": [1, 2, 2, 4], "drop_path_rate": 0.0, "num_labels": 5},
    ),
}


def chain_of(config: PretrainedConfig) -> ImageConfig:
    return ImageConfig(config.to_dict(), forms=FORMS)


@pytest.mark.parametrize(
    "name", seldom(CLASSIFIERS, "swin", "convnext", "beit", "efficientnet", "pvt_v2")
)
def test_a_classifier_in_parts_computes_what_its_class_does(name):
    """Logits, gradients and running means, to the bit, whole and in three shards."""
    config = chain_of(CLASSIFIERS[name])
    torch.manual_seed(0)
    whole: Any = AutoModelForImageClassification.from_config(CLASSIFIERS[name]).train()
    torch.manual_seed(0)
    chain = config.make().train()
    pictures = torch.randn(4, 3, 32, 32)
    for _ in range(2):  # the second time from what the first has left
        logits = whole(pixel_values=pictures).logits
        assert torch.equal(chain(pictures), logits)
    chain(pictures).sum().backward()
    whole(pixel_values=pictures).logits.sum().backward()
    parts = {
        config.users_name("", name.partition(".")[2]): p for name, p in chain.named_parameters()
    }
    state = {
        config.users_name("", name.partition(".")[2]): t for name, t in chain.state_dict().items()
    }
    assert parts.keys() == dict(whole.named_parameters()).keys()
    for key, parameter in whole.named_parameters():
        found = parts[key].grad
        assert (found is None) == (parameter.grad is None)
        assert found is None or torch.equal(found, parameter.grad)
    assert all(torch.equal(state[key], tensor) for key, tensor in whole.state_dict().items())
    count = len(bundles(config)) - 1
    assert compare(config, ranges_between([0, 2, count - 1, count])).verdict == "bit-equal"


@pytest.mark.parametrize(
    "name", seldom(["beit", "efficientnet", "segformer"], "efficientnet", "segformer")
)
def test_parts_are_compared_with_the_class_also_with_dropout(name):
    fields = CLASSIFIERS[name].to_dict()
    rates = {key: 0.3 for key, value in fields.items() if "drop" in key and value == 0.0}
    assert rates
    config = ImageConfig(fields | rates, forms=FORMS)
    count = len(bundles(config)) - 1
    assert compare(config, ranges_between([0, 2, count - 1, count])).verdict == "bit-equal"


def test_parts_that_compute_otherwise_than_the_class_are_refused(monkeypatch):
    """All cuts of a wrong chain are equal to each other; the class is what tells."""
    config, forward = chain_of(CLASSIFIERS["vit"]), ImagePart.forward
    monkeypatch.setattr(ImagePart, "forward", lambda part, value: 2 * forward(part, value))
    result = compare(config, ranges_between([0, 2, len(bundles(config)) - 1]))
    assert result.verdict == "refused"
    assert result.reason == "the output differs from that of the whole"


def test_a_tensor_that_goes_around_the_blocks_is_refused():
    config = CvtConfig(
        **{"embed_dim": [8, 16, 32], "num_heads": [1, 2, 4], "depth": [1, 2, 4]}, num_labels=5
    )
    result = compare(chain_of(config), ranges_between([0, 2, len(bundles(chain_of(config))) - 1]))
    assert result.verdict == "refused"
    assert "meta" in result.reason


def test_pictures_of_another_size_are_refused():
    config = ImageConfig(
        CLASSIFIERS["vit"].to_dict(), forms={**FORMS, "input": ((1, 32, 32), "float32")}
    )
    with pytest.raises(ArchitectureError, match="does not run on pictures of 1 x 32 x 32"):
        bundles(config)


def test_a_new_head_begins_at_random_and_a_lost_body_is_refused(tmp_path):
    whole: Any = AutoModelForImageClassification.from_config(CLASSIFIERS["vit"])
    whole.vit.save_pretrained(tmp_path / "body")
    body = ImageConfig(CLASSIFIERS["vit"].to_dict(), source=str(tmp_path / "body"), forms=FORMS)
    assert body.new_weights() == ["classifier.bias", "classifier.weight"]
    held = dict(body.make().state_dict())
    assert any(torch.equal(t, whole.vit.embeddings.cls_token) for t in held.values())

    tensors = whole.state_dict()
    lost = next(name for name in tensors if ".layer.1." in name or ".layers.1." in name)
    whole.save_pretrained(
        tmp_path / "lost", state_dict={n: t for n, t in tensors.items() if n != lost}
    )
    source = str(tmp_path / "lost")
    with pytest.raises(ModelError, match=f"lacks 1 weight that .*: {re.escape(lost)}"):
        ImageConfig(CLASSIFIERS["vit"].to_dict(), source=source, forms=FORMS).make()


def test_other_models_have_no_class_for_pictures(tmp_path):
    model = {"from_config": {"model_type": "llama"}}
    raw = {**machines_here(("local", 2)), "model": model, "data": {"train": "train_set"}}
    raw["training"] = {"objective": "image-classification"}
    model = Config.from_dict(raw).model
    assert isinstance(model, ModelConfig)
    with pytest.raises(ArchitectureError, match="no class for image-classification of model type"):
        _ = ModelSource(model, tmp_path).config
