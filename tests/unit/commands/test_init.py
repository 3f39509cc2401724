from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trl import DPOConfig, KTOConfig, RewardConfig

from hetero_framework.cli import main
from hetero_framework.commands.init import (
    Address,
    Answers,
    parse_address,
    propose,
    run_wizard,
    split_layers,
    write_config,
)
from hetero_framework.config import Config, load_config
from hetero_framework.errors import ConfigError, DataError, UserError
from hetero_framework.models.cut.tiny import tiny_config
from tests.installed import needs
from tests.samples import save_llama
from tests.unit.data_helpers import CHATML, tiny_tokenizer


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("box", Address("box")),
        ("box:9000", Address("box", 9000)),
        ("box:9000:cuda:1", Address("box", 9000, "cuda:1")),
        ("10.0.0.2:9000:mps", Address("10.0.0.2", 9000, "mps")),
        ("[::1]:9999", Address("::1", 9999)),
        ("[fd00::2]:9999:cuda:0", Address("fd00::2", 9999, "cuda:0")),
        ("[::1]", Address("::1")),
        ("fd00::2", Address("fd00::2")),
        ("laptop:-", Address("laptop", dials=True)),
        ("[fd00::2]:-:mps", Address("fd00::2", device="mps", dials=True)),
    ],
)
def test_address_is_taken_apart(text, expected):
    assert parse_address(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "box:port", "box:0", "box:70000", "[::1", "[::1]9999", "a b:1", "box:1:gpu", "box:²"],
)
def test_wrong_address_is_refused(text):
    with pytest.raises(UserError):
        parse_address(text)


@pytest.mark.parametrize(
    ("layers", "machines", "sizes"),
    [
        (32, 1, [32]),
        (32, 2, [16, 16]),
        (32, 3, [10, 11, 11]),
        (31, 3, [10, 10, 11]),
        (2, 3, [0, 1, 1]),
        (1, 2, [0, 1]),
    ],
)
def test_layers_are_split_evenly_with_fewer_on_the_coordinator(layers, machines, sizes):
    ranges = split_layers(layers, machines)
    assert [end - start for start, end in ranges] == sizes
    assert ranges[0][0] == 0
    assert ranges[-1][1] == layers
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))


def test_more_workers_than_layers_are_refused():
    with pytest.raises(UserError, match="2 layers are too few for 3 workers"):
        split_layers(2, 4)


def proposed(**answers: Any) -> dict[str, Any]:
    return propose(Answers(**answers), 6, hostname="desk", own_address="10.0.0.1")


def test_proposal_for_this_machine_alone_uses_loopback():
    raw = proposed(workers=["localhost", "127.0.0.1:29501", "localhost"])
    Config.from_dict(raw)
    assert raw["coordinator"]["ip"] == "127.0.0.1"
    assert [w["port"] for w in raw["workers"]] == [9999, 29501, 10000]


def test_proposal_for_several_machines_uses_this_machines_address():
    raw = proposed(workers=["10.0.0.2:9999:cuda:0", "[fd00::2]:9999"], model="m", data="d.jsonl")
    config = Config.from_dict(raw)
    assert (config.coordinator.hostname, config.coordinator.ip) == ("desk", "10.0.0.1")
    assert config.workers[0].device == "cuda:0"
    assert config.workers[1].ip == "fd00::2"
    assert config.plan.stages[-1].end == 6
    assert config.warnings() == ()


def test_worker_that_dials_gets_no_port():
    [entry, other] = proposed(workers=["laptop:-:mps", "box"])["workers"]
    assert entry == {"id": 1, "ip": "laptop", "device": "mps"}
    assert other["port"] == 9999


def test_proposal_with_another_coordinator():
    raw = proposed(workers=["10.0.0.2"], coordinator="10.0.0.9:9000:cpu")
    assert raw["coordinator"] == {"ip": "10.0.0.9", "port": 9000, "device": "cpu"}


@needs("islands")
def test_proposal_for_an_island_names_it_and_its_lighthouse():
    config = Config.from_dict(proposed(island="garage", lighthouse="10.0.0.9:7"))
    assert (config.island.name, config.island.lighthouse) == ("garage", "10.0.0.9:7")
    assert config.coordinator.ip == "10.0.0.1"  # where the other islands reach it
    raw = proposed(island="attic")
    assert raw["island"]["lighthouse"] == "127.0.0.1:29510"
    assert raw["coordinator"]["ip"] == "127.0.0.1"
    assert "island" not in proposed()
    with pytest.raises(UserError, match="--lighthouse HOST:PORT goes with --island NAME"):
        proposed(lighthouse="10.0.0.9:7")
    with pytest.raises(UserError, match=r"--lighthouse: .* has no port"):
        proposed(island="garage", lighthouse="10.0.0.9")
    with pytest.raises(ConfigError, match="names the lighthouse"):
        Config.from_dict(proposed(island="lighthouse"))


@pytest.mark.parametrize(
    ("adapter", "quantization", "has_adapter"),
    [(None, None, True), ("lora", None, True), ("qlora", "nf4", True), ("none", None, False)],
)
def test_proposal_follows_the_adapter(adapter, quantization, has_adapter):
    config = Config.from_dict(proposed(model="m", adapter=adapter))
    assert config.model.quantization == quantization
    assert (config.adapter is not None) == has_adapter


def test_machines_without_4_bits_are_in_full_precision(tmp_path):
    machines = ["old:9999:musa", "mac:9999:mps"]
    raw = proposed(model="m", adapter="qlora", workers=machines)
    assert [w.get("quantization") for w in raw["workers"]] == ["none", None]
    assert "quantization" not in proposed(model="m", workers=machines)["workers"][0]
    answers = Answers(model="org/m", layers=2, adapter="qlora", workers=["old:1:musa"])
    with pytest.raises(UserError, match="no machine of these has 4 bits"):
        write_config(replace(answers, coordinator="desk:2:musa"), tmp_path / "c.json")
    assert not (tmp_path / "c.json").exists()


def test_checkpointing_is_left_to_the_memory():
    assert proposed()["training"]["gradient_checkpointing"] == "auto"


def test_existing_file_is_kept_without_force(tmp_path):
    output = tmp_path / "hetero_config.json"
    output.write_text("precious", encoding="utf-8")
    with pytest.raises(UserError, match="exists already"):
        write_config(Answers(layers=4), output)
    assert output.read_text(encoding="utf-8") == "precious"
    write_config(Answers(layers=4), output, force=True)
    assert load_config(output).plan.stages[0].end == 4
    assert [file.name for file in tmp_path.iterdir()] == ["hetero_config.json"]


def test_number_of_layers_is_read_from_the_model(tmp_path):
    model = tmp_path / "sub" / "model"
    model.mkdir(parents=True)
    settings = {"model_type": "llama", "num_hidden_layers": 7, "hidden_size": 8}
    settings.update(num_attention_heads=2, intermediate_size=8, vocab_size=16)
    (model / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    config = write_config(Answers(model=str(model), workers=["localhost"]), tmp_path / "c.json")
    assert [(s.start, s.end) for s in config.plan.stages] == [(0, 3), (3, 7)]
    assert config.model.name_or_path == "sub/model"  # as the file has to write it
    with pytest.raises(UserError, match="--layers 6: the model has 7"):
        write_config(Answers(model=str(model), layers=6), tmp_path / "d.json")


def test_unknown_number_of_layers_asks_for_it(tmp_path):
    with pytest.raises(UserError, match=r"number of layers is not known\n.*--layers"):
        write_config(Answers(workers=["localhost"]), tmp_path / "c.json")
    with pytest.raises(UserError, match="at least one layer"):
        write_config(Answers(layers=0), tmp_path / "c.json")


def test_file_that_cannot_be_written_is_a_user_error(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(UserError, match="cannot write"):
        write_config(Answers(layers=4), tmp_path / "file" / "c.json")


def replies(*lines: str) -> Callable[[str], str]:
    waiting: Iterator[str] = iter(lines)

    def ask(prompt: str) -> str:
        try:
            return next(waiting)
        except StopIteration:
            raise EOFError from None

    return ask


ALL = Answers("m", ["localhost"], None, None, 4, "lora", "d", val_set_size=0, objective="sft")
"""An answer to each question of the wizard."""


@needs("chains", "classification")
def test_wizard_asks_again_after_a_wrong_answer(tmp_path):
    output = tmp_path / "c.json"
    said: list[str] = []
    ask = replies(
        "", "train.jsonl", "some/data", "half", "1.5", "0.1", "ppo", "sequential", "reward",
        "./absent-model", "absent/model", "absent/typo", "", "gpu", "cpu", "box:port",
        "10.0.0.2 10.0.0.3:9000:mps", "lara", "none",
    )  # fmt: skip
    run_wizard(Answers(), output, ask=ask, say=said.append)
    config = load_config(output)
    assert [w.ip for w in config.workers] == ["10.0.0.2", "10.0.0.3"]
    assert config.adapter is None
    assert config.coordinator.device == "cpu"
    assert config.model.name_or_path == "absent/typo"
    assert (config.data.val_set_size, config.training.evaluation) == (0.1, "steps")
    assert not config.is_planned
    text = "\n".join(said)
    for complaint in (
        "an answer is needed",
        "there is no directory ./absent-model",
        "An empty line keeps absent/model",
        '"half" is neither a share, such as 0.05, nor a number of samples',
        '"1.5" is neither a share',
        '"box:port" is not HOST, HOST:PORT',
        "The plan is left to the run, since the model cannot be read here: ",
        '"gpu" is not a device',
        '"lara" is not one of',
        "there is no file train.jsonl",
        "there is no objective 'ppo'; there are sft, ",
        "the objective sequential is for a data set of your own",
    ):
        assert complaint in text


def test_wizard_takes_defaults_and_skips_what_is_known(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text('{"text": "a"}\n')
    output = tmp_path / "c.json"
    answers = Answers(model="m", layers=4)
    run_wizard(answers, output, ask=replies(*[""] * 6), say=lambda text: None)
    config = load_config(output)
    assert (config.workers[0].ip, config.workers[0].port) == ("127.0.0.1", 9999)
    assert config.adapter is not None


def test_wizard_does_not_replace_a_file_unasked(tmp_path):
    output = tmp_path / "c.json"
    output.write_text("precious", encoding="utf-8")
    assert run_wizard(Answers(), output, ask=replies("no"), say=lambda text: None) is None
    assert output.read_text(encoding="utf-8") == "precious"
    run_wizard(ALL, output, ask=replies("yes", ""), say=lambda text: None)
    assert load_config(output).model is not None


def test_a_wizard_without_further_input_names_the_option(tmp_path):
    with pytest.raises(UserError, match="--non-interactive"):
        run_wizard(Answers(), tmp_path / "c.json", ask=replies(), say=lambda text: None)
    assert list(tmp_path.iterdir()) == []


def test_a_plan_may_be_left_to_the_run(tmp_path):
    answers = Answers(model="absent/model", workers=["box"], adapter="none", measure=True)
    assert not write_config(answers, tmp_path / "c.json").is_planned
    assert json.loads((tmp_path / "c.json").read_text())["shard_plan"] == "auto"


@pytest.mark.parametrize(("reply", "planned"), [("yes", False), ("", True)])
def test_wizard_asks_on_a_terminal_whether_to_measure(reply, planned, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    run_wizard(ALL, tmp_path / "c.json", ask=replies("cpu", reply), say=lambda text: None)
    assert load_config(tmp_path / "c.json").is_planned is planned


RECORDS: dict[str, dict[str, Any]] = {
    "dpo": {"prompt": "a", "chosen": "b", "rejected": "c"},
    "kto": {"prompt": "a", "completion": "b", "label": True},
    "classification": {"text": "a", "label": "good", "id": 3},
    "token-classification": {"tokens": ["a"], "ner_tags": [1]},
    "sft": {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
}


def saved_record(folder: Path, fields: dict[str, Any]) -> str:
    (folder / "rows.jsonl").write_text(json.dumps(fields) + "\n", encoding="utf-8")
    return "rows.jsonl"


@needs("preferences", "classification")
@pytest.mark.parametrize("objective", RECORDS)
def test_the_fields_of_the_data_tell_the_objective(objective, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answers = Answers(model="org/m", layers=2, data=saved_record(tmp_path, RECORDS[objective]))
    assert write_config(answers, tmp_path / "c.json").training.objective == objective
    said: list[str] = []
    run_wizard(answers, tmp_path / "d.json", ask=replies(*[""] * 5), say=said.append)
    assert load_config(tmp_path / "d.json").training.objective == objective
    assert f"The data have the fields {', '.join(RECORDS[objective])}." in said


@needs("preferences", "classification")
def test_an_objective_that_the_data_do_not_fit_is_refused_with_their_fields(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    output = tmp_path / "c.json"
    data = saved_record(tmp_path, RECORDS["dpo"])
    answers = Answers(model="org/m", layers=2, data=data, objective="classification")
    with pytest.raises(UserError) as error:
        write_config(answers, output)
    assert "with the fields prompt, chosen, rejected" in error.value.message
    assert "dpo, orpo, cpo, kto, reward" in error.value.hint
    for fitting in ("orpo", "kto", "reward"):
        config = write_config(replace(answers, objective=fitting), output, force=True)
        assert config.training.objective == fitting
    saved_record(tmp_path, {"body": "a"})  # data.dataset_text_field may name it
    assert write_config(answers, output, force=True).training.objective == "classification"
    saved_record(tmp_path, RECORDS["classification"])  # plain text may have other fields
    config = write_config(replace(answers, objective="sft"), output, force=True)
    assert config.training.objective == "sft"


@needs("preferences", "classification")
@pytest.mark.parametrize(
    ("objective", "adapter", "rate"),
    [
        ("sft", "lora", 2e-4),
        ("classification", "none", 5e-5),
        ("dpo", "none", DPOConfig.learning_rate),
        ("kto", "none", KTOConfig.learning_rate),
        ("orpo", "qlora", 1e-5),
        ("reward", "lora", RewardConfig.learning_rate),
    ],
)
def test_the_learning_rate_follows_the_objective(objective, adapter, rate):
    config = Config.from_dict(proposed(model="m", objective=objective, adapter=adapter))
    assert config.training.learning_rate == rate
    assert config.training.objective == objective


@needs("classification")
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # of DeBERTa, in 5.17
def test_layers_are_those_of_the_class_that_is_trained(tmp_path):
    """Of DeBERTa there is none that generates text."""
    tiny_config("deberta-v2", "token-classification").save_pretrained(tmp_path / "model")
    answers = Answers(model=str(tmp_path / "model"), objective="token-classification")
    written = write_config(answers, tmp_path / "c.json")
    assert written.plan.stages[-1].end == 6
    assert written.model.task == "token-classification"


@pytest.mark.parametrize("device", ["localhost", "gpu", "cuda0", "0"])
def test_a_device_of_no_kind_is_refused(device):
    with pytest.raises(UserError, match=r"no kind of device|is not a device"):
        parse_address(f"box:9999:{device}")


def test_a_folder_without_data_is_refused(tmp_path):
    answers = Answers(model="org/m", layers=2, data=str(tmp_path))
    with pytest.raises(UserError, match="holds no file that can be read"):
        write_config(answers, tmp_path / "c.json")


@pytest.mark.parametrize("name", ["a.jsonl", "a.xyz", "a.csv"])
def test_data_that_cannot_be_read_are_refused_and_asked_for_again(name, tmp_path):
    data, said = tmp_path / name, list[str]()
    data.write_bytes(b"" if name == "a.jsonl" else b"text\n\xe9\n")
    with pytest.raises(DataError, match=name):
        write_config(Answers(model="org/m", layers=2, data=str(data)), tmp_path / "c.json")
    answers = replace(ALL, data=None)
    run_wizard(answers, tmp_path / "c.json", ask=replies(str(data), "some/d", ""), say=said.append)
    assert name in said[1]


def test_data_without_a_name_are_not_this_folder(tmp_path):
    config = write_config(Answers(model="org/m", layers=2, data=""), tmp_path / "c.json")
    assert config.data is None


def test_data_that_are_not_there_yet_are_noted(tmp_path, capsys):
    words = ["init", "--non-interactive", "--model", "org/m", "--layers", "2"]
    assert main([*words, "--data", "none.jsonl", "--output", str(tmp_path / "c.json")]) == 0
    assert "note: there is no file none.jsonl" in capsys.readouterr().out


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    """A model with its tokenizer, and a file of each kind of data."""
    folder = tmp_path_factory.mktemp("init")
    save_llama(folder / "model", vocab_size=400)
    tiny_tokenizer(CHATML).save_pretrained(folder / "model")
    for name, row in RECORDS.items():
        other = {**row, "label": "bad"} if row.get("label") == "good" else row
        lines = [json.dumps(row), json.dumps(other)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


@needs("preferences", "classification", "planner")
@pytest.mark.usefixtures("verdicts")
@pytest.mark.parametrize(
    ("objective", "adapter", "options"),
    [
        *((objective, "lora", []) for objective in [*RECORDS, "orpo", "cpo", "reward"]),
        ("sft", "qlora", ["--worker", "localhost"]),
        ("reward", "qlora", ["--measure"]),
        ("kto", "none", ["--measure"]),
        ("classification", "none", ["--worker", "localhost"]),
    ],
)
def test_check_has_nothing_against_what_init_writes(
    objective, adapter, options, tiny_folder, tmp_path
):
    file, output = objective if objective in RECORDS else "dpo", str(tmp_path / "c.json")
    data = ["--data", str(tiny_folder / f"{file}.jsonl"), "--objective", objective]
    model = ["--model", str(tiny_folder / "model"), "--adapter", adapter]
    assert main(["init", "--non-interactive", "--output", output, *data, *model, *options]) == 0
    assert main(["check", "--config", output, "--show", "1"]) == 0


@needs("classification")
def test_a_classifier_of_one_class_is_refused(tiny_folder, tmp_path, capsys):
    data = saved_record(tmp_path, {"text": "a", "label": "good"})
    model, output = str(tiny_folder / "model"), tmp_path / "c.json"
    write_config(Answers(model=model, data=str(tmp_path / data)), output)
    assert main(["check", "--config", str(output)]) == 2
    assert "all examples have the label good" in capsys.readouterr().err
