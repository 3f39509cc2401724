"""Nothing of a planted secret is left in a redacted text, and what helps is."""

from __future__ import annotations

import base64
import getpass
import json
import random
from pathlib import Path

import pytest

from hetero_framework.commands.redaction import Redaction
from hetero_framework.core import addresses

# Put together here, since keys in a repository alarm those who look for them.
RANDOM = "a8Kd0Qz7Lm2Xw5Rt9Yb4Vc1N"
SECRETS = [
    *("hf_" + "aBcDeFgHiJkLmNoPqRsTuVwXyZ", "ghp_" + RANDOM, "github_pat_" + "a" * 22),
    *("sk-" + "proj-abcdefghijkl", "AKIA" + "IOSFODNN7EXAMPLE", "xoxb-" + "1111111111-abc"),
    *("eyJhbGciOiJI" + ".eyJzdWIi.c2ln", "HT1-" + "ABCD2345-EFGH6723", RANDOM, "0" * 20 + "f" * 20),
    *("52:54:00:12:34:56", "123e4567-e89b-12d3-a456-426614174000"),
]
PLACES = ["{}", "failed: {}.", '{{"a": "{}"}}', "--key={}", "({}, 3)", "[{}]"]
NAMED = [
    *(
        "password=hunter2",
        "--token hunter2",
        '"api_key": "hunter2, and more"',
        "WANDB_API_KEY=hunter2",
    ),
    *("hub_token: 'hunter2'", "Authorization: Bearer hunter2", "https://me:hunter2@example.org/a"),
    *("https://example.org/a?sig=hunter2&b=c", "passphrase = hunter2", "my_secret: hunter2"),
    "-----BEGIN PRIVATE KEY-----\nhunter2\n-----END PRIVATE KEY-----",
    "-----BEGIN PRIVATE KEY-----\nhunter2",
]
HOSTS = [
    *(
        "10.1.2.3",
        "192.168.1.20:9999",
        "[fd00::a:1]:29501",
        "fe80::1%eth0",
        "fd12:3456::7: refused",
    ),
    *("10.1.2.3.", "ssh me@gpubox", "gpubox:29501", "node7.lab.example.org", "tcp://gpubox/x"),
    *("box.local", "from 2001:db8:0:0:0:0:0:1.", "::ffff:10.1.2.3"),
]
KEPT = """\
2026-11-27 19:49:03 INFO worker 1: loaded layers 2-3 onto cuda:0 in 12.5 s
torch 2.13.0+cu130, CUDA 13.0, driver 580.65.06; NVIDIA GeForce RTX 4090
worker 1 listens on 127.0.0.1:29501 and [::1]:29501, 0.0.0.0 too; localhost:9998
"model": {"name_or_path": "meta-llama/Llama-3.1-8B-Instruct", "dtype": "bfloat16"}
"eos_token": "</s>", "pad_token_id": 0, "max_new_tokens": 64; 459,456 tokens, padding token: <pad>
thecoder/Mixtral-8x7B-Instruct-v0.1-GPTQ-4bit-128g, unsloth/Qwen2.5-32B-bnb-4bit
Meta-Llama-3-8B-Instruct-Gradient-1048k NousResearch/Nous-Hermes-2-Mixtral-8x7B-DPO
File "hetero_framework/cluster/worker.py", line 1234, in _serve
hetero_framework/cluster/worker.py:1234: LinkLost
https://huggingface.co/Qwen/Qwen2.5-32B
step 1/12  loss 6.5730  2,057 tokens/s  ETA 0:00:20  grad_norm 0.0220
TransformerEncoderLayerForSequenceClassification model.layers.17.self_attn.q_proj.lora_A.default
"""


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("secret", SECRETS)
def test_nothing_of_a_secret_is_left(secret: str, place: str) -> None:
    assert Redaction()(place.format(secret)) == place.format("<secret>")


@pytest.mark.parametrize("text", NAMED)
def test_a_value_behind_a_name_is_a_secret(text: str) -> None:
    assert "hunter2" not in Redaction()(f"before {text} after")


def test_many_random_keys_are_noticed() -> None:
    draw, redact = random.Random(0), Redaction()
    for _ in range(200):
        assert redact(draw.randbytes(16).hex()) == "<secret>"
    for coded in (base64.b64encode, base64.urlsafe_b64encode):
        keys = [coded(draw.randbytes(32)).decode() for _ in range(1000)]
        left = [len(redact(key).replace("<secret>", "")) for key in keys]
        assert sum(left) < 0.05 * 44 * 1000  # "/" cuts a key in two, of which one may be short


@pytest.mark.parametrize("text", HOSTS)
def test_no_address_or_name_of_a_host_is_left(text: str) -> None:
    said = Redaction(["gpubox"])(text)
    for part in ("10.1", "192.", "fd", "fe80", "gpubox", "lab", "example", "box", "2001"):
        assert part not in said
    assert "host-1" in said


def test_the_same_host_has_the_same_name_throughout() -> None:
    redact = Redaction(["gpubox"])
    assert redact("GPUBOX and 10.0.0.9, gpubox:9998") == "host-1 and host-2, host-1:9998"
    assert redact("10.0.0.9 again") == "host-2 again"


def test_this_machines_names_and_its_users_home_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(getpass, "getuser", lambda: "mallory")
    monkeypatch.setattr(addresses, "local_hostnames", lambda: ["basement", "basement.local"])
    monkeypatch.setattr(Path, "home", lambda: Path("/srv/people/mallory"))
    home = "/home/"  # no file of the repository names one
    text = f"{Path.home()}/runs, {home}alice/x, C:\\Users\\Bob\\y"
    assert Redaction()(text) == "~/runs, ~/x, ~\\y"
    assert Redaction()("on Basement by mallory (/home/al)") == "on host-1 by <user> (~)"
    assert Redaction()(json.dumps("C:\\Users\\Bob\\y")) == '"~\\\\y"'


def test_values_of_the_environment_are_secrets_by_their_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SOME_TOKEN", "correct horse")
    monkeypatch.setenv("SOME_PLACE", "battery staple")
    assert Redaction()("a correct horse, battery staple") == "a <secret>, battery staple"


def test_what_helps_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(getpass, "getuser", lambda: "root")
    for line in KEPT.splitlines():
        assert Redaction()(line) == line
