from __future__ import annotations

import errno
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hetero_framework import cli, registry
from hetero_framework.cluster.local_workers import LocalWorkers
from hetero_framework.commands import check, diagnosis, schema
from hetero_framework.config import Config, load_config
from hetero_framework.errors import (
    ConfigError,
    NetworkError,
    NumericError,
    PeerLostError,
    ResourceError,
    StoppedEarly,
    UserError,
)
from hetero_framework.security.access import LOOPBACK_ONLY
from tests.installed import needs
from tests.samples import module_of

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = tuple(registry.names("commands"))
SEED: dict[str, Any] = {
    "coordinator": {"ip": "127.0.0.1"},
    "workers": [{"id": 1, "ip": "127.0.0.1", "port": 29511}],
    "shard_plan": [{"id": "local", "start": 0, "end": 1}, {"id": 1, "start": 1, "end": 2}],
}


def run_process(
    *arguments: str, cwd: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **environment},
        timeout=120,
        check=False,
    )


@pytest.fixture
def config_file(tmp_path):
    file = tmp_path / "c.json"
    file.write_text(json.dumps(SEED), encoding="utf-8")
    return file


def test_the_list_of_commands_imports_none_of_them():
    """Nor configuration and pydantic, which take as long to import as Python to start."""
    program = (
        "import sys, contextlib\n"
        "import hetero_framework.cli as cli\n"
        "with contextlib.suppress(SystemExit):\n"
        "    cli.main(['--help'])\n"
        "parts = {name.partition('.')[0] for name in sys.modules}\n"
        "found = parts & {'pydantic', 'torch', 'cryptography'}\n"
        "found |= {name for name in sys.modules if name.startswith('hetero_framework.commands.')}\n"
        "found.discard('hetero_framework.commands.options')\n"
        "sys.exit(str(found) if found else 0)\n"
    )
    done = run_process("-c", program)
    assert done.returncode == 0, done.stderr


def test_help_and_schema_do_not_import_torch():
    program = (
        "import sys, contextlib, io\n"
        "import hetero_framework, hetero_framework.config, hetero_framework.cli as cli\n"
        "import hetero_framework.cluster.roles, hetero_framework.commands.init\n"
        "commands = [[], ['--help'], ['schema']] + [[c, '--help'] for c in sys.argv[1:]]\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    for command in commands:\n"
        "        with contextlib.suppress(SystemExit):\n"
        "            cli.main(command)\n"
        "heavy = {'torch', 'transformers', 'peft', 'datasets', 'rich'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)\n"
    )
    done = run_process("-c", program, *COMMANDS)
    assert done.returncode == 0, done.stderr


def test_supervised_worker_reads_its_life_line_after_the_imports(config_file):
    """On Windows a library that looks at standard input while it is loaded would wait for ever."""
    program = (
        "import os, sys\n"
        "from hetero_framework import cli\n"
        "from hetero_framework.cluster import child\n"
        "def watch(**_):\n"
        "    os._exit(0 if {'torch', 'numpy', 'transformers'} <= set(sys.modules) else 1)\n"
        "child.watch_parent = watch\n"
        "cli.main(['worker', '--supervised', '--worker-id', '1', '--config', sys.argv[1]])\n"
    )
    done = run_process("-c", program, str(config_file))
    assert done.returncode == 0, done.stderr


def test_a_run_imports_peft_for_adapters_only_and_no_datasets():
    """They bring bitsandbytes, torch's compiler and pandas: half of what torch itself takes."""
    program = (
        "import sys\n"
        "import hetero_framework.cluster.worker, hetero_framework.commands.check_report\n"
        "import hetero_framework.trainer.coordinator\n"
        "from hetero_framework.config import TrainingConfig\n"
        "from hetero_framework.config.optimizers import check_optimizer\n"
        "from hetero_framework.engine.optimizer import build_optimizer\n"
        "from torch.nn import Linear\n"
        "check_optimizer(TrainingConfig())\n"
        "model = Linear(1, 1)\n"
        "build_optimizer(TrainingConfig(), model, list(model.parameters()))\n"
        "slow = {'peft', 'bitsandbytes', 'datasets', 'pandas', 'pyarrow', 'tensorboard'}\n"
        "slow |= {'transformers.trainer', 'torch._inductor.compile_fx'}\n"
        "found = slow & set(sys.modules)\n"
        "import hetero_framework.models.adapters.lora\n"
        "found |= {'datasets', 'torch._inductor.compile_fx'} & set(sys.modules)\n"
        "sys.exit(f'imported: {found}' if found else 0)\n"
    )
    done = run_process("-c", program)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command_has_examples(command, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert f"examples:\n  hetero {command}" in text
    assert "--debug" in text


def test_module_runs_as_a_program_on_a_bare_terminal():
    done = run_process("-m", "hetero_framework", "--help", COLUMNS="1", NO_COLOR="1", TERM="dumb")
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert all(command in done.stdout.replace("\n", "") for command in COMMANDS)


@pytest.mark.parametrize("command", ["check", "train", "worker"])
def test_user_error_is_one_message_and_exit_code_2(command, tmp_path, capsys):
    assert cli.main([command, "--config", str(tmp_path / "absent.json")]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("hetero: error: configuration file ")
    assert "Traceback" not in captured.err
    assert len(captured.err.splitlines()) == 2


def test_unknown_option_prints_the_usage_of_its_command(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["check", "--confg", "x.json"])
    assert ended.value.code == 2
    text = capsys.readouterr().err
    assert text.startswith("usage: hetero check")
    assert "hetero check: error: unrecognized arguments: --confg x.json" in text
    with pytest.raises(SystemExit):
        cli.main(["check", "runs/first"])
    assert "runs/first; did you mean --config runs/first?" in capsys.readouterr().err


def test_option_in_front_of_its_command_is_told_where_it_goes(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--debug", "check"])
    assert ended.value.code == 2
    assert "--debug goes after the command: hetero check --debug" in capsys.readouterr().err


def test_host_name_with_an_empty_label_is_refused_before_anything_starts(config_file, capsys):
    wrong = ["--set", "workers[0].ip=box..lan"]
    assert cli.main(["check", "--config", str(config_file), *wrong]) == 2
    assert 'workers[0].ip: "box..lan" is neither an IP address' in capsys.readouterr().err


def test_a_run_into_its_base_model_is_refused_before_anything_starts(config_file, tmp_path, capsys):
    base = tmp_path / "base"
    base.mkdir()
    settings = [f"model.name_or_path={base}", "data.train=x.jsonl", f"training.output_dir={base}"]
    options = [word for setting in settings for word in ("--set", setting)]
    assert cli.main(["train", "--config", str(config_file), "--role", "coordinator", *options]) == 2
    assert "the directory of its base model" in capsys.readouterr().err
    assert not list(base.iterdir())


def test_debug_shows_the_traceback(tmp_path, capsys):
    assert cli.main(["check", "--debug", "--config", str(tmp_path / "absent.json")]) == 2
    captured = capsys.readouterr()
    assert "Traceback" in captured.err
    assert "hetero: error: configuration file" in captured.err


class FakeOutOfMemoryError(RuntimeError):
    """Stands for torch.OutOfMemoryError, which is recognised by its name."""


FakeOutOfMemoryError.__name__ = "OutOfMemoryError"


@pytest.mark.parametrize(
    ("error", "code", "start"),
    [
        (NetworkError("no way", hint="try"), 2, "hetero: error: no way\n  try"),
        (PeerLostError("worker 1 is gone"), 4, "hetero: error: worker 1 is gone"),
        (NumericError("nan"), 5, "hetero: error: nan"),
        (ResourceError("full"), 6, "hetero: error: full"),
        (StoppedEarly("stopped by SIGINT after step 3"), 75, "hetero: stopped: by SIGINT after"),
        (KeyboardInterrupt(), 130, "hetero: error: interrupted"),
        (MemoryError(), 6, "hetero: error: memory ran out: MemoryError"),
        (FakeOutOfMemoryError("CUDA out of memory. Tried"), 6, "hetero: error: memory ran out: CU"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
            6,
            "hetero: error: memory ran out: [enforce",
        ),
        (OSError(errno.ENOSPC, "No space", "/x"), 6, "hetero: error: the disk is full (/x)"),
        (RuntimeError("odd"), 1, "hetero: error: RuntimeError: odd\n  This is a bug"),
        (OSError(errno.EIO, "broken"), 1, "hetero: error: OSError: "),
    ],
)
def test_errors_become_exit_codes(error, code, start, config_file, monkeypatch, capsys):
    def fail(arguments: Any) -> int:
        raise error

    monkeypatch.setattr(check, "run", fail)
    assert cli.main(["check"]) == code
    captured = capsys.readouterr().err
    assert captured.startswith(start)
    assert "Traceback" not in captured


def test_message_fits_on_one_screen(monkeypatch, capsys):
    def fail(arguments: Any) -> int:
        raise NetworkError("\n".join("line" for _ in range(500)))

    monkeypatch.setattr(schema, "run", fail)
    assert cli.main(["schema"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 40


def test_closed_pipe_is_quiet():
    program = (
        "import subprocess, sys\n"
        "command = [sys.executable, '-m', 'hetero_framework', 'schema']\n"
        "pipe = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)\n"
        "pipe.stdout.close()\n"
        "error = pipe.stderr.read()\n"
        "sys.exit((pipe.wait() != 0) or bool(error))\n"
    )
    assert run_process("-c", program).returncode == 0


def test_schema_is_json_schema_that_accepts_the_shipped_configuration(capsys):
    assert cli.main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["$schema"].endswith("2020-12/schema")
    shipped = json.loads((ROOT / "hetero_config.json").read_text(encoding="utf-8"))
    assert set(shipped) <= set(schema["properties"])
    assert set(schema["required"]) == {"coordinator", "shard_plan"}


def test_init_without_questions_writes_a_valid_file(tmp_path, capsys):
    output = tmp_path / "c.json"
    options = ["--non-interactive", "--layers", "8", "--worker", "[::1]:9999", "--adapter", "none"]
    assert cli.main(["init", *options, "--output", str(output)]) == 0
    assert "next: hetero check" in capsys.readouterr().out
    raw = json.loads(output.read_text(encoding="utf-8"))
    assert raw["workers"][0] == {"id": 1, "ip": "::1", "port": 9999, "device": "auto"}
    assert cli.main(["init", *options, "--output", str(output)]) == 2


def test_wizard_script_is_the_init_command():
    done = run_process("init_config.py", "--help", PYTHONPATH=str(ROOT))
    assert done.returncode == 0
    assert "hetero init" in done.stdout


def test_interrupted_wizard_has_no_traceback(monkeypatch, tmp_path, capsys):
    def interrupt(prompt: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupt)
    assert cli.main(["init", "--output", str(tmp_path / "c.json")]) == 130
    said = capsys.readouterr()
    assert said.err == "hetero: error: interrupted\n"
    assert said.out.endswith("\n\n")  # below the question, not behind it
    assert list(tmp_path.iterdir()) == []


def test_train_runs_the_coordinator_with_the_options(config_file, monkeypatch, tmp_path, capsys):
    import hetero_framework.trainer.coordinator as coordinator

    calls: list[Any] = []
    monkeypatch.setattr(coordinator, "train", lambda config, **given: calls.append((config, given)))
    monkeypatch.setattr(LocalWorkers, "start", lambda workers: calls.append(workers))
    monkeypatch.chdir(tmp_path)
    needed = {"model": {"name_or_path": "m"}, "data": {"train": "d"}}
    config_file.write_text(json.dumps({**SEED, **needed}), encoding="utf-8")
    options = ["--resume", "latest", "--output-dir", "here", "--set", "training.seed=7"]
    assert cli.main(["train", "--config", str(config_file), *options]) == 0
    workers, (config, given) = calls  # the workers are on their way before anything is imported
    usual = {"access": LOOPBACK_ONLY, "fresh": False, "replan": False, "debug": False}
    usual["islands"] = None
    assert given == {"resume": "latest", "workers": workers, **usual}
    assert "torch and transformers are loaded now" in capsys.readouterr().err
    assert config.output_dir == tmp_path / "here"
    assert config.training.seed == 7


def test_ctrl_c_while_the_libraries_are_imported_waits_for_no_worker(config_file, monkeypatch):
    """The workers import them too, and hear of the end only afterwards."""
    import hetero_framework.trainer.coordinator as coordinator

    def interrupt(config: Any, **given: Any) -> None:
        raise KeyboardInterrupt

    graces: list[float | None] = []
    monkeypatch.setattr(coordinator, "train", interrupt)
    monkeypatch.setattr(LocalWorkers, "start", lambda workers: None)
    monkeypatch.setattr(LocalWorkers, "stop", lambda workers, grace=None: graces.append(grace))
    needed = {"model": {"name_or_path": "m"}, "data": {"train": "d"}}
    config_file.write_text(json.dumps({**SEED, **needed}), encoding="utf-8")
    assert cli.main(["train", "--config", str(config_file)]) == 75
    assert graces == [0.0, None]


def test_train_on_a_workers_machine_serves_that_worker(config_file, monkeypatch):
    from hetero_framework.cluster import local_workers

    calls: list[Any] = []

    def run_workers(config: Any, ids: Any, **options: Any) -> int:
        calls.append((ids, options["keep"]))
        return 75

    monkeypatch.setattr(local_workers, "run_workers", run_workers)
    assert cli.main(["train", "--config", str(config_file), "--worker-id", "1"]) == 75
    assert cli.main(["worker", "--keep", "--config", str(config_file)]) == 75
    assert calls == [((1,), False), ((1,), True)]
    assert cli.main(["train", "--config", str(config_file), "--worker-id", "5"]) == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--resume", "0"],
        ["train", "--resume", "x"],
        ["verify", "--cuts", "5,2"],
        ["check", "--show", "0"],
        ["check", "--show", "many"],
        ["check", "--show", "1.5"],
    ],
)
def test_wrong_option_values_are_refused(arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2


@needs("verify")
@pytest.mark.parametrize(
    "options",
    [
        ["--all", "--config", "a.json"],
        ["--model-type", "llama", "--config", "a.json"],
        ["--all", "--model-type", "llama"],
        ["--all", "--cuts", "1"],
        ["--model-type", "llama", "--output", "a.md"],
        ["--all", "--objective", "reward"],
    ],
)
def test_verify_takes_one_model_or_all(options, capsys):
    assert cli.main(["verify", *options]) == 2
    assert re.search(r"give only one of|goes with", capsys.readouterr().err)


@needs("observe")
def test_diagram_prints_mermaid(config_file, capsys):
    assert cli.main(["diagram", "--config", str(config_file), "--output", "-"]) == 0
    assert capsys.readouterr().out.startswith("flowchart")
    wrong = ["diagram", "--config", str(config_file), "--output", "-", "--format", "png"]
    assert cli.main(wrong) == 2


@needs("planner")
def test_measuring_is_for_the_coordinators_machine(tmp_path, capsys):
    raw = {**SEED, "coordinator": {"ip": "192.0.2.7"}}
    raw["workers"] = [{"id": 1, "ip": "192.0.2.8", "port": 29511, "hostname": socket.gethostname()}]
    file = tmp_path / "c.json"
    file.write_text(json.dumps(raw), encoding="utf-8")
    assert cli.main(["plan", "--measure", "--config", str(file)]) == 2
    shown = capsys.readouterr().err
    assert "this machine is worker 1; hetero plan runs on the coordinator's" in shown


def test_doctor_reports_devices(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["devices"][-1]["name"] == "cpu"
    assert found["devices"][-1]["dtypes"]["float32"]["ok"]
    assert found["attention"]["sdpa"]["ok"]
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "device cpu: " in text
    assert "graphviz: " in text


@needs("observe")
def test_demo_scripts_start(tmp_path):
    picture = tmp_path / "a.mmd"
    environment = {"PYTHONPATH": str(ROOT)}
    done = run_process("examples/demo_real.py", "--output", str(picture), **environment)
    assert done.returncode == 0, done.stderr
    assert "flowchart" in picture.read_text(encoding="utf-8")
    script = str(ROOT / "examples" / "demo_real.py")
    for form in ("svg", "mmd"):  # beside nothing of the user's
        done = run_process(script, "--format", form, cwd=tmp_path, **environment)
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "runs" / "diagram" / f"architecture.{form}").is_file()
    assert not list(tmp_path.glob("architecture.*"))
    done = run_process("examples/demo_llama8b4bit_distributed.py", "--help", **environment)
    assert "--model DIR" in done.stdout
    assert done.returncode == 0
    done = run_process("examples/train.py", "--config", "absent.json", **environment)
    assert done.returncode == 2


def test_llama_demo_takes_another_model_and_cuts_it_over_the_same_machines(tmp_path):
    demo = module_of(ROOT / "examples" / "demo_llama8b4bit_distributed.py")
    settings = {"model_type": "llama", "num_hidden_layers": 5, "hidden_size": 8}
    settings.update(num_attention_heads=2, intermediate_size=8, vocab_size=16)
    (tmp_path / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    overrides = demo.settings(str(tmp_path), str(tmp_path / "config.json"))
    config = load_config(demo.CONFIG, [text.removeprefix("--set=") for text in overrides])
    assert [(s.owner, s.start, s.end) for s in config.plan.stages] == [
        ("local", 0, 1),
        (1, 1, 3),
        (2, 3, 5),
    ]
    assert config.model.name_or_path == str(tmp_path)
    assert demo.settings(None, None) == []


def test_text_of_a_file_does_not_steer_the_terminal(monkeypatch, capsys):
    import hetero_framework.commands.machine_report as doctor

    monkeypatch.setattr(doctor, "examine", dict)
    monkeypatch.setattr(doctor, "text", lambda found: "one\ntwo \x1b[2J\u202e")
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().out == "one\ntwo \\x1b[2J\\u202e\n"

    def fail() -> None:
        raise UserError("a\x1b]0;b\x07" + "c" * 5000, hint="d\x1b[2J")

    monkeypatch.setattr(doctor, "examine", fail)
    assert cli.main(["doctor"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(r"hetero: error: a\x1b]0;b\x07ccc")
    assert "\x1b" not in shown
    assert len(shown) < 1200


@needs("observe")
def test_a_tilde_that_the_shell_leaves_is_expanded(tmp_path, monkeypatch, config_file):
    """No shell replaces the ~ of --output=~/x."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert cli.main(["diagram", "--config=~/c.json", "--output=~/a.mmd"]) == 0
    assert (tmp_path / "a.mmd").is_file()


@needs("foreign_formats")
def test_what_no_extra_here_has_is_told_in_one_sentence():
    with pytest.raises(ConfigError, match="--gguf needs an extra that this installation lacks"):
        registry.needed("conversions", "nothing", "--gguf")
    assert registry.needed("conversions", "gguf", "--gguf").__name__ == "convert_to_gguf"


def test_doctor_asks_the_extras(tmp_path, monkeypatch):
    mine = lambda view: [ConfigError("a", hint="b")]  # noqa: E731
    monkeypatch.setitem(registry._registered, ("findings", "mine"), (mine, {}))
    config = Config.from_dict(
        {"coordinator": {"ip": "127.0.0.1"}, "shard_plan": [{"id": "local", "start": 0, "end": 2}]},
        tmp_path,
    )
    assert {"check": "mine", "what": "a", "fix": "b"} in diagnosis.diagnose(config)["findings"]
