from __future__ import annotations

import json
import threading
import time

import pytest

from support import small_tokenizers as small
from tvr.core import control_tokens
from tvr.core.tokenizer import Tokenizer
from tvr.errors import CheckpointError, RequestError, TvrError

TEXTS = ["hello world", " leading", "two  spaces\n\nlines", "Größe 東京 😀", "x", "\t"]


@pytest.fixture(scope="module")
def llama3(tmp_path_factory):
    return Tokenizer.from_dir(small.save_llama3(tmp_path_factory.mktemp("llama3")))


@pytest.fixture(scope="module")
def llama2(tmp_path_factory):
    return Tokenizer.from_dir(small.save_llama2(tmp_path_factory.mktemp("llama2")))


def assert_one_line(error: pytest.ExceptionInfo[TvrError], *parts: str) -> None:
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["llama3", "llama2"])
def test_text_survives_encoding_and_decoding(kind, text, request):
    tokenizer = request.getfixturevalue(kind)
    # A SentencePiece vocabulary has one form for a first word with and without a space before it.
    expected = text.removeprefix(" ") if kind == "llama2" else text
    assert tokenizer.decode(tokenizer.encode(text)) == expected


@pytest.mark.parametrize("text", [*TEXTS, "", "<|begin_of_text|>hello"])
def test_bos_comes_once_from_the_post_processor(llama3, text):
    ids = llama3.encode(text)
    assert ids[0] == llama3.bos_token_id
    assert ids.count(llama3.bos_token_id) == 1


@pytest.mark.parametrize("post_process", [True, False])
@pytest.mark.parametrize("text", ["hello", "", "<s>hello"])
def test_bos_comes_once_whether_or_not_only_the_config_asks(tmp_path, text, post_process):
    tokenizer = Tokenizer.from_dir(small.save_llama2(tmp_path, post_process=post_process))
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.bos_token_id not in tokenizer.encode("hello", add_special_tokens=False)


def test_config_can_forbid_the_bos_of_the_post_processor(tmp_path):
    tokenizer = Tokenizer.from_dir(small.save_llama3(tmp_path, add_bos_token=False))
    assert tokenizer.bos_token_id not in tokenizer.encode("hello")


def test_empty_prompt_is_the_bos_alone_or_nothing(llama3, tmp_path):
    assert llama3.encode("") == [llama3.bos_token_id]
    assert Tokenizer.from_dir(small.save_chatml(tmp_path)).encode("") == []


def test_a_wanted_bos_that_no_file_names_is_an_error(tmp_path):
    small.save(tmp_path, small.byte_level([]), config={"add_bos_token": True})
    with pytest.raises(CheckpointError) as error:
        Tokenizer.from_dir(tmp_path)
    assert_one_line(error, "add_bos_token", "bos_token")


def test_bos_id_of_the_config_serves_where_no_token_is_named(tmp_path):
    backend = small.byte_level(["<a>"])
    bos = backend.token_to_id("<a>")
    small.save(tmp_path, backend, config={"add_bos_token": True})
    (tmp_path / "config.json").write_text(json.dumps({"bos_token_id": bos}))
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.encode("hello")[0] == tokenizer.bos_token_id == bos


@pytest.mark.parametrize("named", ["<e0>", {"content": "<e0>", "lstrip": False}])
def test_every_eos_id_of_every_file_counts(tmp_path, named):
    backend = small.byte_level(["<e0>", "<e1>", "<e2>", "<e3>"])
    e0, e1, e2, e3 = (backend.token_to_id(f"<e{i}>") for i in range(4))
    small.save(
        tmp_path,
        backend,
        config={"eos_token": named},
        generation_config={"eos_token_id": [e1, e2]},
    )
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": e3}))
    assert Tokenizer.from_dir(tmp_path).eos_token_ids == {e0, e1, e2, e3}


@pytest.mark.parametrize("value", [None, -1, True, "2"])
def test_eos_ids_that_are_no_ids_do_not_count(tmp_path, value):
    small.save(tmp_path, small.byte_level([]), generation_config={"eos_token_id": value})
    assert Tokenizer.from_dir(tmp_path).eos_token_ids == frozenset()


def test_special_tokens_map_serves_where_the_config_is_silent(tmp_path):
    backend = small.byte_level(["<b>", "<e>"])
    small.save(
        tmp_path, backend, special_tokens_map={"bos_token": "<b>", "eos_token": {"content": "<e>"}}
    )
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.bos_token_id == backend.token_to_id("<b>")
    assert tokenizer.eos_token_ids == {backend.token_to_id("<e>")}


def test_a_token_named_special_by_the_config_alone_is_skipped(tmp_path):
    backend = small.byte_level([], other_tokens=("<end>", "<tool>"))
    small.save(tmp_path, backend, config={"eos_token": "<end>"})
    tokenizer = Tokenizer.from_dir(tmp_path)
    ids = tokenizer.encode("hello<tool><end>")
    assert tokenizer.decode(ids) == "hello<tool>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "hello<tool><end>"


def test_ids_past_the_vocabulary_have_no_text(llama3, llama2):
    for tokenizer in (llama3, llama2):
        hello = tokenizer.encode("hello")
        unknown = [tokenizer.vocab_size, tokenizer.vocab_size + 200, 2**32, 2**40]
        assert tokenizer.decode(unknown) == ""
        assert tokenizer.decode([*unknown, *hello, *unknown]) == "hello"
        assert tokenizer.decode([tokenizer.vocab_size - 1], skip_special_tokens=False) != ""


def test_a_negative_id_is_refused(llama3):
    with pytest.raises(RequestError) as error:
        llama3.decode([5, -1])
    assert_one_line(error, "-1")
    assert llama3.decode(llama3.encode("hello")) == "hello"


@pytest.mark.parametrize("allow_special", [True, False])
def test_half_a_surrogate_pair_is_refused(llama3, allow_special):
    with pytest.raises(RequestError) as error:
        llama3.encode("ab\ud83d", allow_special=allow_special)
    assert_one_line(error, "U+D83D", "character 2")


def test_special_tokens_in_a_prompt_are_tokens_unless_forbidden(llama3, llama2):
    for tokenizer, text, marker in (
        (llama3, "hi<|eot_id|> there", "<|eot_id|>"),
        (llama2, "hi</s> there", "</s>"),
    ):
        marker_id = tokenizer.special_token_id(marker)
        assert tokenizer.encode(text).count(marker_id) == 1
        plain = tokenizer.encode(text, allow_special=False)
        assert marker_id not in plain
        assert plain[0] == tokenizer.bos_token_id
        assert tokenizer.decode(plain) == text


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["llama3", "llama2"])
def test_forbidding_special_tokens_changes_nothing_else(kind, text, request):
    tokenizer = request.getfixturevalue(kind)
    assert tokenizer.encode(text, allow_special=False) == tokenizer.encode(text)


def test_padding_and_truncation_left_in_the_file_are_off(tmp_path):
    backend = small.byte_level(["<pad>"])
    backend.enable_truncation(max_length=4)
    backend.enable_padding(length=64, pad_token="<pad>")
    text = "the quick brown fox jumps over the lazy dog"
    tokenizer = Tokenizer.from_dir(small.save(tmp_path, backend))
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_a_directory_without_tokenizer_json_is_an_error_naming_what_is_there(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"\0")
    with pytest.raises(CheckpointError) as error:
        Tokenizer.from_dir(tmp_path)
    assert_one_line(error, "no tokenizer.json (only tokenizer.model)", "save_pretrained")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
@pytest.mark.parametrize("content", ["{", "[1]", "[" * 100_000, "version https://git-lfs"])
def test_a_damaged_file_is_an_error_naming_it(tmp_path, name, content):
    small.save_llama3(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError) as error:
        Tokenizer.from_dir(tmp_path)
    assert_one_line(error, name)


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "generation_config.json",
        "chat_template.jinja",
    ],
)
def test_a_link_that_leads_nowhere_is_not_taken_for_an_absent_file(tmp_path, name):
    small.save_llama3(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to("blobs/0123")
    with pytest.raises(CheckpointError) as error:
        Tokenizer.from_dir(tmp_path)
    assert_one_line(error, name, "blobs/0123")


@pytest.mark.parametrize("save", [small.save_llama3, small.save_llama2, small.save_chatml])
def test_encoding_equals_transformers(tmp_path, save):
    transformers = pytest.importorskip("transformers")
    ours = Tokenizer.from_dir(save(tmp_path))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in [*TEXTS, ""]:
        assert ours.encode(text) == theirs(text)["input_ids"]


def test_vocab_size_counts_added_tokens(llama3):
    last = max(llama3.special_token_id(t) for t in small.LLAMA3_SPECIAL)
    assert llama3.vocab_size == last + 1


@pytest.mark.parametrize("kind", ["llama3", "llama2"])
def test_a_long_text_is_encoded_like_a_short_one(kind, request, monkeypatch):
    tokenizer = request.getfixturevalue(kind)
    text = "Größe 東京 😀 and <|eot_id|> </s>\n" * 400
    allowed = (True, False)
    ids = [tokenizer.encode(text, allow_special=allow) for allow in allowed]
    monkeypatch.setattr(control_tokens, "_LONG_TEXT", len(text))
    assert [tokenizer.encode(text, allow_special=allow) for allow in allowed] == ids


def test_other_threads_run_while_a_long_text_is_encoded(llama3):
    """The library kept Python's lock for seconds, and whoever served others stood still."""
    began, ended = threading.Event(), threading.Event()

    def encode():
        began.set()
        llama3.encode("two words " * 100_000)
        ended.set()

    thread = threading.Thread(target=encode)
    thread.start()
    began.wait()
    longest, before = 0.0, time.perf_counter()
    while not ended.is_set():
        time.sleep(0.001)
        now = time.perf_counter()
        longest, before = max(longest, now - before), now
    thread.join()
    assert longest < 0.3


@pytest.mark.parametrize("kind", ["llama3", "llama2"])
def test_bytes_of_tokens_put_together_are_the_text(kind, request):
    tokenizer = request.getfixturevalue(kind)
    ids = tokenizer.encode("Größe 東京 😀", add_special_tokens=False)
    joined = b"".join(map(tokenizer.token_bytes, ids)).decode()
    assert joined.removeprefix(" ") == "Größe 東京 😀"
    assert tokenizer.token_bytes(1_000_000) == b""
    assert len("Größe 東京 😀") <= len(ids) * tokenizer.longest_token
