"""A bare SentencePiece model (`tokenizer.model`) as a tokenizer of transformers.

transformers converts such a file by the class that a `tokenizer_config.json` names, and without one
it leaves out the space before the first word and the removal of repeated spaces. Here both come
from the file itself, so that the ids are those of `SentencePieceProcessor.encode`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_framework.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

MODEL = "tokenizer.model"
_CONVERTED = ("tokenizer.json", "tokenizer_config.json")
_SPACE = "▁"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # SentencePiece.Type
_ROLES = ("bos", "eos", "unk", "pad")


def is_bare(folder: Path) -> bool:
    """Whether the folder has a SentencePiece model and nothing that says how to load it."""
    others = any((folder / name).exists() for name in _CONVERTED)
    return (folder / MODEL).is_file() and not others


def read_sentence_piece(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a unigram or BPE model, with the bos, eos, unk and pad tokens that it
    names. It adds none of them to a text. Raises DataError for other files, and where the library
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
    return PreTrainedTokenizerFast(tokenizer_object=_tokenizer(model), **named)


def _tokenizer(model: Any) -> Tokenizer:
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
    if spec.remove_extra_whitespaces:
        # Of leading spaces one stays where one is due: the place of the first word is 0 then.
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
    """Every pair of pieces that make a piece, the best score first."""
    scores = {piece.piece: piece.score for piece in pieces if piece.type == _NORMAL}
    pairs = (
        (-score, left, right)
        for piece, score in scores.items()
        for at in range(1, len(piece))
        if (left := piece[:at]) in scores and (right := piece[at:]) in scores
    )
    return [(left, right) for _, left, right in sorted(pairs, key=lambda pair: pair[0])]
