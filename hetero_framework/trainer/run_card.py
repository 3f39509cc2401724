"""The card of a run's result: its data, settings, plan and last figures."""

from __future__ import annotations

import json
import math
from itertools import chain

from huggingface_hub import EvalResult
from transformers import PretrainedConfig

from hetero_framework.config import Config, effects
from hetero_framework.config.section import ON_CARD
from hetero_framework.data.sources import find_sources
from hetero_framework.errors import DataError, UserError
from hetero_framework.models.files.card import TAGS, base_facts, code, is_hub_name, model_card
from hetero_framework.trainer.read_metrics import loss_of, read_curves


def run_card(config: Config, model_config: PretrainedConfig, step: int | None = None) -> str:
    """The card of the result after `step`; None: at the end of the run."""
    model = config.model
    assert model is not None
    data = config.data
    sets = data.eval_sets if data is not None else {}
    parts = data.parts if data is not None else []
    trained = [name for part in parts for name in _hub_names(config, part.paths)]
    tested = {name: _hub_names(config, spec) for name, spec in sets.items()}
    last = _last_figures(config, step)
    figures = [
        f"{name.replace('_', ' ')} {value:.4g} (step {at})" for name, (at, value) in last.items()
    ]
    results = [
        EvalResult(TAGS[model.task], names[0], names[0], "loss", last[key][1])
        for name, names in tested.items()
        if names and (key := loss_of(name)) in last
    ]
    of_texts = config.training.reads_text
    told = effects.marked(ON_CARD, type(config))
    settings = [
        f"{name}: {code(json.dumps(value))}"
        for name, value in effects.flat(config.to_dict()).items()
        if name in told and value is not None and (of_texts or not name.startswith("data."))
    ]
    return model_card(
        base_facts(model.name_or_path, model.revision, config.base_dir),
        model_config,
        adapter=config.adapter is not None,
        lists={
            "## Training data": trained or ["files that are not on the hub"],
            "## Training procedure": settings,
            "### Plan": [
                f"stage {stage.index}: {config.contents(stage)}" for stage in config.plan.stages
            ],
            "### Last figures": figures or ["not kept with this result"],
        },
        datasets=list(dict.fromkeys([*trained, *chain(*tested.values())])),
        results=results,
    )


def _last_figures(config: Config, step: int | None) -> dict[str, tuple[int, float]]:
    """The steps and values of the last losses up to `step`, where they are known and finite."""
    try:
        curves = read_curves(config.output_dir)
    except UserError:  # the metrics are elsewhere, or lost
        return {}
    last = {}
    for name in (key for key in curves if key == "loss" or key.startswith("eval_")):
        for at, value in zip(*curves[name], strict=True):
            if step is None or at <= step:
                last[name] = (at, value)
    return {name: point for name, point in last.items() if math.isfinite(point[1])}


def _hub_names(config: Config, spec: str | tuple[str, ...]) -> list[str]:
    """The data sets of the hub among these sources. Empty if the configuration's folder is on
    another machine, since a file cannot be told from a name on the hub then."""
    if not config.training.reads_text or not config.base_dir.is_dir():
        return []
    try:
        sources = find_sources(spec, config.base_dir)
    except DataError:  # a file that is no longer here
        return []
    return [source.name for source in sources if source.kind == "hub" and is_hub_name(source.name)]
