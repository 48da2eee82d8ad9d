from __future__ import annotations

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from tokenizers import Regex

from support import small_tokenizers as small
from tvr.core.detokenizer import Decoding, IncrementalDetokenizer
from tvr.core.outputs import CompletionOutput
from tvr.core.tokenizer import Tokenizer
from tvr.errors import RequestError

FFFD = "\ufffd"
KINDS = ["byte_level", "byte_fallback", "word_level"]


@pytest.fixture(scope="module")
def by_kind(tmp_path_factory):
    """(tvr's tokenizer, the library's) by kind; two special tokens, one added token not special."""
    made = {}
    for kind in KINDS:
        path = tmp_path_factory.mktemp(kind)
        if kind == "byte_level":
            backend = small.byte_level(["<s>", "</s>"], other_tokens=("<tool>", "é "))
        else:
            backend = getattr(small, kind)()
            backend.add_tokens(["<tool>"])
        made[kind] = Tokenizer.from_dir(small.save(path, backend)), backend
    return made


def byte_ids(kind, backend, data: bytes) -> list[int]:
    if kind == "byte_fallback":
        return [backend.token_to_id(f"<0x{b:02X}>") for b in data]
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return [
        backend.token_to_id(chr(b if b in printable else 0x100 + others.index(b))) for b in data
    ]


def stream(tokenizer, ids, **options) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, **{"prompt_token_ids": (), **options})
    return [*map(detokenizer.push, ids), detokenizer.flush()]


def runs(backend, ids, skip) -> list[str | bytes]:
    """Return the tokens' texts and, between them, the bytes of each run of byte tokens."""
    found: list[str | bytes] = []
    for token in map(backend.id_to_token, ids):
        if token is None or (skip and token in ("<s>", "</s>", "<unk>")):
            continue
        if len(token) == 6 and token.startswith("<0x"):
            if not found or isinstance(found[-1], str):
                found.append(b"")
            found[-1] += bytes([int(token[3:5], 16)])
        else:
            found.append(token.replace("▁", " "))
    return found


def whole_characters(run: bytes) -> str:
    """Return the characters of `run` before its first invalid or missing byte."""
    while True:
        try:
            return run.decode()
        except UnicodeDecodeError:
            run = run[:-1]


@seed(0)
@settings(max_examples=400, deadline=None, database=None)
@given(data=st.data())
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_streamed_text_is_the_librarys_full_decode(by_kind, kind, skip, data):
    tokenizer, backend = by_kind[kind]
    # Ids past the vocabulary too; and byte tokens often, as those are the hard part.
    ids = st.integers(0, tokenizer.vocab_size + 3)
    some_bytes = st.sampled_from([0x20, 0x41, 0x80, 0xBD, 0xE4, 0xB8, 0xF0, 0x9F, 0x98, 0xED])
    one_byte = some_bytes.map(lambda b: byte_ids(kind, backend, bytes([b]))[0])
    tokens = data.draw(st.lists(ids | one_byte, max_size=40))
    texts = stream(tokenizer, tokens, skip_special_tokens=skip)
    text = "".join(texts)
    assert text == tokenizer.decode(tokens, skip_special_tokens=skip)
    full = backend.decode(tokens, skip_special_tokens=skip)
    if kind == "byte_level":
        assert text == full
        return
    # The one difference: the library drops characters already whole when a run turns bad.
    expected, differs = "", False
    for run in runs(backend, tokens, skip):
        if isinstance(run, bytes):
            good = whole_characters(run)
            num_bad = len(run) - len(good.encode())
            differs |= bool(good and num_bad)
            run = good + FFFD * num_bad
        expected += run
    assert text == expected.removeprefix(" ")
    assert differs or text == full


@seed(1)
@settings(max_examples=200, deadline=None, database=None)
@given(text=st.text(max_size=40), cut=st.integers(0, 200))
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_output_after_a_prompt_is_what_it_adds_to_the_prompt(by_kind, kind, text, cut):
    tokenizer, backend = by_kind[kind]
    ids = tokenizer.encode("hello " + text, allow_special=False)
    cut = min(cut, len(ids))
    prompt, output = ids[:cut], ids[cut:]
    added = "".join(stream(tokenizer, output, prompt_token_ids=prompt))
    before = backend.decode(prompt)
    if not before.endswith(FFFD):  # else the prompt ends inside a character
        assert before + added == backend.decode(ids)


def test_the_space_of_the_first_word_stays_behind_a_prompt(by_kind):
    tokenizer, backend = by_kind["byte_fallback"]
    word = [backend.token_to_id("▁the")]
    bos = [backend.token_to_id("<s>")]
    prompt = tokenizer.encode("hello")
    assert "".join(stream(tokenizer, word, prompt_token_ids=prompt)) == " the"
    assert "".join(stream(tokenizer, word, prompt_token_ids=None)) == " the"
    assert "".join(stream(tokenizer, word, prompt_token_ids=bos)) == "the"
    assert "".join(stream(tokenizer, word, prompt_token_ids=())) == "the"


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_a_character_comes_out_with_its_last_byte(by_kind, kind):
    tokenizer, backend = by_kind[kind]
    ids = byte_ids(kind, backend, "中😀".encode())
    assert stream(tokenizer, ids) == ["", "", "中", "", "", "", "😀", ""]


def test_a_character_cut_between_prompt_and_output_comes_out_whole(by_kind):
    tokenizer, backend = by_kind["byte_level"]
    ids = byte_ids("byte_level", backend, "中".encode())
    assert stream(tokenizer, ids[2:], prompt_token_ids=ids[:2]) == ["中", ""]


@pytest.mark.parametrize(("kind", "shown"), [("byte_level", FFFD), ("byte_fallback", FFFD * 2)])
def test_bytes_cut_off_by_a_word_come_out_once_and_the_word_is_whole(by_kind, kind, shown):
    tokenizer, backend = by_kind[kind]
    word = "Ġthe" if kind == "byte_level" else "▁the"
    ids = [*byte_ids(kind, backend, b"\xe4\xb8"), backend.token_to_id(word)]
    assert stream(tokenizer, ids) == ["", "", shown + " the", ""]
    assert "".join(stream(tokenizer, ids)) == backend.decode(ids)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_invalid_bytes_come_out_during_their_run(by_kind, kind):
    tokenizer, backend = by_kind[kind]
    ids = byte_ids(kind, backend, b"\x80") * 2000
    assert stream(tokenizer, ids) == [FFFD] * 2000 + [""]


def test_a_window_lets_invalid_bytes_out_during_their_run(by_kind, tmp_path):
    backend = small.byte_fallback()
    backend.decoder = small.decoders.Sequence(
        [small.decoders.ByteFallback(), small.decoders.Metaspace()]
    )
    tokenizer = Tokenizer.from_dir(small.save(tmp_path, backend))
    ids = byte_ids("byte_fallback", backend, b"\x80") * 200
    texts = stream(tokenizer, ids)
    assert "".join(texts) == FFFD * 200
    assert max(map(len, texts)) <= 8


@pytest.mark.parametrize(("kind", "shown"), [("byte_level", FFFD), ("byte_fallback", FFFD * 3)])
def test_half_a_character_at_the_end_is_flushed_once(by_kind, kind, shown):
    tokenizer, backend = by_kind[kind]
    ids = byte_ids(kind, backend, "😀😀".encode()[:7])
    texts = stream(tokenizer, ids)
    assert texts == ["", "", "", "😀", "", "", "", shown]
    assert tokenizer.decode(ids) == "😀" + shown
    detokenizer = IncrementalDetokenizer(tokenizer)
    for token_id in ids:
        detokenizer.push(token_id)
    assert detokenizer.flush() == shown
    assert detokenizer.flush() == ""


@seed(2)
@settings(max_examples=200, deadline=None, database=None)
@given(data=st.data())
def test_a_window_gives_the_librarys_full_decode(by_kind, data):
    tokenizer, backend = by_kind["word_level"]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=30))
    for skip in (True, False):
        text = "".join(stream(tokenizer, ids, skip_special_tokens=skip))
        assert text == backend.decode(ids, skip_special_tokens=skip)


def test_a_window_knows_the_prompt_before_it(by_kind):
    tokenizer, _ = by_kind["word_level"]
    prompt, output = tokenizer.encode("alpha beta"), tokenizer.encode("gamma")
    assert "".join(stream(tokenizer, output, prompt_token_ids=prompt)) == " gamma"


@pytest.mark.parametrize("kind", KINDS)
def test_a_negative_id_is_refused_and_later_tokens_go_on(by_kind, kind):
    tokenizer, _ = by_kind[kind]
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_token_ids=())
    for _ in range(2):
        with pytest.raises(RequestError, match="-1"):
            detokenizer.push(-1)
    word = tokenizer.encode("alpha" if kind == "word_level" else "hello")
    assert "".join(map(detokenizer.push, word)).endswith(tokenizer.decode(word))


def test_a_skipped_token_does_not_break_a_character(by_kind):
    for kind in ("byte_level", "byte_fallback"):
        tokenizer, backend = by_kind[kind]
        first, *rest = byte_ids(kind, backend, "中".encode())
        ids = [first, backend.token_to_id("</s>"), *rest]
        assert stream(tokenizer, ids) == ["", "", "", "中", ""]
        assert backend.decode(ids) == "中"


def test_a_regular_expression_in_the_decoder_is_left_to_the_library(tmp_path):
    backend = small.byte_fallback()
    backend.decoder = small.decoders.Sequence(
        [
            small.decoders.Replace(Regex("▁+"), "_"),
            small.decoders.ByteFallback(),
            small.decoders.Fuse(),
        ]
    )
    tokenizer = Tokenizer.from_dir(small.save(tmp_path, backend))
    ids = tokenizer.encode("hello the world")
    assert tokenizer.decode(ids) == backend.decode(ids) == "_hello_the_world"


class CountingBackend:
    """A library tokenizer that notes how many ids each decode is given."""

    def __init__(self, backend):
        self._backend = backend
        self.sizes = []

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def decode(self, ids, **options):
        self.sizes.append(len(ids))
        return self._backend.decode(ids, **options)


@pytest.mark.parametrize("data", [b"ab", b"\x80", "😀".encode()])
def test_a_window_stays_small_however_long_the_output(data):
    backend = small.byte_fallback()
    backend.decoder = small.decoders.Sequence(
        [small.decoders.ByteFallback(), small.decoders.Metaspace()]
    )
    counting = CountingBackend(backend)
    stream = Decoding(counting, frozenset()).stream(True, None)
    ids = byte_ids("byte_fallback", backend, data * 2000)
    for token_id in ids:
        stream.push(token_id)
    assert max(counting.sizes) <= 16
    assert len(counting.sizes) <= 2 * len(ids)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_the_usual_decoders_are_not_run_at_all(kind):
    counting = CountingBackend(getattr(small, kind)(*([["<s>"]] if kind == "byte_level" else [])))
    stream = Decoding(counting, frozenset()).stream(True, None)
    ids = counting.encode("hello world, hello there")
    assert "".join(map(stream.push, ids.ids)).strip() == "hello world, hello there"
    assert counting.sizes == []


def test_an_output_counts_the_tokens_it_was_given_not_those_of_its_text(by_kind):
    tokenizer, backend = by_kind["byte_level"]
    ids = byte_ids("byte_level", backend, b" the") * 20 + [backend.token_to_id("</s>")]
    detokenizer = IncrementalDetokenizer(tokenizer)
    output = CompletionOutput(index=0)
    for token_id in ids:
        output.append(token_id, detokenizer.push(token_id))
    output.append_text(detokenizer.flush())
    assert output.text == " the" * 20
    assert len(output.token_ids) == 81
    assert len(tokenizer.encode(output.text)) < 81


def test_a_held_output_text_does_not_change_when_the_output_grows():
    output = CompletionOutput(index=0, text="ab")
    before = output.text
    output.append(1, "cd")
    assert (before, output.text) == ("ab", "abcd")
