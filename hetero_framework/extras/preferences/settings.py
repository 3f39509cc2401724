"""Training settings of the objectives dpo, orpo, cpo and kto, image-dpo and image-kto."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field, ValidationInfo, field_validator, model_validator

from hetero_framework.config import TrainingConfig
from hetero_framework.config.problems import Problem, shown
from hetero_framework.config.section import ROUNDING, ReadIf
from hetero_framework.extras.preferences.pair_losses import PAIR_LOSSES

WITHOUT_KL = "apo_zero_unpaired"
_OTHER_LOSSES = {
    **{"sft": ("nll",), "orpo": ("sigmoid",)},
    **dict.fromkeys(("kto", "image-kto"), ("kto", WITHOUT_KL)),
}
"""Values of loss_type that are no losses of pairs, by objective, the default first."""
_OF_DPO = ReadIf("objective=dpo|image-dpo")
_OF_ANSWERS = ReadIf("objective=dpo|image-dpo|orpo|cpo|kto|image-kto")
_OF_SFT_OR_ANSWERS = ReadIf("objective=sft|dpo|image-dpo|orpo|cpo|kto|image-kto")
_OF_CPO = ReadIf("objective=cpo")
_OF_KTO = ReadIf("objective=kto|image-kto")
_OF_REFERENCE = ReadIf("objective=dpo|image-dpo|kto|image-kto")


def losses_of(objective: str) -> tuple[str, ...]:
    """Values of loss_type with an objective, the default first. TRL's aot and aot_unpaired are left
    out: they sort the pairs of a micro-batch."""
    pairs = PAIR_LOSSES.get(objective, PAIR_LOSSES["dpo"])
    return _OTHER_LOSSES.get(objective) or tuple(pairs)


def _takes_one(objective: str) -> bool:
    return objective in _OTHER_LOSSES or objective == "cpo"


def _read_by_losses(setting: str) -> ReadIf:
    """The condition that a loss with this parameter is chosen, also a loss of a user's file."""

    def condition() -> str:
        ways = []
        for objective, losses in PAIR_LOSSES.items():
            if names := [name for name, loss in losses.items() if setting in loss.reads]:
                ways.append(f"objective={objective} and loss_type={'|'.join(names)}")
        return " or ".join(ways)

    return ReadIf(condition)


class PreferenceSettings(TrainingConfig):
    """The training section with the settings of preference objectives."""

    loss_type: Annotated[str | tuple[str, ...] | None, _OF_SFT_OR_ANSWERS] = None
    """DPO's, CPO's or KTO's loss, by its name in TRL. DPO also takes several losses, added up by
    loss_weights. null: sigmoid, for KTO kto. "sft" has TRL's "nll" alone."""
    loss_weights: Annotated[tuple[float, ...] | None, _OF_DPO] = None
    """A weight for each loss_type. null: 1 for each. Elsewhere: dpo_loss_weights."""
    beta: Annotated[float, _OF_ANSWERS] = Field(default=0.1, gt=0)
    """DPO, KTO: how closely the model keeps to the reference. ORPO: weight of the odds. CPO: the
    factor of log-probabilities. Elsewhere: rl_beta, dpo_beta, pref_beta, orpo_alpha, trl.beta."""
    label_smoothing: Annotated[float, _read_by_losses("label_smoothing")] = Field(
        default=0.0, ge=0, lt=0.5
    )
    """The share of pairs whose answers may have been confused (DPO: robust, exo_pair; CPO: sigmoid,
    simpo). Elsewhere: dpo_label_smoothing."""
    cpo_alpha: Annotated[float, _OF_CPO] = Field(default=1.0, ge=0)
    """CPO: weight of the chosen answers' own loss."""
    simpo_gamma: Annotated[float, _read_by_losses("simpo_gamma")] = 0.5
    """CPO: how much better the chosen answer should be (simpo)."""
    rpo_alpha: Annotated[float | None, _OF_DPO] = Field(default=None, ge=0)
    """DPO: weight of the chosen answers' own loss, added to the others. null: none."""
    use_weighting: Annotated[bool, _OF_DPO] = False
    """DPO: weight each pair by how likely the model finds it (WPO). Elsewhere:
    dpo_use_weighting."""
    ld_alpha: Annotated[float | None, _OF_DPO] = Field(default=None, ge=0, le=1)
    """DPO: weight of the tokens beyond the length of the shorter answer. null: all count.
    Elsewhere: dpo_ld_alpha."""
    discopop_tau: Annotated[float, _read_by_losses("discopop_tau")] = Field(default=0.05, gt=0)
    """DPO: the temperature of discopop."""
    desirable_weight: Annotated[float, _OF_KTO] = Field(default=1.0, ge=0)
    """KTO: weight of the answers whose label is true. Elsewhere: kto_desirable_weight,
    kto_chosen_weight."""
    undesirable_weight: Annotated[float, _OF_KTO] = Field(default=1.0, ge=0)
    """KTO: weight of the other answers. Elsewhere: kto_undesirable_weight, kto_rejected_weight."""
    precompute_ref_log_probs: Annotated[bool, ROUNDING, _OF_REFERENCE] = True
    """DPO, KTO: ask the reference once, before the first step, and keep its numbers for each
    example. false: in every step, with the adapter switched off. (TRL's default is false.)"""

    @field_validator("loss_type", "loss_weights", mode="before")
    @classmethod
    def _as_tuple(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    @field_validator("loss_type")
    @classmethod
    def _loss_is_known(
        cls, value: str | tuple[str, ...] | None, info: ValidationInfo
    ) -> str | tuple[str, ...] | None:
        if value is None:
            return None
        names = (value,) if isinstance(value, str) else value
        objective = str(info.data.get("objective"))
        known = losses_of(objective)
        if not names or (unknown := [name for name in names if name not in known]):
            raise ValueError(
                f"{shown(unknown[0] if names else value)} is none of {', '.join(known)}"
            )
        if len(names) > 1 and _takes_one(objective):
            raise ValueError(f"the objective {shown(objective)} takes one loss")
        return value

    @model_validator(mode="after")
    def _fits_the_objective(self) -> PreferenceSettings:
        losses = self.losses
        if self.loss_weights is not None and _takes_one(self.objective):
            raise ValueError(f"the objective {shown(self.objective)} takes no loss_weights")
        if self.loss_weights is not None and len(self.loss_weights) != len(losses):
            raise ValueError(
                f"loss_weights has {len(self.loss_weights)} numbers for {len(losses)} loss types"
            )
        for name in losses if self.objective in PAIR_LOSSES else ():
            PAIR_LOSSES[self.objective][name].check(self)
        if self.has_mismatches:
            other = f"or set loss_type {WITHOUT_KL!r}"
            if self.per_device_train_batch_size < 2:
                raise ValueError(
                    f"{self.objective} needs a per_device_train_batch_size of at least 2: an answer"
                    f" is also put behind another prompt of its micro-batch; {other}"
                )
            if self.train_sampling_strategy != "sequential":
                raise ValueError(
                    f'{self.objective} needs train_sampling_strategy "sequential": the examples of'
                    f" a micro-batch stay together; shuffle the file, {other}"
                )
        return self

    @property
    def losses(self) -> tuple[str, ...]:
        """The names in loss_type."""
        named = self.loss_type or losses_of(self.objective)[0]
        return (named,) if isinstance(named, str) else named

    @property
    def data_kind(self) -> str:
        kind = super().data_kind
        return kind.replace("mismatched", "ratings") if WITHOUT_KL in self.losses else kind

    @property
    def has_mismatches(self) -> bool:
        """Whether each answer is put behind another prompt, too."""
        return self.data_kind.endswith("mismatched")


def disagreements(parts: Mapping[str, Any]) -> Iterator[Problem]:
    """Contradictions to other sections."""
    island, training = parts.get("island"), parts.get("training")
    if training is None or island is None or not PreferenceSettings.of(training).has_mismatches:
        return
    if island.sync_steps == 1 or island.warmup_steps:
        yield Problem(
            "island",
            "is for losses of single examples where islands share a step (sync_steps 1,"
            " warmup_steps); kto's estimate of the KL is of a micro-batch: set"
            f" training.loss_type {WITHOUT_KL!r}, or more sync_steps without warmup_steps",
        )
