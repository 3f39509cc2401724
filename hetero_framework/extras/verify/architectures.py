"""The table of architectures: all of the installed transformers, compared with their cut selves."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

import torch
import transformers

from hetero_framework import registry
from hetero_framework.config.objectives import Task, needs_of, shows_pictures
from hetero_framework.core.files import write_file
from hetero_framework.errors import ArchitectureError
from hetero_framework.extras.verify.verification import EQUAL, Verified, verify_model, with_pictures
from hetero_framework.models.cut.tiny import architecture_names, multimodal_classes
from hetero_framework.models.library import LIBRARY_ERRORS, briefly
from hetero_framework.models.verify.equivalence import STEPS, Verdict

_OF_TEXT: tuple[Task, ...] = ("causal-lm", "sequence-classification", "token-classification")


def verify_all(
    progress: Callable[[Verified], None] | None = None,
    model_types: Iterable[str] | None = None,
    tried: Callable[[Verified], str] = lambda result: "",
) -> list[Verified]:
    """Compare every causal-LM architecture of the installed transformers, its multimodal classes
    by name, and its classifiers. An architecture without a working tiny configuration counts as
    refused. `model_types` limits the architectures. `progress` is called after each architecture.
    If it passes, `tried` says what training through real workers does (processes.py)."""
    results, wanted = [], None if model_types is None else list(model_types)
    tasks = (*_OF_TEXT, "image-classification")
    classes = [(name, task) for task in tasks for name in architecture_names(task)]
    for name, task in classes:
        if wanted is not None and name not in wanted:
            continue
        try:
            # A composite type is tried as the text model in it; the row keeps the name asked for.
            result = replace(verify_model(model_type=name, task=task), model_type=name)
            if result.passed:
                result = replace(result, processes=tried(result))
        except ArchitectureError as error:
            result = Verified(name, "refused", error.message, task=task)
        except LIBRARY_ERRORS as error:
            reason = (
                f"no tiny copy of its default configuration runs: {briefly(error)}; `hetero verify"
                " --config` tries one of the model that a configuration names"
            )
            result = Verified(name, "refused", reason, task=task)
        if task == "causal-lm":
            result = replace(result, pictures=with_pictures(name))
        results.append(result)
        if progress is not None:
            progress(result)
    return results


def write_architectures(results: Sequence[Verified], path: Path) -> None:
    """Write the table of all architectures as Markdown."""
    results = sorted(results, key=lambda r: r.model_type)
    texts = [r for r in results if r.task == "causal-lm"]
    images = [r for r in results if r.task == "image-classification"]
    passed = [r for r in texts if r.passed]
    equal = [r.model_type for r in passed if r.verdict == "bit-equal"]
    equal_images = [r.model_type for r in images if r.passed]
    packings = {r.model_type: p.attention for r in texts if (p := r.packing) and not p.reason}
    alone = sorted(name for name, attention in packings.items() if attention == "per_sample")
    close = {_subject(r): _differences(r) for r in results if r.verdict == "within tolerance"}
    rounded = {_subject(r): r.half for r in results if r.passed and r.half}
    run = [r for r in results if r.processes]
    differing = {_subject(r): r.processes for r in run if r.processes != EQUAL}
    refused = {_subject(r): r.reason.replace("|", "/") for r in results if not r.passed}
    text = _TABLE.format(
        made=f"Made by `hetero verify --all` on {date.today().isoformat()} with transformers"
        f" {transformers.__version__}, torch {torch.__version__}, Python"
        f" {platform.python_version()} on {platform.system()} {platform.machine()},"
        f" threads: {torch.get_num_threads()}.",
        steps=STEPS,
        counts=f"{len(passed)} of {len(texts)} pass: {len(equal)} to the bit,"
        f" {len(passed) - len(equal)} within tolerance; {len(texts) - len(passed)} are refused."
        f" {len(packings)} can be trained without padding (`data.padding_free`).",
        texts=_objectives("causal-lm"),
        objectives="\n".join(_by_objective(results)),
        images=_objectives("image-classification"),
        equal_images=f"{len(equal_images)} of {len(images)}",
        passed_images=_names(equal_images),
        seeing=seeing(results),
        equal=_names(equal),
        close=_rows("architecture | loss | gradients | weights after training | where", close),
        exact=sum(not r.half for r in passed),
        rounded=_rows("architecture | what a step in three shards does", rounded),
        crossing=_rows(
            "architecture | what crosses, with the widths of a tiny copy",
            {f"`{r.model_type}`": r.crossing for r in results if r.passed and r.crossing},
        ),
        run=f"{len(run) - len(differing)} of {len(run)} that were tried"
        if run
        else "None was tried",
        differing=_rows("architecture | in three processes", differing),
        alone=_names(alone),
        masked=_names(sorted(packings.keys() - {*alone})),
        refused=_rows("architecture | reason", refused),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, text.encode())


def seeing(results: Sequence[Verified]) -> str:
    """The section on pictures."""
    names = {r.model_type for r in results}
    again = {kind for name, kind in multimodal_classes().items() if name in names}
    told = [r for r in results if r.pictures and r.model_type not in again]
    found = {f"`{r.model_type}`": r.pictures.replace("|", "/") for r in told}
    kinds = [text.partition(":")[0] for text in found.values()]
    admitted, refused = (kinds.count(kind) for kind in ("admitted", "refused"))
    counts = f"Of {len(kinds)} classes {admitted} are admitted and {refused} refused;"
    rows = _rows("architecture | with pictures", dict(sorted(found.items())))
    return f"{counts} {len(kinds) - admitted - refused} cannot be tried here.\n\n{rows}"


def _differences(r: Verified) -> str:
    numbers = (r.loss_difference, r.gradient_difference, r.weight_difference)
    return " | ".join([*(f"{number:.1e}" for number in numbers), r.reason])


def _rows(head: str, rows: Mapping[str, str]) -> str:
    """A table with a row for each subject; "none" without any."""
    lines = [f"| {head} |", "|---" * (head.count("|") + 1) + "|"]
    lines += [f"| {name} | {text} |" for name, text in rows.items()]
    return "\n".join(lines) if rows else "none"


def _objectives(task: Task) -> str:
    """The objectives that train a class for a task."""
    known = {name: needs_of(name) for name in registry.names("objectives") if name != "sequential"}
    plain = [n for n, needs in known.items() if not shows_pictures(needs.data)]
    return _names(name for name in plain if known[name].task == task)


def _subject(result: Verified) -> str:
    generates = result.task == "causal-lm"
    return f"`{result.model_type}`" + ("" if generates else f" ({_objectives(result.task)})")


def _by_objective(results: Sequence[Verified]) -> list[str]:
    """How many architectures pass with each classifier, and then a table of them, with one row for
    all architectures of the same outcomes."""
    tasks, lines = _OF_TEXT, list[str]()
    verdicts: dict[str, dict[Task, Verdict]] = {}
    for result in results:
        if result.task in tasks:
            verdicts.setdefault(result.model_type, {})[result.task] = result.verdict
    for task in tasks[1:]:
        own = [r for r in results if r.task == task]
        equal = sum(r.verdict == "bit-equal" for r in own)
        lines.append(f"{equal} of {len(own)} architectures are bit-equal with {_objectives(task)}.")
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, found in verdicts.items():
        if found.keys() != {"causal-lm"}:
            rows.setdefault(tuple(found.get(task, "no class") for task in tasks), []).append(name)
    head = " | ".join([*map(_objectives, tasks), "architectures"])
    shown = {" | ".join(row): _names(names) for row, names in sorted(rows.items())}
    return [*lines, "", _rows(head, shown)]


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"


_TABLE = """\
# Architectures

{made}

Each architecture, tiny and random, was trained for {steps} steps in one piece and in three \
shards; loss, every gradient and every weight were compared.
A name of a class (`...ForConditionalGeneration`) is a multimodal model trained on text.
{counts}
Checkpoints in fewer bits (FP8, MXFP4, GPTQ, AWQ, ...) are of these architectures once they are \
loaded: [models.md](models.md#checkpoints-in-fewer-bits) lists the forms.

## Passed, bit-equal

{equal}

## Passed, within tolerance

{close}

## By objective

All of these pass with {texts}.
Many architectures also have a class that classifies; some, mostly encoders, have no other. \
Their tiny copies were trained in the same way, with the loss of that class.
{objectives}

## Classifiers of pictures

With {images} {equal_images} pass. Logits, gradients and running means of one step were compared \
with those of the class, dropout included.

{passed_images}

## With pictures

A tiny copy of each class that takes pictures was shown one, in one piece and cut in two \
([pictures.md](pictures.md)), by a processor of transformers' defaults, with other sizes and \
tokens where these do not fit each other. A refusal can mean that they still do not. \
`hetero verify --config` tries a model's own processor. {seeing}

## In bfloat16 autocast

With `training.bf16`, loss and gradients of a step were compared in the same way. {exact} of those \
that pass are equal to the bit; the others:

{rounded}

## In three processes

With `--processes`, each that passes and has text is also trained by a run through two real \
workers, in full and with weight decay, and by one in one process. {run} have the same losses \
and the same files. The others:

{differing}

## More than the hidden state

For these a boundary carries side tensors too, or token ids go to stages behind the first. \
`hetero check` says how many bytes that is for a model.

{crossing}

## Without padding

The samples of a micro-batch in one row gave the loss and the gradients of padded rows.
With an attention that takes each sample by itself:

{alone}

Only with a mask over the row, where attention costs as much as for one long sample:

{masked}

## Refused

{refused}
"""
