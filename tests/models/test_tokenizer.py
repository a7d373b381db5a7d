"""Tokenizers: SmolLM2's real one against Hugging Face's construction of it, and a tiny one."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics

import gguf
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from hsswap.errors import ArgumentError, ModelError
from hsswap.models import GgufFile, TextStream, Tokenizer, default_model_path, open_gguf
from tests.models.tiny_llama import WORDS, Change, Tiny, tiny_weights, write_tiny

TEXTS = [
    "",
    " ",
    "Hello, world! It's 12345 o'clock; they'll pay 3.14 € for ½ of it.",
    "Grüße aus Zürich, naïve café, Ελλάδα, Россия, 日本語の文章, 한국어, العربية, हिन्दी",
    "emoji 👩‍👩‍👧‍👦 🇨🇭 👍🏽 and ٣٤٥ Arabic digits, Ⅷ, x² + y²",
    "tabs\tand\n\n\nlines  \r\n   with   spaces   ",
    "def f(x):\n        return x[1:-1] ** 2  # comment\n",
    "<|im_start|>user\nnot a control token<|im_end|>",
]


@pytest.fixture(scope="module")
def smollm_file() -> GgufFile:
    return open_gguf(default_model_path())


@pytest.fixture(scope="module")
def smollm(smollm_file: GgufFile) -> Tokenizer:
    return Tokenizer.from_gguf(smollm_file)


def tiny_tokenizer(tmp_path: Path, change: Change | None = None, pre: str = "smollm") -> Tokenizer:
    tiny = Tiny()
    path = tmp_path / "tiny.gguf"
    write_tiny(path, tiny, tiny_weights(tiny), change=change, pre=pre)
    return Tokenizer.from_gguf(open_gguf(path))


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(smollm: Tokenizer, text: str) -> None:
    ids = smollm.encode(text)
    assert smollm.decode(ids) == text
    stream = TextStream(smollm)
    assert "".join([*map(stream.push, ids), stream.finish()]) == text


# Characters whose UTF-8 has a byte that SmolLM2's vocabulary lacks are in the next test.
@given(st.text(st.characters(min_codepoint=0x20, max_codepoint=0xFFFF, exclude_categories=["Cs"])))
def test_round_trip_of_any_text(smollm: Tokenizer, text: str) -> None:
    assert smollm.decode(smollm.encode(text)) == text


def test_bytes_without_a_token_are_left_out(smollm: Tokenizer) -> None:
    assert smollm.decode(smollm.encode("a\x04b\x16")) == "ab"


def test_same_ids_as_hugging_face_builds_it(smollm_file: GgufFile, smollm: Tokenizer) -> None:
    """SmolLM2's own tokenizer.json: Digits(individual) then ByteLevel with its built-in regex."""
    vocab = {t: i for i, t in enumerate(smollm_file.get_list("tokenizer.ggml.tokens", str))}
    lines = smollm_file.get_list("tokenizer.ggml.merges", str)
    merges = [(line.split(" ")[0], line.split(" ")[1]) for line in lines]
    theirs = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    theirs.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    for text in [*TEXTS, topics["integers"], topics["strings"], topics["formatstrings"]]:
        assert smollm.encode(text) == theirs.encode(text).ids


def test_known_ids(smollm: Tokenizer) -> None:
    assert smollm.encode("Hello world") == [19556, 905]
    assert smollm.encode("2024") == [smollm.encode(digit)[0] for digit in "2024"]
    assert (smollm.bos_id, smollm.eos_id, smollm.vocab_size) == (1, 2, 49152)
    assert smollm.stop_ids == {2}
    assert not smollm.adds_bos


def test_control_tokens_only_when_asked(smollm: Tokenizer) -> None:
    text = "<|im_start|>user\nHi<|im_end|>"
    plain = smollm.encode(text)
    assert not {0, 1, 2} & set(plain)
    special = smollm.encode(text, parse_special=True)
    assert (special[0], special[-1]) == (1, 2)
    assert smollm.decode(special) == "user\nHi"
    assert smollm.decode(special, special=True) == text


def test_stream_holds_back_unfinished_characters(smollm: Tokenizer) -> None:
    ids = smollm.encode("🜁")
    assert len(ids) > 1
    stream = TextStream(smollm)
    assert [stream.push(token_id) for token_id in ids] == [""] * (len(ids) - 1) + ["🜁"]
    assert stream.push(ids[0]) == ""
    assert stream.finish() == "\ufffd"
    assert stream.push(smollm.encode("x")[0]) == "x"


def test_bad_arguments(smollm: Tokenizer) -> None:
    with pytest.raises(ArgumentError, match="lone surrogate at character 1"):
        smollm.encode("a\ud800")
    for token_id in (-1, smollm.vocab_size):
        with pytest.raises(ArgumentError, match="not in 0"):
            smollm.decode([token_id])


def test_tiny_merges_and_bos(tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_bos_token_id(3)
        writer.add_add_bos_token(True)
        writer.add_eot_token_id(5)

    tokenizer = tiny_tokenizer(tmp_path, add)
    assert tokenizer.encode("abc a12") == [3, *map(WORDS.index, ["abc", "Ġa", "1", "2"])]
    assert tokenizer.encode("ab", add_bos=False) == [WORDS.index("ab")]
    assert tokenizer.stop_ids == {WORDS.index("<|end|>"), 5}


def test_bos_asked_for_without_one(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="no BOS"):
        tiny_tokenizer(tmp_path).encode("a", add_bos=True)


def test_user_defined_tokens_are_always_found(tmp_path: Path) -> None:
    def user_defined(writer: gguf.GGUFWriter) -> None:
        del writer.kv_data[0]["tokenizer.ggml.token_type"]
        writer.add_token_types([4 if word in {"<|end|>", "a", "abc"} else 1 for word in WORDS])

    tokenizer = tiny_tokenizer(tmp_path, user_defined)
    end = WORDS.index("<|end|>")
    assert tokenizer.encode("a<|end|>b") == [0, end, 1]
    assert tokenizer.decode([0, end, 1]) == "a<|end|>b"
    # The longest wins, before any merge.
    assert tokenizer.encode("abc ab") == [*map(WORDS.index, ["abc", "Ġ", "a", "b"])]


@pytest.mark.parametrize("pre", ["gpt-2", "gpt2", "default", "llama-bpe"])
def test_other_splits(tmp_path: Path, pre: str) -> None:
    tokenizer = tiny_tokenizer(tmp_path, pre=pre)
    assert tokenizer.decode(tokenizer.encode("abc a\n12 d")) == "abc a\n12 d"


def test_unknown_split_and_kind_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="pre-tokenizer 'qwen2'"):
        tiny_tokenizer(tmp_path, pre="qwen2")

    def other_kind(writer: gguf.GGUFWriter) -> None:
        del writer.kv_data[0]["tokenizer.ggml.model"]
        writer.add_tokenizer_model("bert")

    with pytest.raises(ModelError, match="kind 'bert'"):
        tiny_tokenizer(tmp_path, other_kind)


def test_merges_that_do_not_fit(tmp_path: Path) -> None:
    def wrong(writer: gguf.GGUFWriter) -> None:
        del writer.kv_data[0]["tokenizer.ggml.merges"]
        writer.add_token_merges(["a q"])

    with pytest.raises(ModelError, match="merges do not fit"):
        tiny_tokenizer(tmp_path, wrong)
