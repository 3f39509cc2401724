"""The effect of each setting of the schema, by the marks of its field."""

from __future__ import annotations

from hetero_framework.config import Config, effects
from hetero_framework.config.composition import whole_schema
from hetero_framework.config.section import Effect, Scope
from tests.installed import needs


def test_every_setting_has_one_effect_and_one_scope():
    known = list(effects.effects())
    assert known == list(effects.scopes())
    assert len(known) == len(set(known)) > 140
    for name, section, field in effects.settings(whole_schema(Config)):
        for kind in (Effect, Scope):
            assert sum(isinstance(mark, kind) for mark in field.metadata) <= 1, name
        assert isinstance(section.effect, Effect)


@needs("islands")
def test_what_changes_the_result_is_compared_between_islands_or_has_a_reason():
    """These are compared by what follows from them: weights, tokens, samples, steps, devices."""
    apart = {
        name
        for name, effect in effects.effects().items()
        if effect in (Effect.IDENTITY, Effect.RESULT)
        and effects.scopes()[name] is Scope.PER_ISLAND
        and not name.startswith("data.")
    }
    assert apart == {
        *("model.name_or_path", "model.revision", "model.tokenizer", "adapter.init_from"),
        *("training.per_device_train_batch_size", "training.gradient_accumulation_steps"),
        *("training.num_train_epochs", "training.max_steps", "training.data_seed"),
        "island.share",
    }


def test_flat_names_each_setting_and_each_section_that_is_there():
    raw = {"links": "auto", "adapter": None, "training": {"seed": 1}, "workers": [{"id": 1}]}
    assert effects.flat(raw) == {
        **{"links": "auto", "adapter": None, "training": True, "workers": [{"id": 1}]},
        "training.seed": 1,
    }
