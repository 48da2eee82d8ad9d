"""A GGUF header is read exactly, and a hostile one is refused in one line that names the file."""

from __future__ import annotations

import random
import struct
import sys

import gguf
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.engines import save_shape
from support.gguf_files import write_gguf
from tvr.core.gguf.checkpoint import GGUFCheckpoint
from tvr.core.gguf.file import GGUFFile
from tvr.errors import CheckpointError, ConfigError

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b.c": torch.tensor([7.0, 8.0])}


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def header(*, fields: bytes = b"", tensors: bytes = b"", counts=(0, 0), version=3) -> bytes:
    """Return the start of a file with `counts` tensors and fields."""
    return b"GGUF" + struct.pack("<IQQ", version, *counts) + fields + tensors + bytes(64)


def tensor_entry(name: str, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    shape = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return string(name) + shape + struct.pack("<IQ", kind, offset)


@pytest.fixture
def refuse(tmp_path):
    """Return a function that writes bytes, which must be refused, and returns the message."""

    def check(data: bytes) -> str:
        path = tmp_path / "model.gguf"
        path.write_bytes(data)
        with pytest.raises(CheckpointError) as e:
            GGUFFile.open(path)
        message = str(e.value)
        assert message.startswith(str(path))
        assert "\n" not in message
        return message

    return check


def test_every_value_type_and_tensor_is_read_as_it_was_written(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    scalars = {
        "uint8": 255,
        "int8": -128,
        "uint16": 65535,
        "int16": -32768,
        "uint32": 2**32 - 1,
        "int32": -(2**31),
        "uint64": 2**64 - 1,
        "int64": -(2**63),
        "float32": 1e-5,
        "float64": 0.1,
        "bool": True,
        "string": "é 東京",
    }
    for kind, value in scalars.items():
        getattr(writer, f"add_{kind}")(kind, value)
    arrays = {"ints": [3, -4], "floats": [0.5, -2.0], "strings": ["", "b", "ö"], "flags": [True]}
    for key, value in arrays.items():
        writer.add_array(key, value)
    for name, tensor in TENSORS.items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    file = GGUFFile.open(tmp_path / "x.gguf")
    assert file.metadata == {"general.architecture": "llama", **scalars, **arrays}
    assert {name: t.shape for name, t in file.tensors.items()} == {"a": (2, 3), "b.c": (2,)}
    for name, tensor in TENSORS.items():
        assert file.rows(name).tobytes() == tensor.numpy().tobytes()


def test_another_alignment_of_the_tensor_data_is_kept(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_custom_alignment(1024)
    for name, tensor in TENSORS.items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile.open(tmp_path / "x.gguf")
    for name, tensor in TENSORS.items():
        assert file.rows(name).tobytes() == tensor.numpy().tobytes()


def test_a_file_that_is_no_gguf_file_is_refused_for_what_it_is(refuse):
    assert "begins with b''" in refuse(b"")
    assert "begins with b'PK" in refuse(b"PK\x03\x04" + bytes(100))
    assert "has 4 bytes" in refuse(b"GGUF")
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 98362432\n"
    assert "Git LFS pointer" in refuse(pointer)
    assert "git lfs pull" in refuse(pointer)


def test_a_missing_file_and_a_dangling_link_are_refused_by_name(tmp_path):
    link = tmp_path / "link.gguf"
    link.symlink_to("nowhere.gguf")
    for path in (link, tmp_path / "missing.gguf"):
        with pytest.raises(CheckpointError, match=path.name):
            GGUFFile.open(path)


@pytest.mark.parametrize("version", [0x03000000, 0x02000000])
def test_a_big_endian_header_is_refused_by_name(refuse, version):
    assert "big-endian" in refuse(header(version=version))


def test_a_big_endian_file_is_refused_by_name(tmp_path):
    path = write_gguf(tmp_path / "x.gguf", tensors=TENSORS, endianess=gguf.GGUFEndian.BIG)
    with pytest.raises(CheckpointError, match="big-endian"):
        GGUFFile.open(path)


@pytest.mark.parametrize("version", [1, 4, 2**32 - 1])
def test_other_versions_are_refused_by_number(refuse, version):
    assert f"version {version}" in refuse(header(version=version))


@pytest.mark.parametrize("count", [10, 2**31, 2**63, 2**64 - 1])
@pytest.mark.parametrize("what", ["tensors", "metadata fields"])
def test_absurd_counts_are_refused_at_once(refuse, count, what):
    counts = (count, 0) if what == "tensors" else (0, count)
    assert f"{count:,} {what}" in refuse(header(counts=counts))


@pytest.mark.parametrize("length", [2**20, 2**63, 2**64 - 1])
def test_absurd_lengths_of_strings_and_arrays_are_refused_at_once(refuse, length):
    raw_length = struct.pack("<Q", length)
    assert "metadata field 0" in refuse(header(fields=raw_length, counts=(0, 1)))
    text = string("key") + struct.pack("<I", 8) + raw_length
    assert "metadata field key" in refuse(header(fields=text, counts=(0, 1)))
    for element in (4, 8):
        array = string("key") + struct.pack("<II", 9, element) + raw_length
        assert "metadata field key" in refuse(header(fields=array, counts=(0, 1)))
    assert "tensor 0" in refuse(header(tensors=raw_length, counts=(1, 0)))


def test_damaged_metadata_is_refused_by_key(refuse):
    def field(kind: int, value: bytes, key: str | bytes = "key") -> bytes:
        return string(key) + struct.pack("<I", kind) + value

    assert "key has type 99" in refuse(header(fields=field(99, bytes(8)), counts=(0, 1)))
    nested = struct.pack("<IQ", 9, 1) + bytes(40)
    assert "key has type 9" in refuse(header(fields=field(9, nested), counts=(0, 1)))
    assert "not UTF-8" in refuse(header(fields=field(8, string(b"\xff")), counts=(0, 1)))
    assert "not UTF-8" in refuse(header(fields=field(7, b"\1", b"\xff"), counts=(0, 1)))
    assert r"is 'a\nb'" in refuse(header(fields=field(7, b"\1", "a\nb"), counts=(0, 1)))
    twice = field(7, b"\1") * 2
    assert "key is there twice" in refuse(header(fields=twice, counts=(0, 2)))
    for number in (0, 33):
        alignment = field(4, struct.pack("<I", number), "general.alignment")
        message = refuse(header(fields=alignment, counts=(0, 1)))
        assert f"general.alignment is {number}" in message


def test_damaged_tensor_entries_are_refused_by_tensor(refuse):
    def entries(*tensors: bytes) -> bytes:
        return header(tensors=b"".join(tensors), counts=(len(tensors), 0))

    for dims in ([], [1] * 5):
        assert f"tensor w has {len(dims)} dimensions" in refuse(entries(tensor_entry("w", dims)))
    assert "w is there twice" in refuse(entries(tensor_entry("w", [1]), tensor_entry("w", [1])))
    assert "w is stored in format 999" in refuse(entries(tensor_entry("w", [1], 999)))
    assert "w has rows of 33 numbers, which Q8_0" in refuse(entries(tensor_entry("w", [33], 8)))
    for dims, offset in (([2**32, 2**31], 0), ([2**64 - 1] * 4, 0), ([1], 2**64 - 1)):
        assert "tensor w ends at byte" in refuse(entries(tensor_entry("w", dims, 0, offset)))
    shifted = refuse(entries(tensor_entry("w", [1], 0, 4)) + bytes(64))
    assert "tensor w begins at byte" in shifted
    assert "no multiple of general.alignment 32" in shifted


def test_a_file_cut_anywhere_is_refused_by_what_is_missing(tmp_path):
    whole = write_gguf(tmp_path / "x.gguf", tensors=TENSORS).read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in range(len(whole)):
        cut.write_bytes(whole[:size])
        if whole[size:].strip(b"\0"):  # the file ends with padding
            with pytest.raises(CheckpointError, match=r"truncated|damaged|not a GGUF file"):
                GGUFFile.open(cut)
    cut.write_bytes(whole[: whole.rindex(TENSORS["b.c"].numpy().tobytes()) + 4])
    with pytest.raises(CheckpointError, match=r"truncated: tensor b\.c ends at byte"):
        GGUFFile.open(cut)


@settings(max_examples=300, deadline=None, database=None, derandomize=True)
@given(seed=st.integers(0, 2**32), num_bytes=st.integers(1, 8))
def test_overwritten_bytes_load_or_are_refused_and_never_crash(whole_model, seed, num_bytes):
    """Of the header only: what the numbers of a tensor are cannot be right or wrong."""
    path, whole, header_len = whole_model
    rng = random.Random(seed)
    damaged = bytearray(whole)
    for _ in range(num_bytes):
        damaged[rng.randrange(header_len)] = rng.randrange(256)
    path.write_bytes(damaged)
    try:
        checkpoint = GGUFCheckpoint(path)
        checkpoint.tokenizer()
    except (CheckpointError, ConfigError) as e:
        assert str(path) in str(e)  # noqa: PT017


@pytest.fixture(scope="module")
def whole_model(tmp_path_factory):
    """Return a path to write to, the bytes of a whole model there, and the length of its header."""
    folder = tmp_path_factory.mktemp("damaged")
    tokens = [*"abcdefgh", "ab"] + [f"[PAD{i}]" for i in range(122)]
    types = [3] + [1] * 8 + [5] * 122
    path = write_gguf(
        folder / "x.gguf",
        save_shape(folder / "hf"),
        metadata={
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "llama-bpe",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.merges": ["a b"],
            "tokenizer.ggml.bos_token_id": 0,
        },
    )
    GGUFCheckpoint(path).tokenizer()
    whole = path.read_bytes()
    return path, whole, min(t.offset for t in GGUFFile.open(path).tensors.values())


def test_without_the_gguf_package_the_error_says_what_to_install(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "x.gguf", tensors=TENSORS)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"pip install 'tvr\[gguf\]'") as e:
        GGUFFile.open(path)
    assert "\n" not in str(e.value)
