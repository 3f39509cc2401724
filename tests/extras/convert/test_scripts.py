"""Scripts are read as bash reads them; what they say of processes counts."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from hetero_framework.errors import UserError
from hetero_framework.extras.convert.recipes import read_recipe
from hetero_framework.extras.convert.scripts import UNKNOWN, read_commands

# Of each, bash and the reader give the command `show` the same words.
SCRIPTS = [
    "show a 'b c' \"d  e\" f\\ g h=i --x=1 # comment\n",
    "show a#b ; show c&&show d; show e\n",
    "A=1 B='x y'\nshow $A ${A} \"$B\" $B pre$A.post ${B}z '$A' \"\\$A\" \\$A\n",
    "show ${C:-d} ${C-e/f} \"${C:-x y}\" ${C:-${D:-deep}} '${C:-d}'\n",
    "A=1\nshow ${A:-no} ${A:?must} \\\n  --next line \\\n--last\n",
    'ARGS="--lr 1e-4 --epochs 3"\nARGS+=" --more"\nshow $ARGS "$ARGS"\n',
    'L=(--a 1\n # left out\n  "b c")\nL+=(--d)\nshow "${L[@]}" end\n',
    "show a > /dev/null 2>&1\nshow b 2>/dev/null >>/dev/null c\n",
    "cat <<EOF >/dev/null\nshow not this 'one\nEOF\nshow this\n",
    "if true; then\n  show in\nfi\nfor x in 1; do show each; done\n",
    "(show sub)\nexport E=5; show $E | cat\nF=7 show own\n",
    'show "multi\nline" --json \'{"a": false}\' "{\\"b\\": [1, 2]}"\n',
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_words_are_those_of_bash(script: str) -> None:
    if (bash := shutil.which("bash")) is None:
        pytest.skip("this system has no bash")
    told = "show() { printf '%s\\0' \"$@\" $'\\1' >&3; }\nexec 3>&1\n"
    ran = subprocess.run([bash, "-c", told + script], capture_output=True, check=True)
    theirs = [line.split("\0") for line in ran.stdout.decode().split("\0\1\0")[:-1]]
    ours = [command.words[1:] for command in read_commands(script) if command.words[0] == "show"]
    assert ours == theirs


def test_what_a_script_does_not_tell_is_marked() -> None:
    (command,) = read_commands('show $1 "$@" $(date) `x` ${Y} a$Z ${#W} $((1*2))')
    assert command.words[1:] == [
        *(f"{UNKNOWN}{x}" for x in ("$1", "$@", "$(date)", "`x`", "${Y}")),
        *(f"a{UNKNOWN}$Z", f"{UNKNOWN}${{#W}}", f"{UNKNOWN}$((1*2))"),
    ]


def test_the_environment_is_what_stands_before_a_command_or_is_exported() -> None:
    first, second = read_commands("A=1\nexport B=2\nC=3 D=4 show\nshow")
    assert (first.environment, second.environment) == ({"B": "2", "C": "3", "D": "4"}, {"B": "2"})


TRL = "trl sft --model_name_or_path m --dataset_name d"
MODULE = f"-m {TRL}"
SCRIPT = "examples/scripts/sft.py --model_name_or_path m --dataset_name d"


@pytest.mark.parametrize(
    ("command", "processes"),
    [
        (TRL, None),
        (f"{TRL} --num_processes 4", 4),
        (f"{TRL} --accelerate_config zero3", 8),
        (f"CUDA_VISIBLE_DEVICES=0,1,2 {TRL}", 3),
        (f"export CUDA_VISIBLE_DEVICES=0\n{TRL}", 1),
        (f"torchrun {SCRIPT}", 1),
        (f"torchrun --nnodes=2 --nproc-per-node=8 {SCRIPT}", 16),
        (f"GPUS=4\ntorchrun --nproc_per_node ${{GPUS:-8}} --standalone {MODULE}", 4),
        (f"torchrun --nnodes 1:4 --nproc_per_node 8 {SCRIPT}", None),
        (f"torchrun --nproc_per_node=gpu {SCRIPT}", None),
        (f"python3 -m torch.distributed.run --nproc_per_node 2 --nnodes 3 {SCRIPT}", 6),
        (f"accelerate launch --num_processes 16 --num_machines 2 {SCRIPT}", 16),
        (f"accelerate launch --config_file acc.yaml {SCRIPT}", 6),
        (f"accelerate launch --config_file acc.yaml --num_processes 2 {SCRIPT}", 2),
        (f"accelerate launch --config_file gone.yaml {SCRIPT}", None),
        (f"accelerate launch {SCRIPT}", None),
        (f"deepspeed --num_gpus 4 --num_nodes=2 {SCRIPT}", 8),
        (f"deepspeed --num_gpus=4 --module {TRL}", 4),
        (f"deepspeed --include localhost:0,1,2 {SCRIPT}", 3),
        (f"deepspeed --include a:0,1@b:0,1,3 {SCRIPT}", 5),
        (f"deepspeed --include a@b {SCRIPT}", None),
        (f"deepspeed --hostfile hosts {SCRIPT}", None),
        (f"torchrun --nproc_per_node $1 {SCRIPT}", None),
        (f"export CUDA_VISIBLE_DEVICES=$1\naccelerate launch {SCRIPT}", None),
        (f'srun --nodes 2 bash -c "torchrun --nnodes 2 --nproc_per_node 4 {SCRIPT}"', 8),
        (f"mpirun -np 4 python {SCRIPT}", 4),
        ("FORCE_TORCHRUN=1 NNODES=2 NPROC_PER_NODE=4 llamafactory-cli train l.yaml", 8),
        ("CUDA_VISIBLE_DEVICES=0,1 llamafactory-cli train l.yaml", 2),
        ("FORCE_TORCHRUN=1 lmf train l.yaml", None),
        ("axolotl train a.yml --launcher torchrun -- --nproc_per_node=2 --nnodes=2", 4),
        ("accelerate launch --num_processes 2 -m axolotl.cli.train a.yml", 2),
    ],
)
def test_processes_are_those_of_all_machines(
    command: str, processes: int | None, tmp_path: Path
) -> None:
    (tmp_path / "acc.yaml").write_text("num_processes: 6\nnum_machines: 1\n")
    (tmp_path / "l.yaml").write_text("stage: sft\nmodel_name_or_path: m\ndataset: d\n")
    (tmp_path / "a.yml").write_text("base_model: m\nmicro_batch_size: 1\n")
    (tmp_path / "run.sh").write_text(command + "\n")
    recipe = read_recipe(tmp_path / "run.sh")
    assert recipe.processes == processes
    by_hand = [row.key for row in recipe.rows if row.status == "to do by hand"]
    asks = processes is None and not command.startswith("trl")
    assert by_hand == ["launcher"] * asks


def test_options_override_the_files_that_a_command_names(tmp_path: Path) -> None:
    (tmp_path / "l.yaml").write_text("stage: sft\nlearning_rate: 1.0e-4\nlora_rank: 8\n")
    (tmp_path / "a.yml").write_text("base_model: m\nsequence_len: 64\ntrl: {beta: 0.1}\n")
    for command, expected in (
        ("llamafactory-cli train l.yaml learning_rate=1e-5 lora_rank=4", ("learning_rate", "1e-5")),
        ("axolotl train a.yml --sequence-len 128 --no-flash-attention", ("sequence_len", "128")),
        ("axolotl train a.yml --no-flash-attention", ("flash_attention", "false")),
        ("axolotl train --trl.beta 0.3 a.yml", ("trl", {"beta": "0.3"})),
        ("axolotl train a.yml", ("trl", {"beta": 0.1})),
        ("WANDB_PROJECT=p axolotl train a.yml", ("WANDB_PROJECT", "p")),
    ):
        (tmp_path / "run.sh").write_text(command)
        key, value = expected
        assert read_recipe(tmp_path / "run.sh").keys[key] == value, command


def test_parts_that_are_not_taken_are_named(tmp_path: Path) -> None:
    script = tmp_path / "all.sh"
    script.write_text(
        "set -e\ncd work\npip install trl\npython prepare.py data\n"
        'trl sft --model_name_or_path a --dataset_name $DATA --output_dir "out-$1" "$@"\n'
        "trl dpo --model_name_or_path out --dataset_name y --beta 0.2 --max_length 9 --use_peft\n"
        "python my_train.py --model_name_or_path b\nhf upload out\n"
    )
    recipe = read_recipe(script)
    assert recipe.keys == {"model_name_or_path": "a"}
    said = {row.key: (row.status, row.value) for row in recipe.rows}
    hand = "to do by hand"
    assert said == {
        **dict.fromkeys(("set", "pip"), ("no effect here", None)),
        **dict.fromkeys(("cd", "python", "hf", "$@", "trl dpo"), (hand, None)),
        **{"python my_train.py": (hand, None)},
        **{"dataset_name": (hand, "$DATA"), "output_dir": (hand, "out-$1")},
    }


def test_the_first_of_two_commands_that_train_is_taken(tmp_path: Path) -> None:
    script = tmp_path / "two.sh"
    script.write_text(f"python {SCRIPT} --seed 1\nfor s in 1 2; do {TRL} --seed $s; done\n")
    recipe = read_recipe(script)
    assert recipe.keys["seed"] == "1"
    assert "trl sft" in [row.key for row in recipe.rows]


@pytest.mark.parametrize("name", ["train.py", "train.ipynb", "train"])
def test_a_program_in_python_is_told_what_to_write(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("from trl import SFTConfig\n")
    with pytest.raises(UserError, match="a program in Python") as caught:
        read_recipe(tmp_path / name)
    assert "json.dump" in str(caught.value.hint)


def test_paths_of_files_are_found_beside_the_script_too(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("model_name_or_path: m\ndataset_name: d\n")
    (tmp_path / "run.sh").write_text("trl sft --config c.yaml")
    assert os.getcwd() != str(tmp_path)
    assert read_recipe(tmp_path / "run.sh").keys["dataset_name"] == "d"
