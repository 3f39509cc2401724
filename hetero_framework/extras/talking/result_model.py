"""A run's result that continues prompts, on the machines of its plan or on one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hetero_framework.cluster.cluster import Cluster
from hetero_framework.config import Config
from hetero_framework.config.objectives import shows_pictures
from hetero_framework.core.messages import SessionKind
from hetero_framework.data.tokenizer import load_tokenizer
from hetero_framework.errors import UserError
from hetero_framework.extras.talking.generation import Generator, TakeToken
from hetero_framework.extras.talking.prompts import Prompt, PromptReader, check_prompts
from hetero_framework.extras.talking.sampling import SampleRequest
from hetero_framework.models.cut.introspect import introspect
from hetero_framework.models.cut.language import first_layers
from hetero_framework.models.files.quantization import check_devices
from hetero_framework.models.files.source import ModelSource
from hetero_framework.models.library import quiet_libraries
from hetero_framework.models.sizing.memory import estimate_memory
from hetero_framework.security.access import Access
from hetero_framework.trainer.memory_checks import host_memory_lines
from hetero_framework.trainer.resolution import Resolved
from hetero_framework.trainer.setup import (
    Sample,
    fit_offload,
    largest_boundary,
    largest_frame,
    load_initial_adapter,
)

_MOST_TOKENS = 1 << 15  # tokens of one text, which cross a boundary at once


class Talk:
    """The model of a configuration, which continues prompts while it is `loaded`. Raises the
    UserError that fits a problem, before any process is started.

    `reader` makes prompts for the model, and `is_chat` tells whether it is talked to.
    """

    def __init__(self, config: Config) -> None:
        quiet_libraries(config.training.log_level)
        source = ModelSource.of(config)
        self._model_config = model = source.config
        self._structure = introspect(model)
        config.plan.covers(self._structure.num_layers, first_layers(config, model))
        check_devices(config, model, {})
        self._adapter = None
        if config.adapter is not None:
            from hetero_framework.models.adapters.lora import explicit_settings, plan_adapter

            self._adapter = plan = plan_adapter(model, config.adapter, config.base_dir)
            explicit = explicit_settings(config.adapter, plan)
            config = config.with_changes(adapter=explicit)
        self._config, self.tokenizer = config, load_tokenizer(config)
        self.generator = Generator(
            config, model, self.tokenizer, source.generation, most_tokens=_MOST_TOKENS
        )
        self.reader = PromptReader.of(config, self.tokenizer)
        self.is_chat = self.reader.is_chat

    @contextmanager
    def loaded(
        self, access: Access, session: SessionKind, *, debug: bool = False
    ) -> Iterator[Cluster]:
        """Within the block the processes of the plan hold the model."""
        config, model = self._config, self._model_config
        tokens = self.generator.max_positions or _MOST_TOKENS
        boundary = largest_boundary(config, model, tokens, rows=1)
        with Cluster(
            config,
            max_frame_bytes=largest_frame(model, boundary),
            max_boundary_bytes=boundary,
            debug=debug,
            session=session,
            access=access,
            id_layers=self._structure.id_readers,
        ) as cluster:
            facts = cluster.start(config.plan.owners)
            check_devices(config, model, {owner: f.no_four_bit for owner, f in facts.items()})
            host_memory_lines(config, {o for o, f in facts.items() if f.host_free is None})
            if any(entry.offload == "auto" for entry in config.shard_plan):
                memory = estimate_memory(config, model, max_in_flight=1, tokens=1)
                config = fit_offload(Resolved.start(config), memory, facts)[0].config
            cluster.assemble(config)
            self._restore = partial(
                load_initial_adapter, self._adapter, model, config.plan.stages, cluster.pipeline
            )
            cluster.recovery.outlive(lambda: cluster.retrying(self._restore))
            yield cluster

    def choice(self, **settings: Any) -> SampleRequest:
        """How tokens are chosen: as told, else (None) as the model's own generation_config says."""
        told = {name: value for name, value in settings.items() if value is not None}
        return replace(self.generator.own_choice, **told)

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raise DataError for a prompt that is empty or too long."""
        check_prompts(prompts, self.generator.max_positions, "prompts")

    def answer(
        self,
        cluster: Cluster,
        prompts: Sequence[Prompt],
        choice: SampleRequest,
        take_token: TakeToken = lambda prompt, sample, token: None,
    ) -> list[Sample]:
        """See `Generator.run`."""

        def restore() -> None:
            cluster.retrying(self._restore)

        return self.generator.run(cluster, prompts, choice, take_token=take_token, restore=restore)


def with_result(config: Config, result: Path | None, *, base: bool, local: bool) -> Config:
    """The configuration that loads a run's result: the result that it wrote, or the adapter or
    model in `result`. `base` leaves the result out. With `local` this machine holds all layers.
    Raises UserError where there is no result."""
    raw = config.to_dict()
    assert config.model is not None
    if config.model.task != "causal-lm":
        raise UserError(
            f'a model trained with the objective "{config.training.objective}" answers no prompts',
            hint="load the result with its class; its README.md shows how",
        )
    folder = (result or config.result_dir).absolute()
    is_adapter = (folder / "adapter_config.json").is_file()
    if base:
        raw["adapter"] = None
    elif not is_adapter and not (folder / "config.json").is_file():
        raise UserError(
            f"there is no adapter or model in {folder}",
            hint="train first, name another folder with --result, or take --base",
        )
    elif is_adapter:
        from hetero_framework.models.adapters.lora import reaches_towers

        raw["adapter"] = {"init_from": str(folder)}
        sees = shows_pictures(config.training.data_kind)
        if sees and reaches_towers(ModelSource.of(config).config, folder):
            raw["model"]["train_towers"] = True
    else:
        raw["adapter"] = None
        raw["model"] |= {"name_or_path": str(folder), "revision": None, "from_config": None}
    if local:
        layers = introspect(ModelSource.of(config).config).num_layers
        raw["shard_plan"] = [{"id": "local", "start": 0, "end": layers}]
        raw["workers"] = []
    return Config.from_dict(raw, config.base_dir)
