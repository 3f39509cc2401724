"""`hetero generate`: continues the prompts of a file by a run's result."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from hetero_framework.commands.options import at_least, value, writes
from hetero_framework.errors import UserError
from hetero_framework.extras.talking.commands.chat import DECODING, chosen, talk_of
from hetero_framework.units import plural

EXAMPLES = """
    hetero generate --prompts questions.jsonl --output answers.jsonl
    hetero generate --prompts texts.txt --output base.jsonl --base --local
    hetero generate --prompts texts.txt --output drawn.jsonl --num-samples 8 --temperature 1
    """
OPTIONS = (
    value(
        "--prompts",
        "FILE",
        "a text or a record (prompt, messages, instruction) per line; .txt, .jsonl, .json or"
        " .parquet",
        required=True,
    ),
    *writes("JSON lines: prompt, text, tokens (several samples: and sample)", required=True),
    value("--num-samples", "N", "texts for each prompt (default: 1)", type=at_least(1), default=1),
    *DECODING,
)


def run(arguments: argparse.Namespace) -> None:
    from hetero_framework.core.files import write_file

    output = Path(arguments.output)
    talk, loaded = talk_of(arguments)
    prompts = talk.reader.read(str(Path(arguments.prompts).absolute()), Path(), "--prompts")
    talk.check(prompts)
    choice, each = chosen(talk, arguments, num_samples=arguments.num_samples), arguments.num_samples
    if each > 1 and choice.temperature == 0:
        raise UserError(
            "--num-samples: at temperature 0 all samples of a prompt are the same text",
            hint="add --temperature 1",
        )
    with loaded as cluster:
        samples = talk.answer(cluster, prompts, choice)
    lines = [asdict(s) | ({"sample": k % each} if each > 1 else {}) for k, s in enumerate(samples)]
    for line in lines:
        del line["pictures"]  # which the prompts name
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    write_file(output, text.encode())
    empty = sum(not sample.text.strip() for sample in samples)
    print(
        f"wrote {output}: {plural(len(samples), 'text')}" + f", {empty} of them empty" * bool(empty)
    )
