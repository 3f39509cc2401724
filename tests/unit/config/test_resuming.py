"""Every setting of the schema has exactly one class on resume."""

from __future__ import annotations

from hetero_framework.config import Config, resuming


def test_every_setting_is_in_exactly_one_group() -> None:
    groups = (resuming.REFUSED, resuming.REPORTED, resuming.FREE)
    known = list(resuming.settings(Config))
    assert len(known) == len(set(known)) > 140
    wrong = {name: sum(name in group for group in groups) for name in known}
    assert {name: n for name, n in wrong.items() if n != 1} == {}
    assert frozenset().union(*groups) == set(known), "a group names what is not a setting"


def test_flat_names_each_setting_and_each_section_that_is_there() -> None:
    raw = {"links": "auto", "adapter": None, "training": {"seed": 1}, "workers": [{"id": 1}]}
    assert resuming.flat(raw) == {
        **{"links": "auto", "adapter": None, "training": True, "workers": [{"id": 1}]},
        "training.seed": 1,
    }
