"""`hetero generate` and `hetero chat`, through the workers and on one machine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from hetero_framework.cli import main
from hetero_framework.config import Config
from hetero_framework.trainer.coordinator import train
from tests.samples import free_ports, read_jsonl, save_llama
from tests.unit.data_helpers import CHATML

pytestmark = pytest.mark.xdist_group("pool")

LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
ASKED = ("red green", "the old house")


@pytest.fixture
def trained(pool, tmp_path, verdicts):
    """The configuration of a run that is done: three stages, a chat template, an adapter."""
    model = save_llama(tmp_path / "model", max_position_embeddings=4096)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(model)
    talk = [{"role": "user", "content": "red"}, {"role": "assistant", "content": "green old"}]
    (tmp_path / "chat.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 8)
    training = {"max_steps": 2, "learning_rate": 1e-2, "gradient_accumulation_steps": 2}
    data, whole = {"train": str(tmp_path / "chat.jsonl")}, {"name_or_path": str(model)}
    sections = {"model": whole, "data": data, "adapter": LORA, "training": training}
    raw = pool.config(tmp_path / "run", [2, 4], **sections)
    train(Config.from_dict(raw))
    file = tmp_path / "hetero_config.json"
    file.write_text(json.dumps(raw))
    return file


def generated(model: Any, tokenizer: Any, most: int) -> list[str]:
    texts = []
    for text in ASKED:
        said = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(
            said, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        end = tokenizer.eos_token_id
        settings = {"max_new_tokens": most, "do_sample": False, "eos_token_id": end}
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **settings)
        texts.append(tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True))
    return texts


def test_generate_continues_as_the_merged_model_does(trained, tmp_path):
    (tmp_path / "asked.txt").write_text("".join(f"{text}\n" for text in ASKED))
    common = ["generate", "--config", str(trained), "--prompts", str(tmp_path / "asked.txt")]
    found: dict[str, list[str]] = {}
    for name, options in {"cut": [], "local": ["--local"], "base": ["--base"]}.items():
        output = tmp_path / f"{name}.jsonl"
        words = [*common, *options, "--max-new-tokens", "15", "--output", str(output)]
        assert main(words) == 0
        lines = [json.loads(line) for line in output.read_text().splitlines()]
        assert [line["prompt"] for line in lines] == list(ASKED)
        found[name] = [line["text"] for line in lines]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert found["base"] == generated(model, tokenizer, 15)
    merged = PeftModel.from_pretrained(model, tmp_path / "run" / "adapter").merge_and_unload()
    assert found["cut"] == found["local"] == generated(merged, tokenizer, 15) != found["base"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--result", "nowhere"], "there is no adapter or model in"),
        (["--prompts", "absent.txt"], "absent.txt"),
        (["--temperature", "hot"], "'hot' is not a number from 0 to 100"),
    ],
)
def test_generate_says_what_is_wrong(words, said, trained, tmp_path, capsys):
    (tmp_path / "asked.txt").write_text("red\n")
    asked = ["--prompts", str(tmp_path / "asked.txt"), "--output", str(tmp_path / "out.jsonl")]
    try:
        code = main(["generate", "--config", str(trained), "--local", *asked, *words])
    except SystemExit as ended:
        code = int(ended.code or 0)
    assert code == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, words: list[str]) -> None:
        import pty

        here, there = pty.openpty()
        command = [sys.executable, "-m", "hetero_framework", *words]
        ends = dict.fromkeys(("stdin", "stdout", "stderr"), there)
        own = {"start_new_session": True, "preexec_fn": _take_terminal}
        self.process = subprocess.Popen(command, **ends, **own)
        os.close(there)
        self._file = here
        self.text, self._taken = "", 0

    def until(self, text: str, timeout_s: float = 120.0) -> str:
        """Read on to the next `text`; all since that of the last call."""
        import select

        deadline, start = time.monotonic() + timeout_s, self._taken
        while text not in self.text[start:]:
            assert time.monotonic() < deadline, self.text
            if select.select([self._file], [], [], 1.0)[0]:
                self.text += os.read(self._file, 4096).decode(errors="replace")
        self._taken = self.text.index(text, start) + len(text)
        return self.text[start : self._taken]

    def type(self, text: str) -> None:
        os.write(self._file, text.encode())

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._file)


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no pseudo-terminals of this kind")
def test_chat_remembers_is_ended_by_ctrl_c_saved_and_begun_anew(trained, tmp_path):
    words = ["chat", "--config", str(trained), "--max-new-tokens"]
    terminal = Terminal([*words, "3000", "--system", "Be brief."])
    try:
        terminal.until("> ")
        terminal.type("red green\n")
        terminal.until("red green\r\n")
        terminal.until(" ")  # the first word of the answer
        terminal.type("\x03")
        assert len(terminal.until("> ")) < 4000  # of 3,000 tokens
        for line, said in {
            f"/save {tmp_path / 'talk.jsonl'}": "wrote ",
            "/save": "/save FILE writes",
            "/sav": "there is no /sav;",
            "/help": "/reset begins anew",
        }.items():
            terminal.type(f"{line}\n")
            terminal.until(said)
            terminal.until("> ")
        [talk] = read_jsonl(tmp_path / "talk.jsonl")
        assert [one["role"] for one in talk["messages"]] == ["system", "user", "assistant"]
        terminal.type("/reset\n")
        terminal.until("> ")
        terminal.type("\x04")
        assert terminal.process.wait(timeout=60) == 0
    finally:
        terminal.close()


@pytest.mark.long
@pytest.mark.skipif(os.name == "nt", reason="Windows has no pseudo-terminals of this kind")
def test_chat_outlives_the_death_of_a_worker(trained, tmp_path):
    """Which then holds the adapter again: the answer is the same."""
    raw = json.loads(trained.read_text())
    ports = free_ports(3)
    for entry, port in zip((raw["coordinator"], *raw["workers"]), ports, strict=True):
        entry["port"] = port
    trained.write_text(json.dumps(raw))
    terminal = Terminal(["chat", "--config", str(trained), "--max-new-tokens", "9"])
    try:
        started = terminal.until("/exit ends")
        terminal.until("> ")
        terminal.type("red green\n")
        answer = terminal.until("\n> ")
        worker = re.search(r"worker 2: started as process (\d+)", started)
        os.kill(int(worker[1]), signal.SIGKILL)
        terminal.type("/reset\n")
        terminal.until("> ")
        terminal.type("red green\n")
        again = terminal.until("\n> ")
        assert "worker 2 is back in a new process" in again
        assert again.splitlines()[-2] == answer.splitlines()[-2]
    finally:
        terminal.close()
