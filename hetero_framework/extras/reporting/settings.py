"""Training settings of reporters and uploads."""

from __future__ import annotations

from typing import Annotated, Literal

from hetero_framework.config import TrainingConfig
from hetero_framework.config.section import FREE, Name, ReadIf

_UPLOADS = ReadIf("push_to_hub")


class ReportSettings(TrainingConfig):
    """The training section with the names of a run and where its result is uploaded."""

    run_name: Annotated[Name | None, FREE] = None
    """The run's name for reporters. null: the name of output_dir and an identifier. Elsewhere:
    wandb_name, mlflow_run_name, trackio_run_name, swanlab_experiment_name, swanlab_run_name."""
    project: Annotated[Name, FREE, ReadIf("report_to!=tensorboard")] = "huggingface"
    """The project that reporters put the run into. Elsewhere: WANDB_PROJECT, swanlab_project."""
    push_to_hub: Annotated[bool, FREE] = False
    """Upload the result to the Hugging Face hub. The token comes from `hf auth login` or HF_TOKEN
    on the coordinator's machine. A failed upload is logged, and the run goes on."""
    hub_model_id: Annotated[Name | None, FREE, _UPLOADS] = None
    """The repository, as "OWNER/NAME" or "NAME". null: the name of output_dir. It is made if
    there is none. Elsewhere: push_to_hub_model_id, hub_repo_id, repo_id."""
    hub_strategy: Annotated[Literal["end", "checkpoint", "all_checkpoints"], FREE, _UPLOADS] = "end"
    """"end": the result is uploaded when the run is done. "checkpoint": during the run, its newest
    checkpoint too, as last-checkpoint. "all_checkpoints": each checkpoint too, as step_N, but not
    one saved during another's upload. Checkpoints name machines and folders, so they go only into
    private repositories. (The default in transformers is every_save, which is refused.)"""
    hub_private_repo: Annotated[bool | None, FREE, _UPLOADS] = None
    """Whether a repository that is made is private. null: as its owner's default says."""
    hub_revision: Annotated[Name | None, FREE, _UPLOADS] = None
    """The branch to upload to; it is made if there is none. null: the default branch."""
