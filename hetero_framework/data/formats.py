"""The data formats of TRL, turned into token ids and a mask of the tokens that the loss covers.

    text               {"text": ...}                            every token
    prompt_completion  {"prompt": ..., "completion": ...}       the completion
    messages           {"messages": [{"role", "content"}, ..]}  the assistant's turns
    alpaca             {"instruction", "input", "output"}       the output
    tokens             {"input_ids", "labels" or a mask}        labels that are not -100

Token ids and labels equal those of TRL's SFTTrainer (1.16): the end-of-sequence token is appended
where it is missing, prompts are tokenised together with their completions, and the end of an
example longer than `max_length` is cut off.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from hetero_framework.config import DataConfig
from hetero_framework.config.strict_json import json_type
from hetero_framework.data.chat import ChatRenderer
from hetero_framework.data.conversations import (
    CONVERSATION_FIELDS,
    Conversation,
    ConversationReader,
    Remarks,
    as_messages,
    check_media,
    is_blank,
    texts_of,
)
from hetero_framework.data.sources import Record, check_unicode, listed
from hetero_framework.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The prompts of tatsu-lab/stanford_alpaca, train.py; the output follows without a space.
ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
)
ALPACA_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:"
)

_FORMATS_HINT = (
    "formats are text; prompt and completion; messages; instruction, input and output; input_ids; "
)
_ASKED = r"(user_)?(prompt|question|query|instruction|problem|request|human)s?"
_ANSWERED = r"(\w+_)?(answer|response|output|completion|solution|target|reply|assistant)s?"
# Patterns of the columns that a hint suggests for a name.
_CALLED = {
    **{"instruction": _ASKED, "input": r"inputs?|(\w+_)?(context|passage|document)s?"},
    **{"prompt": rf"{_ASKED}|inputs?", "output": _ANSWERED, "completion": _ANSWERED},
    "messages": r"(\w+_)?(dialog(ue)?|chat|turn|conversation)s?",
    "text": r"(\w+_)?(content|body|document|article|story|sentence|review)s?|premise"
    r"|(sentence|text|question)_?[1a]",
    "text_pair": r"hypothesis|(sentence|text|question)_?[2b]",
    "tokens": r"(\w+_)?(word|token)s?",
    "labels": r"(\w+_)?(label|tag)s?",
    "chosen": r"(\w+_)?(chosen|accepted|preferred|better|best|good|positive|winner|win)(_\w+)?",
    "rejected": r"(\w+_)?(rejected|dispreferred|worse|worst|bad|negative|loser|lose)(_\w+)?",
    "label": r"(\w+_)?(label|class|category|sentiment|target|score|rating|thumbs?_up)s?",
}
_LAYOUTS = (("instruction", "input", "output"), ("prompt", "completion"), ("messages",), ("text",))

_TOUCH = (
    "warning: prompt and answer touch, without a space or a line break; write one of them, or of"
    ' plain questions and answers data.columns {"instruction": ..., "output": ...}'
)
# Letters of scripts without spaces between words.
_UNSPACED = re.compile(
    r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\ua4cf\uf900-\ufaff\uff00-\uffef]"
)
_MESSAGES = ("messages", "conversations")
# Names of fields with a part of the text to be learned: such a field is used, repeats a used field,
# or is refused. Then names of fields that weigh examples, and of fields with tokens.
_PART = re.compile(
    r"(user_)?(prompt|question|query|instructions?|inputs?)|problem|context|history|messages"
    r"|conversations?|dialog(ue)?|system(_(prompt|message|instructions?))?|tools|functions"
    r"|chat_template_kwargs|(sentence|text|question)_?[12ab]|documents|premise|hypothesis",
    re.IGNORECASE,
)
_WEIGHT = re.compile(
    r"((sample|example|row|loss|token|chosen|rejected|completion)_)?weights?", re.IGNORECASE
)
_TOKENS = re.compile(
    r"((prompt|chosen|rejected|completion)_)?(input_ids|attention_mask|labels)|token_type_ids"
    r"|(prompt|chosen|rejected|(KL_)?completion|position)_ids|ref_\w*logps"
    r"|(completion|assistant|assistant_tokens|loss|special_tokens)_masks?"
)
_ANSWERS = {
    **{"prompt_completion": ("completion",), "alpaca": ("output",)},
    "preference": ("chosen", "rejected"),
}
_NOT_SFT = {
    "preference data": (
        {"chosen", "rejected"},
        'set training.objective to "dpo", "orpo", "cpo" or "kto", or make prompt and completion of'
        " prompt and chosen",
    ),
    "data of stepwise supervision": ({"completions", "labels"}, "keep the good completions"),
}

_LABELS = ("labels", "completion_mask", "assistant_masks")

Tokens = tuple[list[int], list[bool]]


def detect_format(fields: dict[str, Any], where: str, text_field: str) -> str:
    """The format of an example by the names of its fields; fields that are not null decide first.
    Raises DataError when no format fits."""
    for names in ([name for name in fields if fields[name] is not None], list(fields)):
        if "input_ids" in names:
            return "tokens"
        if "prompt" in names and "completion" in names:
            return "prompt_completion"
        if "messages" in names or "conversations" in names:
            return "messages"
        if "instruction" in names and "output" in names:
            return "alpaca"
        if text_field in names:
            return "text"
    shown = listed(fields)
    for kind, (needed, advice) in _NOT_SFT.items():
        if needed <= fields.keys():
            raise DataError(
                f"{where}: the fields {shown} are those of {kind}, not of supervised fine-tuning",
                hint=advice,
            )
    raise DataError(
        f"{where}: the format cannot be told from the fields {shown}",
        hint=_FORMATS_HINT + columns_hint(fields, *_LAYOUTS),
    )


def columns_hint(fields: Collection[str], *layouts: Sequence[str]) -> str:
    """A hint with the data.columns that rename these fields to all names of one layout."""
    for names in layouts:
        found: dict[str, str] = {}
        for name in sorted(names, key=lambda name: name not in fields):
            left = [field for field in fields if field not in found.values()]
            known = re.compile(f"{name}|{_CALLED.get(name, name)}", re.IGNORECASE)
            called = filter(known.fullmatch, left)
            if column := name if name in left else next(called, None):
                found[name] = column
        if len(found) == len(names):
            renamed = {name: found[name] for name in names if found[name] != name}
            return f"add to data.columns {json.dumps(renamed, ensure_ascii=False)}"
    return "data.columns gives columns these names"


class Formatter:
    """Tokenises examples of one format."""

    keeps_whole = False
    """Whether an example longer than max_length is left out instead of cut."""
    weighs = True
    """Whether messages may have a weight."""
    label_rows = 0
    """Number of rows at the end of an example that hold labels instead of tokens."""
    renders, reads = ChatRenderer, ConversationReader

    def __init__(self, name: str, tokenizer: PreTrainedTokenizerBase, options: DataConfig) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.options = options
        self.changed_prompts = 0
        self.num_cut = 0
        """Number of examples that the tokenizer cut."""
        self.notes = Remarks()
        self.idle = Remarks()
        """Remarks on examples that teach nothing, or not what their kind is for."""
        self.answers = _ANSWERS.get(name, ())
        self.unused: dict[str, Any] = {}
        """Fields of examples that no part of training sees, with the first value of each."""
        self.renderer: ChatRenderer | None = None
        """Made when the first example needs it."""
        self._speaks: bool | None = None
        self._joints: dict[tuple[str, str], bool] = {}
        for option, without, needed in (
            ("completion_only_loss", ("text", "messages"), "prompt and completion"),
            ("assistant_only_loss", ("text", "alpaca"), "conversations"),
        ):
            if getattr(options, option) and name in without:
                raise DataError(
                    f"data.{option} is true, but the data have the format {name}",
                    hint=f"it needs {needed}; leave it out otherwise",
                )

    @property
    def chat(self) -> ChatRenderer:
        if self.renderer is None:
            only = self.options.assistant_only_loss
            self.renderer = self.renders(
                self.tokenizer,
                self.options.chat_template_kwargs,
                assistant_only=self.name == "messages" if only is None else only,
                notes=self.notes,
            )
        return self.renderer

    @cached_property
    def reader(self) -> ConversationReader:
        reader = self.reads(self.chat.template, self.notes)
        reader.variables(self.options.chat_template_kwargs, "data.", "data.chat_template_kwargs")
        return reader

    def rows(self, records: list[Record]) -> list[list[Tokens]]:
        """The rows that each record makes."""
        return [[tokens] for tokens in self(records)]

    def targets(self, records: list[Record]) -> list[Sequence[float]]:
        """Numbers to be learned beside the tokens of each record, equally many per record."""
        return [()] * len(records)

    def teaches(self, rows: list[Tokens]) -> bool:
        """Whether there is something to learn from an example's rows."""
        # The first token is never predicted, so its label alone teaches nothing.
        return all(any(trained[1:]) for _, trained in rows)

    def __call__(self, records: list[Record]) -> list[Tokens]:
        """Token ids and trained-token mask of each record, not yet truncated."""
        return _FORMATS[self.name](self, records)

    def use(self, record: Record, *names: str, has_parts: bool = True) -> None:
        """Note the fields of an example that are not used; `names` are the used fields. Raises
        DataError for an unused field that would change what is learned: a weight, tokens, and with
        `has_parts` a text that the used fields do not repeat."""
        check_media(record.fields, record.where)
        lost = [name for name, is_repeated in parts(record, names) if not is_repeated]
        if lost and has_parts:
            raise DataError(
                f"{record.where}: the field {lost[0]} would not be learned from: the format "
                f"{self.name} has no place for it",
                hint="put its text into prompt (of a classifier: text_pair), or remove it; messages"
                " have a place for system prompts and tools",
            )
        for name, value in record.fields.items():
            if name in names or is_blank(value):
                continue
            is_tokens = _TOKENS.fullmatch(name) and isinstance(value, (list, float))
            if is_tokens or (_WEIGHT.fullmatch(name) and value != 1):
                raise DataError(
                    f"{record.where}: the field {name} of an example is not used here",
                    hint="remove it: examples count the same, and their texts are tokenised anew; "
                    "only a message of the assistant has a weight",
                )
            self.unused.setdefault(name, value)

    def judge(self, record: Record, rows: list[Tokens], targets: Sequence[float]) -> None:
        """Add a remark to `idle` where an example, as it is kept, teaches nothing."""
        given = [record.fields.get(name) for name in self.answers]
        if any(is_blank(each[-1:] if isinstance(each, list) else each) for each in given):
            self.idle.add("an answer is empty, which teaches only to end", record.where)

    def _text(self, records: list[Record]) -> list[Tokens]:
        field = self.options.dataset_text_field
        for record in records:
            self.use(record, field, has_parts=False)
        texts = [self._with_eos(string_field(record, field)) for record in records]
        return [(ids, [True] * len(ids)) for ids in self._tokenize(texts)]

    def _alpaca(self, records: list[Record]) -> list[Tokens]:
        for record in records:
            self.use(record, "instruction", "input", "output")
        return self._pairs(
            [(alpaca_prompt(record), string_field(record, "output")) for record in records]
        )

    def _prompt_completion(self, records: list[Record]) -> list[Tokens]:
        for record in records:
            label = str(record.fields.get("label")).strip().lower()  # a table of text has texts
            if label in ("true", "false", "1", "0", "1.0", "0.0"):
                raise DataError(
                    f"{record.where}: prompt, completion and label are the fields of KTO's"
                    " preference data; supervised fine-tuning would learn the bad completions, too",
                    hint='set training.objective to "kto", or keep the examples whose label is'
                    " true, without the label",
                )
        records = [as_messages(record, "completion") for record in records]
        if True in {self._are_messages(record, "completion") for record in records}:
            return [self._conversational_pair(record) for record in records]
        pairs = []
        for record in records:
            self.use(record, "prompt", "completion")
            prompt, answer = (string_field(record, name) for name in ("prompt", "completion"))
            self.note_prompt(prompt, [answer], record.where)
            pairs.append((prompt, answer))
        return self._pairs(pairs)

    def note_prompt(self, prompt: str, answers: Sequence[str], where: str) -> None:
        """Add a remark if the prompt is empty, begins all answers, or touches an answer."""
        text = prompt.strip()
        if all(answer.lstrip().startswith(text) for answer in answers):
            what = "the answers begin with the prompt, which is read twice"
            self.notes.add(f"warning: {what if text else 'there is no prompt'}", where)
        elif not prompt.endswith(self._tags) and any(
            self._touch(prompt[-1:], answer[:1]) for answer in answers
        ):
            self.notes.add(_TOUCH, where)

    @cached_property
    def _tags(self) -> tuple[str, ...]:
        return tuple(self.tokenizer.get_added_vocab())

    def _touch(self, last: str, first: str) -> bool:
        """Whether a space is missing between these letters, and would change the tokens."""
        if (last, first) not in self._joints:
            written = bool(first) and not (last.isspace() or first.isspace())
            spaced = written and not any(_UNSPACED.match(letter) for letter in (last, first))
            one, two = (self._tokenize([f"a{last}{gap}{first}a"]) for gap in ("", " "))
            self._joints[last, first] = spaced and one != two
        return self._joints[last, first]

    def _are_messages(self, record: Record, answer: str) -> bool:
        """Whether an answer is messages. Raises DataError if the run's first answer differs."""
        found = isinstance(record.fields.get(answer), list)
        self._speaks = found if self._speaks is None else self._speaks
        if found != self._speaks:
            raise DataError(
                f"{record.where}: {answer} is {'messages' if found else 'a text'}, unlike before",
                hint="all examples of a run are texts, or all are messages",
            )
        return found

    def _dialogues(self, record: Record, *answers: str) -> tuple[Conversation, list[Conversation]]:
        """The prompt, and the prompt with each answer. Raises DataError for what is no answer."""
        prompt, dialogues = self._conversation(record, "prompt"), []
        for name in answers:
            answer = self._conversation(record, name, system=False)
            roles = [message["role"] for message in answer.messages]
            again = roles[0] == "user" == prompt.messages[-1]["role"]
            if again or roles[0] == "system" or roles[-1] in ("user", "system"):
                raise DataError(
                    f"{record.where}: {name} is no answer to the prompt, with messages of "
                    f"{listed(roles)}",
                    hint="remove the field prompt where answers are whole conversations",
                )
            dialogues.append(replace(prompt, messages=prompt.messages + answer.messages))
        return prompt, dialogues

    def _tokenised(self, record: Record) -> Tokens:
        """An example that is tokenised already. Raises DataError if its parts do not fit
        together."""
        names = "input_ids", "attention_mask", *_LABELS
        given = {name: record.fields.get(name) for name in names}
        lists: dict[str, Any] = {n: v for n, v in given.items() if n == names[0] or v is not None}
        self.use(record, *names, has_parts=False)
        for name, value in lists.items():
            if not isinstance(value, list) or not all(type(n) in (int, bool) for n in value):
                raise DataError(f"{record.where}: {name} must be a list of whole numbers")
        ids: list[int] = lists["input_ids"]
        if wrong := [name for name, value in lists.items() if len(value) != len(ids)]:
            raise DataError(
                f"{record.where}: {wrong[0]} has {len(lists[wrong[0]])} numbers, input_ids"
                f" {len(ids)}"
            )
        if min(ids, default=0) < 0 or not all(lists.get("attention_mask", ())):
            raise DataError(
                f"{record.where}: input_ids hold padding, or numbers below 0",
                hint="leave padding out; it is put there for each micro-batch",
            )
        trained = [True] * len(ids)
        for name in _LABELS:
            value = lists.get(name, trained)
            learned = [n != -100 for n in value] if name == "labels" else list(map(bool, value))
            if (
                name == "labels"
                and name in lists
                and any(
                    label != token
                    for label, token, on in zip(value, ids, learned, strict=True)
                    if on
                )
            ):
                raise DataError(
                    f"{record.where}: a label is neither -100 nor the token at its place",
                    hint="labels are not shifted: each stands where its token stands",
                )
            if name != "completion_mask" or self.options.completion_only_loss is not False:
                trained = [a and b for a, b in zip(trained, learned, strict=True)]
        return ids, trained

    def _pairs(self, pairs: list[tuple[str, str]]) -> list[Tokens]:
        if self.options.assistant_only_loss:
            raise DataError(
                "data.assistant_only_loss is true, but prompt and completion are plain strings",
                hint="it needs conversations; leave it out otherwise",
            )
        prompts = self._tokenize([prompt for prompt, _ in pairs])
        wholes = self._tokenize([prompt + self._with_eos(answer) for prompt, answer in pairs])
        return [
            (whole, self._completion_mask(prompt, whole))
            for prompt, whole in zip(prompts, wholes, strict=True)
        ]

    def _conversational_pair(self, record: Record) -> Tokens:
        self.use(record, "prompt", "completion", *CONVERSATION_FIELDS)
        prompt, [whole] = self._dialogues(record, "completion")
        prompt_ids = self.chat.ids(prompt, generation_prompt=True)
        ids, assistant = self.chat.ids_and_mask(whole)
        mask = self._completion_mask(prompt_ids, ids)
        return ids, [a and b for a, b in zip(mask, assistant, strict=True)]

    def _whole(self, record: Record) -> Tokens:
        names = [name for name in _MESSAGES if record.fields.get(name) is not None]
        self.use(record, *_MESSAGES, *CONVERSATION_FIELDS)
        chats = [self._conversation(record, name) for name in names or _MESSAGES[:1]]
        if any(chat.messages != chats[0].messages for chat in chats):
            raise DataError(
                f"{record.where}: the fields {' and '.join(names)} hold two conversations",
                hint="keep one of them",
            )
        answers = [name for name in ("chosen", "rejected", "kto_tag") if name in record.fields]
        if answers and chats[0].messages[-1]["role"] != "assistant":
            raise DataError(
                f"{record.where}: the fields {', '.join(answers)} are those of preference data,"
                " whose answers are not in the messages",
                hint="append the chosen answer to the messages, or train with TRL's DPOTrainer",
            )
        return self.chat.ids_and_mask(chats[0])

    def _conversation(self, record: Record, name: str, *, system: bool = True) -> Conversation:
        field_of(record, name)
        chat = self.reader.read(record, name)
        if not self.weighs and name != "prompt" and 0 in [m.get("weight") for m in chat.messages]:
            raise DataError(
                f"{record.where}: {name} has a message of weight 0, which would be learned from",
                hint="move what comes before the answer to the prompt",
            )
        return self.reader.with_system(chat, record) if system else chat

    def _completion_mask(self, prompt: list[int], whole: list[int]) -> list[bool]:
        """The mask of the completion, which begins where prompt and whole differ, as in TRL."""
        same = common(prompt, whole)
        self.changed_prompts += same < len(prompt)
        if self.options.completion_only_loss is False:
            return [True] * len(whole)
        return [False] * same + [True] * (len(whole) - same)

    def _tokenize(self, texts: list[str]) -> list[list[int]]:
        made = self.tokenizer(texts, verbose=False, return_attention_mask=False)
        ids: list[list[int]] = made["input_ids"]
        return ids

    @cached_property
    def _eos(self) -> str | None:
        token: str | None = self.tokenizer.eos_token
        return token

    def _with_eos(self, text: str) -> str:
        if not self.options.add_eos:
            return text
        eos = self._eos
        if not eos:
            raise DataError(
                "the tokenizer has no end-of-sequence token, so an example would have no end",
                hint="set data.eos_token to one of its tokens, or data.add_eos to false",
            )
        return text if text.endswith(eos) else text + eos


_FORMATS: dict[str, Callable[[Formatter, list[Record]], list[Tokens]]] = {
    "text": Formatter._text,
    "prompt_completion": Formatter._prompt_completion,
    "messages": lambda formatter, records: [formatter._whole(record) for record in records],
    "alpaca": Formatter._alpaca,
    "tokens": lambda formatter, records: [formatter._tokenised(record) for record in records],
}


def parts(record: Record, used: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Unused fields with a part of the text, and whether each repeats the used fields. It does if
    all its texts are in the used fields of the prompt (texts of messages also in the answer), or if
    it is one text that holds the whole example."""
    for name in filter(_PART.fullmatch, record.fields):
        if name in used or is_blank(record.fields[name]):
            continue
        texts = [*texts_of(record.fields[name])]
        said = {name: [*texts_of(record.fields.get(name))] for name in used}
        whole = {text for found in said.values() for text in found if text}
        asked = "\n".join(
            text for key in said.keys() - sum(_ANSWERS.values(), ()) for text in said[key]
        )
        known = whole if name in _MESSAGES else ()
        is_known = bool(texts) and all(text in known or _holds(asked, text) for text in texts)
        renders = len(texts) == 1 and bool(whole) and all(_holds(texts[0], part) for part in whole)
        yield name, is_known or renders


def _holds(text: str, part: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(part)}(?!\w)", text) is not None


def alpaca_prompt(record: Record) -> str:
    """Stanford's prompt for one example; an empty or absent input takes the shorter one."""
    instruction = string_field(record, "instruction")
    if record.fields.get("input") in (None, ""):
        return ALPACA_WITHOUT_INPUT.format(instruction=instruction)
    return ALPACA_WITH_INPUT.format(instruction=instruction, input=string_field(record, "input"))


def string_field(record: Record, name: str) -> str:
    """The text under `name`; DataError when it is absent, not a string or not valid Unicode."""
    value = field_of(record, name)
    if not isinstance(value, str):
        raise DataError(
            f"{record.where}: the field {name} must be a string, found {json_type(value)}",
            hint="an example is an object with a text under each name; of a table write the rows: "
            'pandas\' to_json(..., orient="records", lines=True)',
        )
    return check_unicode(value, f"{record.where}: the field {name}")


def common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Number of equal tokens, or letters, at the beginning of two rows or texts."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def field_of(record: Record, name: str) -> Any:
    """The value under `name`; DataError when there is none."""
    if name not in record.fields:
        raise DataError(
            f"{record.where}: no field {name}; its fields are {listed(record.fields)}",
            hint=columns_hint(record.fields, (name,)),
        )
    return record.fields[name]
