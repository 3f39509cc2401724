from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import closing
from itertools import accumulate
from pathlib import Path

import psutil
import pytest

from hetero_framework.cluster import oom_killer
from hetero_framework.cluster.child import environment
from hetero_framework.cluster.local_workers import MAX_DEATHS, LocalWorkers, RestartPolicy
from hetero_framework.config import Config
from hetero_framework.core.dial import Listener
from hetero_framework.core.timeouts import DEATHS_S
from hetero_framework.errors import ResourceError, UserError
from tests.unit.cluster.conftest import parent, stand_in
from tests.waiting import is_running, wait_until

STAND_IN = """
watch_parent((lambda: None) if behaviour == "stubborn" else None)
threads = os.environ["OMP_NUM_THREADS"]
print(f"hello from {options.worker_id} with {threads} threads", flush=True)
if behaviour.isdigit():
    sys.exit(int(behaviour))
if behaviour == "fail" and options.worker_id == "2":
    print("the reason", flush=True)
    sys.exit(6)
print(os.path.exists(options.config), options.base_dir, flush=True)
time.sleep(60)  # it is killed, or ends with its parent
"""


def local(config: Config, ids: tuple[int, ...], behaviour: str) -> LocalWorkers:
    return LocalWorkers(config, ids, program=stand_in(STAND_IN, behaviour))


@pytest.fixture
def started(config, stack):
    def start(behaviour: str, *ids: int) -> LocalWorkers:
        workers = stack.enter_context(local(config, ids or (1,), behaviour))
        workers.start()
        return workers

    return start


def ended(workers: LocalWorkers, worker: int = 1) -> LocalWorkers:
    wait_until(lambda: workers.exit_text(worker) is not None)
    return workers


def pids(workers: LocalWorkers) -> dict[int | str, int]:
    """Of the workers that run now."""
    found = {worker_id: child.process for worker_id, child in workers._children.items()}
    return {worker_id: p.pid for worker_id, p in found.items() if p.poll() is None}


def says_hello(log: Path) -> bool:
    return log.exists() and "True" in log.read_text(encoding="utf-8")


def test_workers_start_with_their_threads_and_stop(config, tmp_path, monkeypatch, logged):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with local(config, (1, 2), "wait") as workers:
        workers.start()
        first = pids(workers)
        assert set(first) == {1, 2}
        log = tmp_path / "out" / "logs" / "worker-2.log"
        wait_until(lambda: says_hello(log))
        said = f"hello from 2 with 2 threads\nTrue {tmp_path}\n"
        assert log.read_text(encoding="utf-8") == said
        workers.start()  # again: all are there
        assert pids(workers) == first
        assert workers.exit_text(1) is None
        assert logged == []  # who starts them early has no log yet
        workers.report()
    assert not any(psutil.pid_exists(pid) for pid in first.values())
    assert [note.split(":")[0] for note in logged] == ["worker 1", "worker 2"]


def test_a_worker_that_does_not_answer_is_killed(started):
    workers = started("stubborn")
    process = pids(workers)[1]
    assert workers.kill(1)
    assert not is_running(process)
    assert not workers.kill(2)  # not started here


SECRETS = """
AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN AZURE_CLIENT_SECRET AZURE_STORAGE_KEY
ANTHROPIC_AUTH COMET_API_KEY DAGSHUB_USER_TOKEN DATABASE_URL DATABRICKS_HOST DATABRICKS_TOKEN
CONDA_TOKEN GH_TOKEN GITHUB_TOKEN GOOGLE_APPLICATION_CREDENTIALS HETERO_API_KEY HF_API_TOKEN
HF_OIDC_ID_TOKEN HF_TOKEN HUGGINGFACE_TOKEN HUGGING_FACE_HUB_TOKEN KAGGLE_KEY LD_SECRET
MLFLOW_TRACKING_PASSWORD MY_PASSWORD NEPTUNE_API_TOKEN NVIDIA_API_KEY OPENAI_API_KEY PGPASSWORD
PYTHON_KEYRING_PASSWORD SLURM_JWT SSH_AUTH_SOCK VAULT_TOKEN WANDB_API_KEY XDG_SESSION_COOKIE
https_proxy HTTPS_PROXY all_proxy npm_config__auth
"""
NEEDED = """
PATH HOME USER LANG LC_ALL TZ TMPDIR TEMP XDG_CACHE_HOME VIRTUAL_ENV CONDA_PREFIX LD_LIBRARY_PATH
LD_PRELOAD DYLD_LIBRARY_PATH CC SYSTEMROOT APPDATA LOCALAPPDATA USERPROFILE PATHEXT COMSPEC
SSL_CERT_FILE REQUESTS_CA_BUNDLE PYTHONPATH PYTHONHASHSEED TORCHINDUCTOR_CACHE_DIR TORCH_LOGS
PYTORCH_CUDA_ALLOC_CONF PYTORCH_MPS_HIGH_WATERMARK_RATIO CUDA_VISIBLE_DEVICES
CUBLAS_WORKSPACE_CONFIG NVIDIA_TF32_OVERRIDE HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES
HSA_OVERRIDE_GFX_VERSION
ZE_AFFINITY_MASK OMP_NUM_THREADS MKL_NUM_THREADS KMP_AFFINITY GOMP_CPU_AFFINITY NCCL_SOCKET_IFNAME
TRITON_CACHE_DIR BNB_CUDA_VERSION HETERO_CACHE HETERO_DATA HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE
TRANSFORMERS_CACHE TOKENIZERS_PARALLELISM
"""


def test_children_get_what_they_need_and_no_secret(monkeypatch):
    secrets, needed = set(SECRETS.split()), set(NEEDED.split())
    for name in secrets | needed:
        monkeypatch.setenv(name, "x")
    got = environment(hub_token=False).keys()
    assert (got & secrets, needed - got) == (set(), set())
    of_hub = {"HF_TOKEN", "HF_OIDC_ID_TOKEN", "HUGGING_FACE_HUB_TOKEN"}
    of_hub |= {"https_proxy", "HTTPS_PROXY", "all_proxy"}
    assert environment(hub_token=True).keys() & secrets == of_hub


@pytest.mark.parametrize("of_hub", [False, True])
def test_workers_get_the_hubs_token_for_a_model_of_the_hub_alone(
    config, tmp_path, monkeypatch, of_hub
):
    for name in ("HF_TOKEN", "HF_OIDC_ID_TOKEN", "WANDB_API_KEY", "HF_HOME"):
        monkeypatch.setenv(name, "x")
    (tmp_path / "here").mkdir()
    config = config.with_changes(model={"name_or_path": "org/model" if of_hub else "here"})
    code = "import os; print('has', *sorted({'HF_TOKEN', 'HF_OIDC_ID_TOKEN', 'WANDB_API_KEY',"
    code += " 'HF_HOME'} & set(os.environ)), flush=True)"
    with LocalWorkers(config, (1,), program=[sys.executable, "-c", code]) as workers:
        workers.start()
        ended(workers)
    tokens = " HF_OIDC_ID_TOKEN HF_TOKEN" if of_hub else ""
    assert workers_log(config).read_text().split() == f"has HF_HOME{tokens}".split()


def test_worker_that_ends_is_reported_with_its_last_lines_and_replaced(started):
    workers = ended(started("fail", 1, 2), 2)
    end = workers.exit_text(2)
    assert end is not None
    assert end.startswith("worker 2 ended with exit code 6; the end of its log:\n")
    assert end.endswith("\n    the reason")
    first = pids(workers)[1]
    workers.start()
    assert pids(workers)[1] == first
    assert 2 in pids(workers) or workers.exit_text(2)


def test_killed_worker_is_reported_with_its_signal(started):
    workers = started("wait")
    psutil.Process(pids(workers)[1]).kill()
    said = str(ended(workers).exit_text(1))
    if os.name != "nt":
        assert "signal SIGKILL" in said
        if oom_killer.out_of_memory_kills() is not None:
            assert "the kernel reports no such kill" in said


def test_worker_that_is_just_ending_is_waited_for(started):
    """Its links break before its exit code can be read."""
    workers = started("fail", 1, 2)
    assert "exit code 6" in (workers.exit_text(2, 30.0) or "")
    assert workers.exit_text(1, 0.05) is None


def test_worker_that_already_listens_is_used(config, logged):
    listener = Listener("127.0.0.1", config.worker(1).port)
    with closing(listener), local(config, (1, 2), "wait") as workers:
        workers.start()  # early, and again when the run reaches for its workers
        workers.start()
        assert set(pids(workers)) == {2}
        workers.report()
    assert [note.split(":")[0] for note in logged] == ["worker 1", "worker 2"]
    assert f"already listens at 127.0.0.1:{config.worker(1).port}; using it" in logged[0]


@pytest.mark.parametrize("way", ["killed", "found its port in use"])
def test_worker_whose_place_another_process_has_taken_is_not_started_again(
    way, config, started, logged
):
    """Somebody has started it by hand meanwhile; both would want one port."""
    workers = started("wait" if way == "killed" else str(UserError.exit_code))
    if way == "killed":
        psutil.Process(pids(workers)[1]).kill()
    ended(workers)
    with closing(Listener("127.0.0.1", config.worker(1).port)):
        workers.revive(1, threading.Event())
    assert not workers.starts(1)
    assert logged == [f"worker 1: something listens at {config.worker(1).address}; using it"]
    workers.revive(1, threading.Event())  # who has started it starts it again
    assert not workers.starts(1)


def test_worker_starts_once_that_of_another_session_is_gone(config):
    listener = Listener("127.0.0.1", config.worker(1).port)
    with local(config, (1,), "wait") as workers:
        workers.start()
        workers.start_missing(1)
        assert not workers.starts(1)
        listener.close()
        workers.start_missing(1)
        assert workers.starts(1)


def test_worker_that_another_one_answered_for_is_forgotten(started):
    """Both were started at once, and the other one had the port first; then it died."""
    workers = ended(started(str(UserError.exit_code)))
    workers.answers(1)
    workers.revive(1, threading.Event())
    assert not workers.starts(1)


def test_worker_that_had_no_port_for_a_while_is_started_again(started):
    workers = ended(started(str(UserError.exit_code)))
    first = workers._children[1].process.pid
    workers.revive(1, threading.Event())
    assert workers._children[1].process.pid != first


@pytest.mark.parametrize(
    ("code", "told"), [(75, True), (0, False), (1, False), (2, False), (6, False)]
)
def test_worker_that_was_told_to_end_is_known_by_its_exit_code(code, told, started):
    assert ended(started(str(code))).was_told_to_end(1) is told


def test_stubborn_worker_is_killed_after_the_grace(config, started):
    workers = started("stubborn")
    pid = pids(workers)[1]
    wait_until(lambda: says_hello(workers_log(config)))
    workers.stop(grace_s=0.2)
    assert not psutil.pid_exists(pid)
    workers.stop()


def workers_log(config: Config) -> Path:
    return config.output_dir / "logs" / "worker-1.log"


PARENT = """
import json, sys, time
from hetero_framework.config import Config
from hetero_framework.cluster.local_workers import LocalWorkers
raw, base, program = json.loads(sys.argv[1])
workers = LocalWorkers(Config.from_dict(raw, base), (1, 2), program=program)
workers.start()
print(*(c.process.pid for c in workers._children.values()), flush=True)
time.sleep(60)  # it is killed
"""


def test_workers_end_when_their_parent_is_killed(config, tmp_path):
    with parent(PARENT, config, stand_in(STAND_IN, "wait"), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        started = [int(pid) for pid in process.stdout.readline().split()]
        assert len(started) == 2
        wait_until(lambda: says_hello(workers_log(config)))
        process.kill()
    wait_until(lambda: not any(is_running(pid) for pid in started))


def test_ctrl_c_reaches_the_parent_alone(started):
    workers = started("wait")
    if os.name != "nt":
        assert os.getpgid(pids(workers)[1]) != os.getpgid(0)


def test_program_that_cannot_be_started_is_a_resource_error(config):
    workers = LocalWorkers(config, (1,), program=["/does/not/exist"])
    with pytest.raises(ResourceError, match="cannot start the workers"):
        workers.start()


# ---- when a dead worker is started again


def pauses(*deaths_s: float) -> list[float | None]:
    policy = RestartPolicy()
    return [policy.died(at) for at in deaths_s]


def test_the_first_restart_is_at_once_and_the_next_ones_wait_longer():
    assert pauses(100.0, 101.0, 103.0, 106.0) == [0.0, 1.0, 2.0, 4.0]


@pytest.mark.parametrize("between_s", [0.0, 1.0, DEATHS_S / (MAX_DEATHS - 1)])
def test_five_deaths_within_ten_minutes_are_too_many(between_s):
    found = pauses(*(7.0 + between_s * k for k in range(5)))
    assert None not in found[:4]
    assert found[4] is None


def test_further_deaths_after_too_many_are_too_many():
    assert pauses(*([1.0] * 7))[4:] == [None] * 3


def test_rarer_deaths_are_never_too_many_and_cost_short_pauses_only():
    """As where a machine loses its worker every few minutes, for days."""
    found = pauses(*(160.0 * k for k in range(2000)))
    assert found[:4] == [0.0, 1.0, 2.0, 4.0]
    assert set(found[4:]) == {4.0}


def test_ten_minutes_without_a_death_begin_anew():
    times = accumulate([0.0, 1.0, 1.0, DEATHS_S + 1.0, 1.0])
    assert pauses(*times) == [0.0, 1.0, 2.0, 0.0, 1.0]
