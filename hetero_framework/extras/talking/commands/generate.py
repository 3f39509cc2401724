"""`hetero generate`: continues the prompts of a file by a run's result."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from hetero_framework.commands.options import value, writes
from hetero_framework.extras.talking.commands.chat import DECODING, chosen, talk_of
from hetero_framework.units import plural

EXAMPLES = """
    hetero generate --prompts questions.jsonl --output answers.jsonl
    hetero generate --prompts texts.txt --output base.jsonl --base --local
    """
OPTIONS = (
    value(
        "--prompts",
        "FILE",
        "a text or a record (prompt, messages, instruction) per line; .txt, .jsonl, .json or"
        " .parquet",
        required=True,
    ),
    *writes("JSON lines: prompt, text, tokens", required=True),
    *DECODING,
)


def run(arguments: argparse.Namespace) -> None:
    from hetero_framework.core.files import write_file

    output = Path(arguments.output)
    talk, loaded = talk_of(arguments)
    prompts = talk.reader.read(str(Path(arguments.prompts).absolute()), Path(), "--prompts")
    talk.check(prompts)
    with loaded as cluster:
        samples = talk.answer(cluster, prompts, chosen(talk, arguments))
    text = "".join(json.dumps(asdict(sample), ensure_ascii=False) + "\n" for sample in samples)
    write_file(output, text.encode())
    empty = sum(not sample.text.strip() for sample in samples)
    print(
        f"wrote {output}: {plural(len(samples), 'text')}" + f", {empty} of them empty" * bool(empty)
    )
