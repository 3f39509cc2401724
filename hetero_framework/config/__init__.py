"""hetero_config.json: its schema, the plan in it, and loading a `Config` from a file."""

# ruff: noqa: F401  (what is imported here is what the package offers)

from hetero_framework.config.host_names import host_and_port, normal_host, split_address
from hetero_framework.config.load import (
    PLAN_FILE,
    apply_override,
    devices_of,
    json_schema,
    load_config,
    with_saved_plan,
)
from hetero_framework.config.plan import Plan, StageSpec, layers_text, process_name
from hetero_framework.config.schema import (
    AUTO,
    COORDINATOR_PORT,
    EVALUATED,
    LIGHTHOUSE_PORT,
    MOST_SOURCES,
    RESULT_DIRS,
    TOKEN_METRICS,
    WORKER_PORT,
    AdapterConfig,
    Config,
    CoordinatorConfig,
    DataConfig,
    Kind,
    Machine,
    ModelConfig,
    TrainingConfig,
    WireConfig,
    WorkerConfig,
    interval,
)
from hetero_framework.config.section import Section
