"""`hetero serve`: the tinker client trains and samples over the machines of a plan."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from typing import Any

from hetero_framework import log
from hetero_framework.commands.options import (
    ACCESS,
    CONFIG,
    IMPORT,
    ROLE_HELP,
    access_for,
    at_least,
    check_coordinator,
    key_directory,
    load,
    option,
    value,
)
from hetero_framework.core.addresses import LOOPBACK
from hetero_framework.errors import ConfigError, DeviceError

EXAMPLES = """
    hetero serve --config cluster.json
    hetero serve --config cluster.json --port 8000
    hetero serve --config cluster.json --host 192.168.1.10
    """
OPTIONS = (
    *CONFIG,
    value("--host", "NAME", "listen at this address of this machine, over TLS", default=LOOPBACK),
    value("--port", "N", "default: 8321", type=at_least(1), default=8321),
    option("--role", choices=("coordinator",), help=ROLE_HELP),
    *ACCESS,
    IMPORT,
)


def run(arguments: argparse.Namespace) -> None:
    if find_spec("tinker") is None:
        hint = "pip install hetero-framework[tinker]"
        raise DeviceError("hetero serve needs the client's package, tinker", hint=hint)
    config = load(arguments)
    config.require("model")
    check_coordinator(config, arguments)
    serve(config, arguments)


def serve(config: Any, arguments: argparse.Namespace) -> None:
    """Answer clients until a signal."""
    from importlib.metadata import version

    from hetero_framework.cluster.run_id import run_id_of
    from hetero_framework.core import failpoints
    from hetero_framework.extras.tinker.called_model import CalledModel, cluster_for, prepared
    from hetero_framework.extras.tinker.endpoint import Endpoint, encryption_for, key_in
    from hetero_framework.extras.tinker.service import KNOWN_VERSIONS, Service
    from hetero_framework.trainer.checkpoint import CheckpointStore
    from hetero_framework.trainer.outputs import RunDirectories
    from hetero_framework.trainer.signals import StopRequest

    if not (have := version("tinker")).startswith(KNOWN_VERSIONS):
        raise ConfigError(f"tinker {have} is installed; known are {', '.join(KNOWN_VERSIONS)}*")
    config, source = prepared(config)
    stop, folder, host = StopRequest(), config.output_dir, arguments.host
    encryption, trusted = None, ""
    if host != LOOPBACK:
        encryption, file = encryption_for(host, key_directory(arguments), folder)
        trusted = f" SSL_CERT_FILE={file}"
    directories = RunDirectories(config, CheckpointStore(config.checkpoints))
    access = access_for(config, "local", arguments)
    made = cluster_for(config, source, access, run_id_of(folder))
    lines = log.FileLines(folder / "logs" / "coordinator.log")
    events = log.Events(folder / log.EVENTS_FILE, "coordinator")
    logged = log.log_to(config.training.log_level, log.Lines(log.to_stderr), lines, events)
    with failpoints.armed("coordinator"), stop, directories, logged, made as cluster:
        events.open()
        model = CalledModel(config, cluster, source)
        service = Service(model, config.model.name_or_path, folder)
        service.resume()
        door = Endpoint(service, key_in(folder), arguments.port, host, encryption)
        with door as endpoint, stop.waiting():
            address = f"TINKER_BASE_URL={endpoint.address} TINKER_API_KEY={endpoint.key}"
            print(f"export {address}{trusted}", flush=True)
            service.run(lambda: stop.requested is not None)
