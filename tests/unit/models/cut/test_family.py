from types import SimpleNamespace

from transformers import LlamaConfig, PretrainedConfig, PreTrainedModel

from hetero_framework import registry
from hetero_framework.config import ModelConfig
from hetero_framework.models.cut.family import as_saved, family_asked, family_of
from hetero_framework.models.cut.tiny import shrink, stock_class
from hetero_framework.models.files.source import ModelSource


class MadeUpConfig(PretrainedConfig):
    model_type = "made-up"


class MadeUpModel(PreTrainedModel):
    pass


def test_a_family_stands_for_its_models(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    config, saved = MadeUpConfig(), LlamaConfig()
    family = SimpleNamespace(stock_class=MadeUpModel, saved=lambda c: saved)
    family.read = lambda model, base_dir: config
    registry.register("families", "made-up", family)
    registry.register("objectives", "mine", None, task="made-up")
    model = ModelConfig(name_or_path="a").for_objective("mine")
    assert ModelSource(model, tmp_path).config is config
    assert family_of(config) is family
    assert stock_class(config) is MadeUpModel
    assert shrink(config) is config
    assert as_saved(config) is saved
    assert as_saved(saved) is saved
    assert family_asked(ModelConfig(name_or_path="a")) is family_of(saved) is None
