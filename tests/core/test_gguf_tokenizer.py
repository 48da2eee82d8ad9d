"""The tokenizer of a GGUF file gives the tokens of the one it was written from."""

from __future__ import annotations

import heapq
import random
from itertools import pairwise
from pathlib import Path

import pytest
from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from support.gguf_files import byte_level_metadata, sentencepiece_metadata, write_gguf
from support.small_tokenizers import (
    CHATML_TEMPLATE,
    LINES,
    LLAMA3_SPECIAL,
    LLAMA3_TEMPLATE,
    byte_level,
    save,
    save_chatml,
    save_llama3,
)
from tvr.core.gguf.byte_level import KINDS
from tvr.core.gguf.file import GGUFFile
from tvr.core.gguf.tokenizer import read_tokenizer
from tvr.core.tokenizer import Tokenizer as TvrTokenizer
from tvr.errors import CheckpointError, ConfigError

#: What the models of each kind have in tokenizer.json; see their repositories.
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

TEXTS = [
    *LINES,
    "",
    " ",
    " a",
    "a ",
    "It's you'll we've I'M HE'S don't",
    "def f(x):\n    return x  # 2024,  3.14\r\n\n\n\tEnd's  \n ",
    "1 12 123 1234 12345 ½ Ⅻ ٣٤٥",
    "a+b=c <d> ~e^f|g $h (i) [j] {k} 'l' \"m\" …n— ¿o?",
    "café naïve Größe 東京 هذا नमस्ते 한국어 🦙👩‍👩‍👧 e\u0301 \u200b\u00a0x\u3000y",
    "CamelCaseWORDSandSHOUTING iPhone",
    "<|eot_id|> and <|im_end|> and <|im_start|>user</s><s><unk>",
]


def varied_texts(seed: int) -> list[str]:
    """Return the texts above and many random ones over their characters."""
    rng = random.Random(seed)
    pool = sorted(set("".join(TEXTS))) + [" ", "\n", "e", "t"] * 8
    return TEXTS + ["".join(rng.choices(pool, k=rng.randrange(1, 40))) for _ in range(300)]


def from_metadata(path: Path, metadata: dict[str, object]) -> TvrTokenizer:
    files = read_tokenizer(GGUFFile.open(write_gguf(path / "x.gguf", metadata=metadata)))
    assert files is not None
    return TvrTokenizer(files)


def assert_same(found: TvrTokenizer, expected: TvrTokenizer, seed: int) -> None:
    for text in varied_texts(seed):
        ids = expected.encode(text)
        assert found.encode(text) == ids, text
        assert found.encode(text, allow_special=False) == expected.encode(text, allow_special=False)
        assert found.decode(ids) == expected.decode(ids)
    for name in ("bos_token_id", "eos_token_ids", "vocab_size"):
        assert getattr(found, name) == getattr(expected, name), name


def trained(pre_tokenizer: pre_tokenizers.PreTokenizer, **options: bool) -> Tokenizer:
    """Return a byte-level BPE trained on words cut by `pre_tokenizer`."""
    backend = Tokenizer(models.BPE(**options))
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(TEXTS * 3, trainer)
    return backend


BYTES_ONLY = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False)


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


#: The pre-tokenizer in the tokenizer.json of GPT-2, Llama 3, SmolLM2 and Mistral Nemo.
PUBLISHED = {
    "gpt-2": WORDS,
    "llama-bpe": pre_tokenizers.Sequence([split(LLAMA3_SPLIT), BYTES_ONLY]),
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), WORDS]),
    "tekken": pre_tokenizers.Sequence(
        [
            split(
                r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
                r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
                r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
            BYTES_ONLY,
        ]
    ),
}


@pytest.mark.parametrize("pre", PUBLISHED)
def test_each_kind_of_byte_level_bpe_gives_the_tokens_of_its_tokenizer_json(tmp_path, pre):
    backend = trained(PUBLISHED[pre], ignore_merges=pre in ("llama-bpe", "tekken"))
    backend.add_special_tokens(
        [AddedToken(t, normalized=False) for t in ("<|eot_id|>", "<|im_start|>")]
    )
    backend.add_tokens([AddedToken("CamelCase", normalized=False)])
    eos, bos = backend.token_to_id("<|eot_id|>"), backend.token_to_id("<|im_start|>")
    directory = save(
        tmp_path / "hf",
        backend,
        config={
            "bos_token": "<|im_start|>",
            "eos_token": "<|eot_id|>",
            "add_bos_token": pre in ("llama-bpe", "tekken"),
        },
    )
    metadata = byte_level_metadata(backend, pre, bos_token_id=bos, eos_token_id=eos)
    found = from_metadata(tmp_path, metadata)
    assert_same(found, TvrTokenizer.from_dir(directory), seed=1)
    assert found.special_token_id("<|eot_id|>") == eos
    assert found.special_token_id("CamelCase") is None


@pytest.mark.parametrize(
    ("pre", "whole"), [("llama-bpe", True), ("tekken", True), ("gpt-2", False)]
)
def test_a_word_that_no_merge_makes_is_still_a_token_of_some_kinds(tmp_path, pre, whole):
    metadata = byte_level_metadata(byte_level([]), pre)
    metadata["tokenizer.ggml.tokens"] += ["xyzzy"]
    metadata["tokenizer.ggml.token_type"] += [1]
    found = from_metadata(tmp_path, metadata)
    assert (found.encode("xyzzy") == [found.vocab_size - 1]) == whole


def test_kinds_cut_words_differently():
    """Else the test above could not tell them apart."""
    cuts = {
        pre: tuple(
            tuple(piece for piece, _ in cutter.pre_tokenize_str(text)) for text in varied_texts(1)
        )
        for pre, cutter in PUBLISHED.items()
    }
    assert len(set(cuts.values())) == len(PUBLISHED)


def test_the_documentation_names_every_kind():
    text = (Path(__file__).parents[2] / "docs" / "gguf.md").read_text(encoding="utf-8")
    assert [pre for pre in KINDS if f"`{pre}`" not in text] == []


def test_names_of_one_kind_are_one_kind():
    assert KINDS["llama3"] == KINDS["llama-v3"] == KINDS["llama-bpe"]
    assert KINDS["starcoder"] == KINDS["refact"] == KINDS["smollm"]


@pytest.mark.parametrize("pre", ["default", None])
def test_the_default_kind_cuts_punctuation_then_words_then_three_digits(tmp_path, pre):
    metadata = byte_level_metadata(byte_level([]), pre)
    files = read_tokenizer(GGUFFile.open(write_gguf(tmp_path / "x.gguf", metadata=metadata)))
    pieces = ["a", "+=", "b", " ", "..", " it", "'", "s", " ", "123", "456", "78", " \n"]
    cut = files.backend.pre_tokenizer.pre_tokenize_str("".join(pieces))
    assert [piece for piece, _ in cut] == [p.replace(" ", "Ġ").replace("\n", "Ċ") for p in pieces]


@pytest.mark.parametrize("pre", ["qwen2", "deepseek-llm", "gpt-4o", "of tomorrow"])
def test_unknown_kinds_of_byte_level_bpe_are_refused_by_name(tmp_path, pre):
    with pytest.raises(ConfigError, match=f"tokenizer.ggml.pre '{pre}' is not supported"):
        from_metadata(tmp_path, byte_level_metadata(byte_level([]), pre))


@pytest.mark.parametrize("model", ["bert", "t5", "rwkv", "gemma4"])
def test_unknown_kinds_of_tokenizers_are_refused_by_name(tmp_path, model):
    metadata = byte_level_metadata(byte_level([]), "gpt-2") | {"tokenizer.ggml.model": model}
    with pytest.raises(ConfigError, match=f"tokenizer.ggml.model '{model}' is not supported"):
        from_metadata(tmp_path, metadata)


def test_a_file_without_a_tokenizer_has_none(tmp_path):
    assert read_tokenizer(GGUFFile.open(write_gguf(tmp_path / "x.gguf"))) is None
    none = write_gguf(tmp_path / "y.gguf", metadata={"tokenizer.ggml.model": "none"})
    assert read_tokenizer(GGUFFile.open(none)) is None


# --- SentencePiece


def pieces_of(seed: int) -> list[tuple[str, float, TokenType]]:
    """Return a vocabulary: three special tokens, the bytes, then pieces with falling scores."""
    rng = random.Random(seed)
    text = "▁" + "▁".join(LINES[0].split() + LINES[1].split()) * 2 + "▁▁▁▁aaaa====東京"
    found: dict[str, None] = {}
    while len(found) < 250:
        start = rng.randrange(len(text))
        found[text[start : start + rng.choice([2, 2, 2, 3, 3, 4, 5, 6])]] = None
    # "<s" and ">" would make "<s>" if control tokens were merged from pieces.
    words = [w for w in found if len(w) > 1] + ["<s", "</", "s>"]
    pieces = [("<unk>", 0.0, TokenType.UNKNOWN)]
    pieces += [(t, 0.0, TokenType.CONTROL) for t in ("<s>", "</s>")]
    pieces += [(f"<0x{b:02X}>", 0.0, TokenType.BYTE) for b in range(256)]
    pieces += [(w, -float(rank), TokenType.NORMAL) for rank, w in enumerate(words)]
    characters = sorted(set("".join(words)) | set("<>/s"))
    pieces += [(c, -1000.0 - i, TokenType.NORMAL) for i, c in enumerate(characters)]
    return pieces


def sentencepiece_encode(pieces: list[tuple[str, float, TokenType]], text: str) -> list[int]:
    """SentencePiece's own algorithm: merge the neighbours of the best score, leftmost first."""
    normal = {p: (i, s) for i, (p, s, kind) in enumerate(pieces) if kind == TokenType.NORMAL}
    byte_ids = {p: i for i, (p, _, kind) in enumerate(pieces) if kind == TokenType.BYTE}
    symbols = list("▁" + text.replace(" ", "▁"))
    while True:
        candidates = [
            (-normal[left + right][1], i)
            for i, (left, right) in enumerate(pairwise(symbols))
            if left + right in normal
        ]
        if not candidates:
            break
        _, i = heapq.nsmallest(1, candidates)[0]
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    ids: list[int] = []
    for symbol in symbols:
        if symbol in normal:
            ids.append(normal[symbol][0])
        else:
            ids += [byte_ids[f"<0x{b:02X}>"] for b in symbol.encode()]
    return ids


LLAMA2_IDS = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}


@pytest.mark.parametrize("seed", range(3))
def test_sentencepiece_gives_the_tokens_of_its_own_algorithm(tmp_path, seed):
    pieces = pieces_of(seed)
    found = from_metadata(tmp_path, sentencepiece_metadata(pieces, **LLAMA2_IDS))
    for text in varied_texts(seed):
        # No text gives no tokens, not the space that is put before a text.
        expected = [1] + (sentencepiece_encode(pieces, text) if text else [])
        assert found.encode(text, allow_special=False) == expected, text
        assert found.decode(expected[1:]) == text
    assert (found.bos_token_id, found.eos_token_ids) == (1, {2})


def test_a_space_follows_every_special_token_as_llama_2_has_it(tmp_path):
    found = from_metadata(tmp_path, sentencepiece_metadata(pieces_of(0), **LLAMA2_IDS))
    word = found.encode("the", add_special_tokens=False)
    assert found.encode("<s>the</s>the") == [1, *word, 2, *word]
    assert found.encode("the<unk>", add_special_tokens=False) == [*word, 0]


def test_without_the_space_prefix_text_begins_as_it_is(tmp_path):
    pieces = pieces_of(0)
    metadata = sentencepiece_metadata(pieces, **LLAMA2_IDS, add_space_prefix=False)
    found = from_metadata(tmp_path, metadata)
    plain = from_metadata(tmp_path, sentencepiece_metadata(pieces, **LLAMA2_IDS))
    assert found.encode(" the") == plain.encode("the")
    assert found.decode(found.encode(" the")) == " the"


def test_llamas_ids_count_where_a_sentencepiece_file_names_none(tmp_path):
    found = from_metadata(tmp_path, sentencepiece_metadata(pieces_of(0)))
    assert (found.bos_token_id, found.eos_token_ids) == (1, {2})
    assert found.encode("the")[0] == 1


def test_unused_pieces_are_never_merged(tmp_path):
    pieces = pieces_of(0)
    at = next(i for i, (p, *_) in enumerate(pieces) if p == "▁the")
    pieces[at] = ("▁the", 0.0, TokenType.UNUSED)
    found = from_metadata(tmp_path, sentencepiece_metadata(pieces, **LLAMA2_IDS))
    assert found.encode("the", allow_special=False) == [1, *sentencepiece_encode(pieces, "the")]
    assert found.decode([at]) == ""


def test_control_tokens_are_never_made_of_characters(tmp_path):
    found = from_metadata(tmp_path, sentencepiece_metadata(pieces_of(0), **LLAMA2_IDS))
    assert not {0, 1, 2} & set(found.encode("<s></s><unk>", allow_special=False)[1:])
    assert found.encode("<s></s>")[1] == 2


# --- what both have


def test_chat_templates_are_laid_out_as_from_the_directory(tmp_path):
    directory = save_llama3(tmp_path / "hf")
    expected = TvrTokenizer.from_dir(directory)
    backend = byte_level(LLAMA3_SPECIAL)
    ids = {f"{n}_token_id": backend.token_to_id(f"<|{t}|>") for n, t in NAMED.items()}
    metadata = byte_level_metadata(backend, "gpt-2", add_bos_token=True, **ids)
    found = from_metadata(tmp_path, metadata | {"tokenizer.chat_template": LLAMA3_TEMPLATE})
    assert found.has_chat_template
    messages = [{"role": "user", "content": "hi<|eot_id|>"}, {"role": "assistant", "content": "a"}]
    assert found.apply_chat_template(messages) == expected.apply_chat_template(messages)
    assert found.eos_token_ids == expected.eos_token_ids
    assert found.encode("the") == expected.encode("the")


NAMED = {"bos": "begin_of_text", "eos": "end_of_text", "eot": "eot_id"}


def test_named_templates_are_kept_by_name(tmp_path):
    metadata = byte_level_metadata(byte_level([]), "gpt-2")
    metadata |= {
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template": "plain",
        "tokenizer.chat_template.tool_use": "tools",
    }
    files = read_tokenizer(GGUFFile.open(write_gguf(tmp_path / "x.gguf", metadata=metadata)))
    assert files.chat_templates == {"default": "plain", "tool_use": "tools"}


def test_a_chatml_file_equals_its_directory(tmp_path):
    expected = TvrTokenizer.from_dir(save_chatml(tmp_path / "hf"))
    backend = byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    bos, eos = backend.token_to_id("<|im_start|>"), backend.token_to_id("<|im_end|>")
    metadata = byte_level_metadata(backend, "gpt-2", bos_token_id=bos, eos_token_id=eos)
    metadata["tokenizer.chat_template"] = CHATML_TEMPLATE
    found = from_metadata(tmp_path, metadata)
    assert_same(found, expected, seed=2)
    messages = [{"role": "user", "content": "the cat"}]
    assert found.apply_chat_template(messages) == expected.apply_chat_template(messages)


def test_turns_end_at_eot_and_eom_also_where_the_file_names_only_eos(tmp_path):
    """Else the instruct models of files that name the base model's EOS would never stop."""
    backend = byte_level([*LLAMA3_SPECIAL, "<|eom_id|>"])
    eos = backend.token_to_id("<|end_of_text|>")
    found = from_metadata(tmp_path, byte_level_metadata(backend, "gpt-2", eos_token_id=eos))
    named = {backend.token_to_id(t) for t in ("<|eot_id|>", "<|eom_id|>")}
    assert found.eos_token_ids == {eos} | named


def test_every_id_that_ends_something_ends_an_answer(tmp_path):
    ends = ["<eos>", "<eot>", "<eom>"]
    backend = byte_level([*ends, "<other>"])
    ids = {f"{t[1:-1]}_token_id": backend.token_to_id(t) for t in ends}
    found = from_metadata(tmp_path, byte_level_metadata(backend, "gpt-2", **ids))
    assert found.eos_token_ids == set(ids.values())


def test_a_token_of_type_unknown_is_special(tmp_path):
    metadata = byte_level_metadata(byte_level([]), "gpt-2")
    metadata["tokenizer.ggml.tokens"] += ["<unk>"]
    metadata["tokenizer.ggml.token_type"] += [2]
    found = from_metadata(tmp_path, metadata)
    assert found.special_token_id("<unk>") == found.vocab_size - 1


def test_ids_outside_the_vocabulary_name_no_token(tmp_path):
    ids = {"bos_token_id": 2**32 - 1, "eos_token_id": 999, "padding_token_id": 3}
    found = from_metadata(tmp_path, byte_level_metadata(byte_level([]), "llama-bpe", **ids))
    assert (found.bos_token_id, found.eos_token_ids) == (None, frozenset())
    assert found.encode("the")  # and so none is put before a prompt


def test_unused_tokens_have_no_text_and_leave_the_others_their_ids(tmp_path):
    backend = byte_level(["<|im_end|>"])
    metadata = byte_level_metadata(backend, "gpt-2")
    size = backend.get_vocab_size()
    metadata["tokenizer.ggml.tokens"] += ["[PAD0]", "after", "[PAD1]"]
    metadata["tokenizer.ggml.token_type"] += [5, 3, 5]
    found = from_metadata(tmp_path, metadata)
    assert found.encode("[PAD0]after") == [*backend.encode("[PAD0]").ids, size + 1]
    assert found.decode([size, size + 2]) == ""
    assert found.vocab_size == size + 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"merges": [1, 2]}, "tokenizer.ggml.merges is not an array of str"),
        ({"merges": ["nospace"]}, "no usable tokenizer"),
        ({"merges": ["not there"]}, "no usable tokenizer"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": "text"}, "tokenizer.ggml.tokens is not an array of str"),
        ({"tokens": ["a", "b", "a"], "token_type": [1, 1, 1]}, "'a' twice, as 0 and as 2"),
        ({"token_type": [1]}, "tokenizer.ggml.token_type has 1 elements"),
        ({"tokens": ["a"], "token_type": [7]}, r"token_type has \[7\]"),
        ({"add_bos_token": True}, "add_bos_token is true"),
        ({"model": "llama"}, "tokenizer.ggml.scores is missing"),
    ],
)
def test_missing_and_contradictory_parts_are_refused_by_key(tmp_path, change, message):
    metadata = byte_level_metadata(byte_level([]), "gpt-2")
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    with pytest.raises(CheckpointError, match=message) as e:
        from_metadata(tmp_path, metadata)
    assert "x.gguf" in str(e.value)
    assert "\n" not in str(e.value)


def test_a_space_prefix_of_a_byte_level_vocabulary_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="add_space_prefix"):
        from_metadata(tmp_path, byte_level_metadata(byte_level([]), "gpt-2", add_space_prefix=True))
    from_metadata(tmp_path, byte_level_metadata(byte_level([]), "gpt-2", add_space_prefix=False))


def test_tokens_without_types_are_all_ordinary(tmp_path):
    metadata = byte_level_metadata(byte_level([]), "gpt-2")
    expected = from_metadata(tmp_path, dict(metadata))
    metadata["tokenizer.ggml.token_type"] = None
    assert_same(from_metadata(tmp_path, metadata), expected, seed=3)
