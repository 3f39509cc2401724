"""Uploads one folder to the hub, in a process of its own that extras/reporting/hub.py starts.

So a slow server, a client that hangs or crashes, and the hashing of files touch no step. A thread
of the client (`run_as_future`) cannot be ended: with a hub that hangs, a finished run stayed
for more than 100 s. The process imports no torch and ends with its parent. Its argument is a job
as JSON; it prints one line, the address of the repository or the reason why there is no upload.
"""

from __future__ import annotations

import json
import os
import re
import sys
from typing import Any

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from hetero_framework._version import __version__
from hetero_framework.cluster.child import watch_parent
from hetero_framework.config import Config
from hetero_framework.errors import ConfigError
from hetero_framework.extras.reporting.settings import ReportSettings

PUBLIC = 2
"""Exit code if a checkpoint would go into a public repository."""
_UNSAID = re.compile(r"\?\S+|\bhf_\w{20,}")  # signatures of addresses, and tokens


def repository(config: Config) -> str:
    """The name of the repository that results go to, with or without its owner."""
    return ReportSettings.of(config.training).hub_model_id or config.output_dir.name


def check(config: Config) -> None:
    """Raise ConfigError if results are to be uploaded and this machine cannot do so."""
    if not ReportSettings.of(config.training).push_to_hub:
        return
    name = repository(config)
    later = "or set push_to_hub to false and upload with `hf upload` later"
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ConfigError(
            f"training.hub_model_id: {name!r} is no name on the hub: {error}",
            hint='set it to "OWNER/NAME"; without it, the name is that of training.output_dir',
        ) from error
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(
            "training.push_to_hub is set, and HF_HUB_OFFLINE forbids uploads",
            hint=f"unset HF_HUB_OFFLINE where the coordinator starts, {later}",
        )
    # Only the upload itself asks a CI service for its token.
    if "HF_OIDC_RESOURCE" not in os.environ and get_token() is None:
        raise ConfigError(
            "training.push_to_hub is set, and there is no token of the hub on this machine",
            hint=f"log in with `hf auth login`, set HF_TOKEN where the coordinator starts, {later}",
        )


def upload(job: dict[str, Any]) -> tuple[int, str]:
    """Do a job; return the exit code and the line to print. Without a "folder" the job makes the
    repository, which shows whether the token may write there. Raises what the client raises."""
    api = HfApi(token=True, library_name="hetero_framework", library_version=__version__)
    made = api.create_repo(job["repository"], private=job["private"], exist_ok=True)
    if job["must_be_private"] and not api.model_info(made.repo_id).private:
        why = "checkpoints name machines and folders, and are not uploaded into a public repository"
        return PUBLIC, f"{why}: make {made.repo_id} private in its settings on the hub"
    if job["folder"] is not None:
        if job["revision"] is not None:
            api.create_branch(made.repo_id, branch=job["revision"], exist_ok=True)
        api.upload_folder(
            repo_id=made.repo_id,
            folder_path=job["folder"],
            path_in_repo=job["path"] or None,
            revision=job["revision"],
            commit_message=job["message"],
            # Files of an earlier checkpoint, which may have had more stages.
            delete_patterns="*" if job["path"] else None,
        )
    return 0, f"{api.endpoint}/{made.repo_id}"


def main() -> int:
    watch_parent()
    try:
        code, text = upload(json.loads(sys.argv[1]))
    except Exception as error:  # of any kind: the run is told and goes on
        code, text = 1, f"{type(error).__name__}: {error}"
    print(_UNSAID.sub("...", " ".join(text.split()))[:400].rstrip("."), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
