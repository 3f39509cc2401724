"""Ids of a bare `tokenizer.model` against those of SentencePiece itself."""

from __future__ import annotations

import json
import random
import sys
import unicodedata
from itertools import product
from pathlib import Path

import pytest

from hetero_framework.data.tokenizer import read_tokenizer
from hetero_framework.errors import DataError

CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "Grüße aus München, naïve café, 日本語のテキスト",
    "one two three four five six\tseven 12345",
    " ".join("abcdefghijklmnopqrstuvwxyz"),
] * 20
STRINGS = [
    *("Hello world", " one", "  two leading", "two  spaces", "at the end  ", "", "   ", "\n\n"),
    *("a\nb", "a \n b", "tab\there", "Grüße 日本 🙂 ñ", "ｆｕｌｌ width ①", "\u3000wide", "x ▁ y"),
    *("a<sep>b", "a <sep>  b", " <sep> b<sep>", "The fox\n\njumps"),
]


def strings() -> list[str]:
    draw = random.Random(0)
    letters = "abcdefgh  \n\tüé日本🙂ß①."
    return STRINGS + ["".join(draw.choices(letters, k=draw.randrange(30))) for _ in range(300)]


def train(folder: Path, kind: str, **options: object) -> Path:
    library = pytest.importorskip("sentencepiece")
    folder.mkdir(exist_ok=True)
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_prefix=str(folder / "tokenizer"),
        model_type=kind,
        vocab_size=400 if options.get("byte_fallback") else 150,
        hard_vocab_limit=False,
        user_defined_symbols=["<sep>"],
        minloglevel=2,
        **options,
    )
    (folder / "tokenizer.vocab").unlink()
    return folder


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
@pytest.mark.parametrize("normalization_rule_name", ["identity", "nmt_nfkc"])
def test_ids_and_texts_are_those_of_sentencepiece(tmp_path, kind, normalization_rule_name):
    for number, (fallback, squeeze, prefix) in enumerate(product((True, False), repeat=3)):
        folder = train(
            tmp_path / str(number),
            kind,
            normalization_rule_name=normalization_rule_name,
            byte_fallback=fallback,
            remove_extra_whitespaces=squeeze,
            add_dummy_prefix=prefix,
        )
        own = sys.modules["sentencepiece"].SentencePieceProcessor(str(folder / "tokenizer.model"))
        tokenizer = read_tokenizer(str(folder), None)
        assert len(tokenizer) == own.vocab_size()
        for text in strings():
            ids = own.encode(text)
            assert tokenizer(text)["input_ids"] == ids, (text, fallback, squeeze, prefix)
            if own.unk_id() not in ids:
                assert tokenizer.decode(ids) == own.decode(ids)


WORDS = ["한국어 문장", "Tiếng Việt có dấu ệ ậ ữ", "ガギグ パピプ ヴ が", "naïve Å ñ ǖ"]
WORDS += ["ᾧ ἄνθρωπος"]
WORDS += ["ｶﾞｷﾞ ﾊﾟ ｳﾞ", "カﾞ ｶ\u3099", "하\u11ab", "â\u0301 ơ\u0323", "ﬁ ① Ω K", "क़ নั้"]
ODD = ["a\u0302\u0323", "ﬁ\u0301", "X\u0302", "c\u0323\u0302", "ab", "\ufdd0\u0301"]


@pytest.mark.parametrize(
    ("rule", "odd"),
    [
        ("nfkc", "xx=x=x"),
        ("nmt_nfkc", "xx=x=x"),
        ("nfkc_cf", "xxxx=x"),
        ("nmt_nfkc_cf", "xxxx=x"),
        ("identity", "======"),
        ("own", "===xx="),
    ],
)
def test_decompositions_have_the_ids_of_sentencepiece_or_are_refused(tmp_path, rule, odd):
    options = {"normalization_rule_name": rule}
    if rule == "own":
        (tmp_path / "rules.tsv").write_text("61 62\t78\n63\t79\n")  # ab -> x, c -> y
        options = {"normalization_rule_tsv": str(tmp_path / "rules.tsv")}
    folder = train(tmp_path / "model", "unigram", byte_fallback=True, **options)
    own = sys.modules["sentencepiece"].SentencePieceProcessor(str(folder / "tokenizer.model"))
    tokenizer = read_tokenizer(str(folder), None)
    tokenizer.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    again = read_tokenizer(str(tmp_path / "saved"), None)
    for form, word in product(("NFC", "NFD", "NFKC", "NFKD", None), WORDS):
        text = word if form is None else unicodedata.normalize(form, word)
        ids = own.encode(text)
        assert tokenizer(text)["input_ids"] == again(text)["input_ids"] == ids, (text, form)
    for text, sign in zip(ODD, odd, strict=True):
        if sign == "=":
            assert tokenizer([text])["input_ids"] == [own.encode(text)], text
            continue
        with pytest.raises(DataError, match=f"not read as SentencePiece does: {text}"):
            tokenizer([text])


def test_a_model_that_is_damaged_is_refused(tmp_path):
    """A trie that points outside of itself, and a score that is no number."""
    folder = train(tmp_path, "unigram", normalization_rule_name="nfkc")
    from sentencepiece import sentencepiece_model_pb2

    good = (folder / "tokenizer.model").read_bytes()
    for damage in ("trie", "length", "score"):
        model = sentencepiece_model_pb2.ModelProto.FromString(good)
        spec = model.normalizer_spec
        if damage == "trie":
            spec.precompiled_charsmap = b"\4\0\0\0" + b"\xff" * 4 + b"x" * 10
        elif damage == "length":
            spec.precompiled_charsmap = b"\xff" * 14
        else:
            model.pieces[5].score = float("nan")
        (folder / "tokenizer.model").write_bytes(model.SerializeToString())
        with pytest.raises(DataError, match=r"tokenizer\.model: not a SentencePiece model"):
            read_tokenizer(str(folder), None)


def test_special_tokens_are_those_that_the_model_names_and_none_is_added(tmp_path):
    folder = train(tmp_path, "bpe", pad_id=3, control_symbols=["<turn>"])
    tokenizer = read_tokenizer(str(folder), None)
    roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    assert tokenizer.special_tokens_map == roles
    assert tokenizer("a<turn>a</s>").tokens() == ["▁a", "<turn>", "a", "</s>"]


def test_saved_and_read_again_it_gives_the_same_ids(tmp_path):
    tokenizer = read_tokenizer(str(train(tmp_path / "own", "unigram", byte_fallback=True)), None)
    tokenizer.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    again = read_tokenizer(str(tmp_path / "saved"), None)
    for text in strings():
        assert again(text)["input_ids"] == tokenizer(text)["input_ids"], text


@pytest.mark.parametrize("content", [b"IQ== 0\nIg== 1\n", b""], ids=["ranks of tiktoken", "empty"])
def test_another_file_of_that_name_is_refused(tmp_path, content):
    pytest.importorskip("sentencepiece")
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(DataError, match="not a SentencePiece model"):
        read_tokenizer(str(tmp_path), None)


def test_models_of_words_are_refused(tmp_path):
    folder = train(tmp_path, "word", use_all_vocab=False)
    with pytest.raises(DataError, match="models of words or characters"):
        read_tokenizer(str(folder), None)


def test_without_the_library_the_extra_is_named(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.model").write_bytes(b"\n")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(DataError) as refused:
        read_tokenizer(str(tmp_path), None)
    assert refused.value.hint == 'pip install "hetero-framework[sentencepiece]"'
