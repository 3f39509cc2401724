"""The records of an endpoint, which `hetero watch` and `hetero plot` show: metrics.jsonl."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from pathlib import Path

from hetero_framework.extras.tinker.datums import message_of
from hetero_framework.extras.tinker.journal import Answer, KeptCall
from hetero_framework.trainer.metrics import METRICS_FILE, StepLines

_TOKEN_BYTES = 4


class CallRecords:
    """Counts what is answered, and writes a line for each `optim_step`. Its loss is the sum over
    tokens divided by the number of examples; its seconds begin at the end of the step before."""

    def __init__(self, folder: Path) -> None:
        self._lines = StepLines(folder / METRICS_FILE)
        self._lines.resume(sys.maxsize)  # drops a last line that a crash cut off
        self._since, self._found = time.monotonic(), defaultdict[str, float](int)

    def note(self, entry: KeptCall, answer: Answer, step: int) -> None:
        """Count a call that was answered; `step` is the number of steps that are done."""
        from tinker.proto import tinker_public_pb2 as pb

        found = self._found
        if isinstance(answer, bytes) and entry.kind == "asample":
            texts = pb.SampleResponse.FromString(answer).sequences
            found["samples"] += len(texts)
            found["sampled_tokens"] += sum(len(one.tokens) for one in texts) // _TOKEN_BYTES
        elif isinstance(answer, bytes):
            asked = message_of(entry.kind, entry.body)
            if not asked.forward_only:
                found["calls"] += 1
                found["examples"] += len(asked.data)
                found["loss"] += pb.ForwardBackwardOutput.FromString(answer).metrics["loss:sum"]
        elif entry.kind == "optim_step" and "error" not in answer:
            loss = found["loss"] / found["examples"] if found["examples"] else None
            rate = message_of(entry.kind, entry.body)["adam_params"]["learning_rate"]
            line = {"step": step, **found, "loss": loss, "learning_rate": rate}
            seconds = time.monotonic() - self._since
            self._lines.write(line | answer["metrics"] | {"step_seconds": seconds})
            self._since, self._found = time.monotonic(), defaultdict(int)
