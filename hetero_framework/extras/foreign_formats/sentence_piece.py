"""A bare SentencePiece model (`tokenizer.model`) as a tokenizer of transformers.

Where no `tokenizer_config.json` names a class, transformers converts such a file without two rules:
the space before the first word, and the removal of repeated spaces. Here both rules come from the
file itself, so that the ids are those of `SentencePieceProcessor.encode`.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_framework.data.sources import shorten
from hetero_framework.data.tokenizer import TokenizersErrors
from hetero_framework.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_SPACE = "▁"
_APART = "\ufdd0"  # no letter
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # SentencePiece.Type
_ROLES = ("bos", "eos", "unk", "pad")


def read_sentence_piece(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a unigram or BPE model, with the bos, eos, unk and pad tokens that the model
    names. It adds none of these to a text. Raises DataError for other files, and where the library
    is missing."""
    try:
        from sentencepiece import sentencepiece_model_pb2
    except ImportError as error:
        raise DataError(
            f"{path} is a SentencePiece model, and the library that reads it is not here: {error}",
            hint='pip install "hetero-framework[sentencepiece]"',
        ) from error
    from google.protobuf.message import DecodeError
    from transformers import PreTrainedTokenizerFast

    messages: Any = sentencepiece_model_pb2
    model = messages.ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except (OSError, DecodeError) as error:
        raise DataError(f"{path}: not a SentencePiece model ({error})") from error
    trained = model.trainer_spec
    if not model.pieces or not 0 <= trained.unk_id < len(model.pieces):
        raise DataError(f"{path}: not a SentencePiece model (it has no pieces)")
    if trained.model_type not in (trained.UNIGRAM, trained.BPE):
        raise DataError(f"{path}: SentencePiece models of words or characters are not read here")
    if trained.treat_whitespace_as_suffix or not model.normalizer_spec.escape_whitespaces:
        raise DataError(f"{path}: only SentencePiece models with {_SPACE} before words are read")
    numbers = {f"{role}_token": getattr(trained, f"{role}_id") for role in _ROLES}
    named = {r: model.pieces[n].piece for r, n in numbers.items() if 0 <= n < len(model.pieces)}
    named["clean_up_tokenization_spaces"] = False
    rules = _rules(model, path)
    with TokenizersErrors():
        tokenizer = _tokenizer(model, composes=rules("\u1112\u1161\u11ab") == "\ud55c")
        checked: type[PreTrainedTokenizerBase] = _checked(PreTrainedTokenizerFast, rules)
        return checked(tokenizer_object=tokenizer, **named)


def _rules(model: Any, path: Path) -> Callable[[str], str]:
    """SentencePiece's own normalisation, spaces and user-defined symbols aside. Raises DataError
    for a model that SentencePiece refuses."""
    from sentencepiece import SentencePieceProcessor

    bare = type(model).FromString(model.SerializeToString())
    bare.normalizer_spec.add_dummy_prefix = False
    for piece in bare.pieces:
        piece.type = _NORMAL if piece.type == _USER_DEFINED else piece.type
    try:
        own = SentencePieceProcessor(model_proto=bare.SerializeToString())
    except RuntimeError as error:
        raise DataError(f"{path}: not a SentencePiece model ({error})") from error
    return lambda text: str(own.normalize(text)).replace(_SPACE, "")


def _checked(base: Any, rules: Callable[[str], str]) -> Any:
    """A tokenizer class that refuses texts whose form in the library `tokenizers` is not that of
    SentencePiece. These are rare: they have several marks on one letter in an unusual order."""

    def same(tokenizer: Any, text: str) -> bool:
        ours = tokenizer.backend_tokenizer.normalizer.normalize_str(text)
        return bool(ours.replace(_SPACE, "") == rules(text))

    def call(self: Any, text: Any = None, *others: Any, **options: Any) -> Any:
        with TokenizersErrors():
            for each in _texts([text, *others, *options.values()]):
                if not same(self, each):
                    raise DataError(
                        f"the text is not read as SentencePiece does: {shorten(each)}",
                        hint="write its letters composed (unicodedata.normalize, NFC)",
                    )
            return base.__call__(self, text, *others, **options)

    return type(base.__name__, (base,), {"__call__": call})  # a tokenizer is saved by this name


def _texts(given: Any) -> Iterator[str]:
    if isinstance(given, str):
        yield given
    elif isinstance(given, (list, tuple)):
        yield from chain.from_iterable(map(_texts, given))


def _composed() -> list[Any]:
    """Normalizers that compose letters with the marks that follow. As in SentencePiece's rules, a
    composed letter takes no further mark: a sign between the two holds them apart."""
    from tokenizers import Regex, normalizers

    several = (c for c in map(chr, range(0x30000)) if len(unicodedata.normalize("NFD", c)) > 1)
    letters = "".join(c for c in several if not "\uac00" <= c <= "\ud7a3")
    apart = f"(?<=[\uac00-\ud7a3{letters}])(?=[\\p{{M}}\u1160-\u11ff])"
    return [
        normalizers.Replace(Regex(apart), _APART),
        normalizers.NFC(),
        normalizers.Replace(_APART, ""),
    ]


def _tokenizer(model: Any, *, composes: bool) -> Tokenizer:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
    from tokenizers.pre_tokenizers import Metaspace, Sequence

    pieces, trained, spec = model.pieces, model.trainer_spec, model.normalizer_spec
    if trained.model_type == trained.UNIGRAM:
        scores = [(piece.piece, piece.score) for piece in pieces]
        tokenizer = Tokenizer(models.Unigram(scores, trained.unk_id, trained.byte_fallback))
    else:
        numbers = {piece.piece: number for number, piece in enumerate(pieces)}
        found = {"unk_token": pieces[trained.unk_id].piece, "byte_fallback": trained.byte_fallback}
        tokenizer = Tokenizer(models.BPE(numbers, _merges(pieces), fuse_unk=True, **found))
    charsmap = spec.precompiled_charsmap
    rules: list[Any] = [normalizers.Precompiled(charsmap)] if charsmap else []
    if composes:  # Precompiled takes letters one by one
        rules = [*_composed(), *rules, *_composed()]
    if spec.remove_extra_whitespaces:
        # With a prefix one leading space stays, so that the text still begins at place 0.
        ends = r" +\z" if spec.add_dummy_prefix else r"\A +| +\z"
        rules += [normalizers.Replace(Regex(ends), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    tokenizer.normalizer = normalizers.Sequence([*rules, normalizers.Replace(" ", _SPACE)])
    undo: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if spec.add_dummy_prefix:
        first = _SPACE if spec.remove_extra_whitespaces else " "
        # Metaspace puts its sign before a text that does not begin with it, and no text begins
        # with " " any more: spaces of the text's own do not take the place of the prefix.
        signs = ((first, "first"), (_SPACE, "never"))
        tokenizer.pre_tokenizer = Sequence([Metaspace(*sign, split=False) for sign in signs])
        undo.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(undo)
    special = [piece.piece for piece in pieces if piece.type in (_CONTROL, _UNKNOWN)]
    own = [piece.piece for piece in pieces if piece.type == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    tokenizer.add_tokens([AddedToken(text, normalized=True) for text in own])
    return tokenizer


def _merges(pieces: Any) -> list[tuple[str, str]]:
    """Every pair of pieces that together make a piece, the best score first."""
    scores = {piece.piece: piece.score for piece in pieces if piece.type == _NORMAL}
    pairs = (
        (-score, left, right)
        for piece, score in scores.items()
        for at in range(1, len(piece))
        if (left := piece[:at]) in scores and (right := piece[at:]) in scores
    )
    return [(left, right) for _, left, right in sorted(pairs, key=lambda pair: pair[0])]
