"""Damaged GGUF files: one line that names the file and what was expected, before anything is loaded."""

import os
import re
import struct
import tracemalloc

import pytest
from support.gguf_files import write_file

import torch_moe_mps

NAME = b"blk.1.attn_q.weight"
LAST = "blk.1.ffn_norm.weight"
HUGE = 2**60
MOST = 64 << 20  # bytes


def number(value: int, size: int = 8) -> bytes:
    return value.to_bytes(size, "little")


def put(place: int, value: bytes):
    """Other bytes at a place."""
    return lambda data: data[:place] + value + data[place + len(value) :]


def in_tensor(place: int, value: bytes):
    """Other bytes at a place behind the name of a tensor: dimensions, two of them, the type, the offset."""
    return lambda data: put(data.index(NAME) + len(NAME) + place, value)(data)


def added(value: int, size: int, place: int):
    """A number made larger."""
    return lambda data: put(
        place, number(int.from_bytes(data[place : place + size], "little") + value, size)
    )(data)


def with_entry(kind: int, value: bytes, key: bytes = b"llama.new"):
    """One more entry of the metadata, in front of all others."""

    def change(data: bytes) -> bytes:
        data = added(1, 8, 16)(data)
        return data[:24] + number(len(key)) + key + number(kind, 4) + value + data[24:]

    return change


def array(kind: int, count: int) -> bytes:
    return number(kind, 4) + number(count)


def replaced(old: bytes, new: bytes):
    return lambda data: data.replace(old, new)


BEYOND = "must end by byte {size}, the last one of the file, got"
CASES = {
    "no bytes": (lambda data: b"", "the file must begin with b'GGUF', got b''"),
    "another file": (put(0, b"<!DO"), "the file must begin with b'GGUF', got b'<!DO'"),
    "cut in the numbers": (
        lambda data: data[:20],
        f"the numbers of tensors and of metadata {BEYOND} 16 bytes from byte 8 on",
    ),
    "cut in the metadata": (
        lambda data: data[:600],
        "tensors and metadata must be as many as fit in 600 bytes, got",
    ),
    "cut in the tensors": (
        lambda data: data[: data.index(NAME) + 4],
        f"the name of tensor 13 of 21 {BEYOND} 19 bytes from",
    ),
    "cut in the last tensor": (lambda data: data[:-1], f"{LAST} ends at byte {{end}} of {{size}}"),
    "bytes behind": (
        lambda data: data + bytes(64),
        f"{LAST} must end at byte 551680 of the tensors, got 551616",
    ),
    "version 1": (put(4, number(1, 4)), "the version of GGUF must be 2 or 3, got 1"),
    "version 4": (put(4, number(4, 4)), "the version of GGUF must be 2 or 3, got 4"),
    "big-endian": (
        put(4, struct.pack(">I", 3)),
        "the version of GGUF must be 2 or 3, got version 3 of a big-endian file",
    ),
    "huge number of tensors": (
        put(8, number(HUGE)),
        f"tensors and metadata must be as many as fit in {{size}} bytes, got {HUGE} tensors and",
    ),
    "one tensor more": (added(1, 8, 8), "tensor 22 of 22 must have a name, got none"),
    "one tensor less": (
        added(-1, 8, 8),
        "blk.1.attn_norm.weight must end at byte 551680 of the tensors, got",
    ),
    "huge number of entries": (
        put(16, number(HUGE)),
        f"tensors and metadata must be as many as fit in {{size}} bytes, got 21 tensors and {HUGE}",
    ),
    "one entry more": (
        added(1, 8, 16),
        "the length of the name of tensor 1 of 21 must be at most 65535, got",
    ),
    "a long key": (
        put(24, number(HUGE)),
        f"the length of the name of metadata 1 of 10 must be at most 65535, got {HUGE}",
    ),
    "a long text": (
        with_entry(8, number(HUGE)),
        f"the length of llama.new must be at most 1073741824, got {HUGE}",
    ),
    "a text beyond the file": (
        with_entry(8, number(2**30)),
        f"llama.new {BEYOND} 1073741824 bytes from byte",
    ),
    "a long array": (
        with_entry(9, array(4, HUGE)),
        f"the length of llama.new must be at most 16777216, got {HUGE}",
    ),
    "an array beyond the file": (
        with_entry(9, array(12, 2**24)),
        f"llama.new {BEYOND} 134217728 bytes from byte",
    ),
    "texts beyond the file": (
        with_entry(9, array(8, 2**20) + number(2**40)),
        "llama.new must end by byte {size}, the",
    ),
    "an array of arrays": (
        with_entry(9, array(9, 1)),
        "llama.new must be an array of numbers or texts, got one of values of type 9",
    ),
    "an unknown type of values": (
        with_entry(99, b""),
        "llama.new must be of a type of values from 0 to 12, got 99",
    ),
    "a key twice": (
        with_entry(4, number(1, 4), b"llama.block_count"),
        "llama.block_count must be in the metadata once, got it twice",
    ),
    "no text": (
        replaced(b"llama.block_count", b"llama.bl\xffck_count"),
        "the name of metadata 4 of 10 must be in UTF-8, got b'\\xffck_'",
    ),
    "no architecture": (
        replaced(b"general.architecture", b"general.architectura"),
        "general.architecture must be a text in the metadata, got no such key",
    ),
    "no alignment": (
        with_entry(4, number(0, 4), b"general.alignment"),
        "general.alignment must be a power of two, got 0",
    ),
    "a wrong alignment": (
        with_entry(4, number(24, 4), b"general.alignment"),
        "general.alignment must be a power of two, got 24",
    ),
    "a long name": (
        in_tensor(-len(NAME) - 8, number(HUGE)),
        f"the length of the name of tensor 13 of 21 must be at most 65535, got {HUGE}",
    ),
    "a name twice": (
        replaced(b"blk.1.attn_k.weight", b"blk.1.attn_v.weight"),
        "blk.1.attn_v.weight must be among the tensors once, got it twice",
    ),
    "no dimensions": (in_tensor(0, number(0, 4)), "blk.1.attn_q.weight must have 1 to 4 dimensions, got 0"),
    "many dimensions": (
        in_tensor(0, number(2**31, 4)),
        "blk.1.attn_q.weight must have 1 to 4 dimensions, got 2147483648",
    ),
    "no columns": (
        in_tensor(4, number(0)),
        "blk.1.attn_q.weight must have at least one row of whole blocks of 256 values, got the shape (256, ",
    ),
    "more blocks than there are": (
        lambda data: put(data.index(b"llama.block_count") + 21, number(2**31, 4))(data),
        "llama.block_count must be at most 2, as many as the tensors have, got 2147483648",
    ),
    "half a block": (
        in_tensor(4, number(128)),
        "blk.1.attn_q.weight must have at least one row of whole blocks of 256 values, got the shape (256, ",
    ),
    "many columns": (in_tensor(4, number(2**40)), "blk.1.attn_q.weight ends at byte"),
    "an unknown type": (
        in_tensor(20, number(999, 4)),
        "blk.1.attn_q.weight must be of a type of ggml that is known, got 999",
    ),
    "not aligned": (
        in_tensor(24, number(294849)),
        "blk.1.attn_q.weight must begin at byte 294848 of the tensors, got 294849",
    ),
    "on another tensor": (
        in_tensor(24, number(0)),
        "blk.1.attn_q.weight must begin at byte 294848 of the tensors, got 0",
    ),
    "outside": (in_tensor(24, number(2**50)), "blk.1.attn_q.weight ends at byte"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    return write_file(tmp_path_factory.mktemp("whole") / "model.gguf").read_bytes()


@pytest.mark.parametrize("case", CASES)
def test_one_line_without_much_memory(tmp_path, whole, case):
    change, message = CASES[case]
    path, data = tmp_path / "model.gguf", change(whole)
    path.write_bytes(data)
    expected = re.escape(
        f"moe_mps::gguf: {path} is damaged or not in GGUF ({message.format(size=len(data), end=len(whole))}"
    )
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=rf"^{expected}[^\n]*\)$"):
            torch_moe_mps.from_pretrained(path, device_map="cpu", check=False)
        assert tracemalloc.get_traced_memory()[1] < MOST
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("change", [put(24, number(2**34)), with_entry(9, array(4, 2**32))])
def test_lengths_inside_of_a_large_file_are_not_read(tmp_path, whole, change):
    """Of 64 GB, which take no room on the disk."""
    path = tmp_path / "model.gguf"
    path.write_bytes(change(whole))
    os.truncate(path, 64 << 30)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"the length of .* must be at most \d+, got \d+\)$"):
            torch_moe_mps.from_pretrained(path, device_map="cpu", check=False)
        assert tracemalloc.get_traced_memory()[1] < MOST
    finally:
        tracemalloc.stop()
