"""Small bodies whose pictures or sound are large once decoded: refused before they take memory or time."""

import base64
import io
import multiprocessing
import resource
import sys
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
import transformers
from PIL import Image
from support import scripted
from support.scripted import ask

from torch_moe_mps.serving.http.media import decoding
from torch_moe_mps.serving.http.request import Refused

UNIT = 1 if sys.platform == "darwin" else 1024  # bytes of ru_maxrss


def peak_megabytes(function: Callable[[], object]) -> float:
    """Megabytes by which the memory of a forked process grows at most while it calls a function."""

    def measured(queue: multiprocessing.SimpleQueue) -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        function()
        queue.put((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * UNIT / 1e6)

    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=measured, args=(queue,))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    return queue.get()


def png(mode: str, width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new(mode, (width, height)).save(file, "PNG")
    return file.getvalue()


def flac(seconds: int, channels: int = 1, rate: int = 16000) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.zeros((seconds * rate, channels), "int16"), rate, format="FLAC")
    return file.getvalue()


def chat(kind: str, *files: bytes) -> dict:
    """A chat with pictures (`image_url`) or sounds (`input_audio`)."""
    texts = [base64.b64encode(file).decode() for file in files]
    values = [
        {"url": f"data:;base64,{text}"} if kind == "image_url" else {"data": text, "format": "flac"}
        for text in texts
    ]
    return {"messages": [{"role": "user", "content": [{"type": kind, kind: value} for value in values]}]}


@pytest.fixture
def here():
    with scripted.server() as server:
        server.served.template.processor.image_processor = SimpleNamespace(max_pixels=512 * 512)
        server.served.template.processor.feature_extractor = SimpleNamespace(sampling_rate=16000)
        yield server


def test_twelve_small_files_of_many_pixels_are_refused(here):
    """0.13 MB of one-bit PNGs that would be 3.2 GB."""
    body = chat("image_url", *[png("1", 8192, 8192)] * 12)
    status, answer = ask(here, "/v1/chat/completions", body)
    assert status == 413 and "pixels" in answer["error"]["message"], answer
    assert not here.generator.jobs


LIMITS = decoding.Limits(pixels=1 << 22, samples=1 << 16, largest=1 << 16, rate=16000)


def files(kind: str, *contents: bytes) -> list[decoding.MediaFile]:
    return [decoding.MediaFile(kind, f"f{n}", io.BytesIO(content)) for n, content in enumerate(contents)]


@pytest.mark.parametrize(
    ("kind", "contents", "field"),
    [
        ("image", [png("1", 2048, 2048), png("RGB", 8, 8)], "f1"),
        ("image", [png("1", 1024, 1024)] * 12, "f4"),
        ("audio", [flac(5)], "f0"),
        ("audio", [flac(2, channels=8)], "f0"),
        ("audio", [flac(2), flac(1), flac(2)], "f2"),
        ("audio", [flac(4, rate=8000), flac(4, rate=8000)], "f1"),  # twice as many at the model's rate
    ],
)
def test_all_files_of_a_request_share_its_limits(kind, contents, field, monkeypatch):
    """They are compared before any is decoded."""
    monkeypatch.setattr(decoding, "_picture", None)
    monkeypatch.setattr(decoding, "_sound", None)
    with pytest.raises(Refused) as refused:
        decoding.decoded(files(kind, *contents), LIMITS)
    assert refused.value.status == 413 and refused.value.field == field


def test_a_quarter_of_an_hour_of_silence_takes_no_more_memory_than_it_must():
    """Of 16 kHz, in 0.2 MB: the samples as float32 are 58 MB. A sound beyond the limit takes none."""
    limits = decoding.Limits(rate=16000)
    content = flac(900)
    assert len(content) < 500_000
    assert peak_megabytes(lambda: decoding.decoded(files("audio", content), limits)) < 2.5 * 58
    short = decoding.Limits(samples=1 << 22)

    def refused() -> None:
        with pytest.raises(Refused):
            decoding.decoded(files("audio", content), short)

    assert peak_megabytes(refused) < 5


def test_large_pictures_are_decoded_one_at_a_time_and_shrunk():
    """Twelve of 16 MB in one bit a pixel, 64 MB in RGB: never two of them together."""
    limits = decoding.Limits(pixels=1 << 28, largest=1 << 16)
    contents = [png("1", 4096, 4096)] * 12
    assert peak_megabytes(lambda: decoding.decoded(files("image", *contents), limits)) < 120


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGBA", "I;16"])
def test_a_shrunk_picture_is_the_same_picture(mode):
    """The left half is black, and the right half is white; small ones have all their pixels."""
    for side in (64, 2048):
        picture = Image.new("1", (side, side // 2))
        picture.paste(1, (side // 2, 0, side, side // 2))
        file = io.BytesIO()
        if mode == "I;16":
            white = np.asarray(picture).astype("uint16") * 65535
            Image.fromarray(white).save(file, "PNG")
        else:
            picture.convert("L").convert(mode).save(file, "PNG")
        (made,) = decoding.decoded(files("image", file.getvalue()), LIMITS)
        assert made.mode == "RGB"
        assert made.size == ((64, 32) if side == 64 else (362, 181))
        left, right = (made.getpixel((x, 16)) for x in (4, made.width - 4))
        assert left == (0, 0, 0) and right == (255, 255, 255)


def test_jpegs_are_shrunk_while_they_are_decoded():
    """A sixteenth of 4096 x 4096 is never decoded whole: 50 MB."""
    file = io.BytesIO()
    Image.new("RGB", (4096, 4096), "red").save(file, "JPEG")
    limits = decoding.Limits(largest=1 << 18)
    assert peak_megabytes(lambda: decoding.decoded(files("image", file.getvalue()), limits)) < 20


def test_sound_is_one_channel_at_the_rate_of_the_model():
    file = io.BytesIO()
    times = np.arange(8000) / 8000
    tone = np.sin(2 * np.pi * 440 * times)
    soundfile.write(file, np.stack([tone, 0 * tone], 1), 8000, format="WAV", subtype="FLOAT")
    (made,) = decoding.decoded(files("audio", file.getvalue()), LIMITS)
    expected = np.sin(2 * np.pi * 440 * np.arange(16000) / 16000) / 2
    assert made.dtype == np.float32 and made.shape == (16000,)
    assert np.abs(made - expected)[200:-200].max() < 1e-3
    (own,) = decoding.decoded(files("audio", file.getvalue()), decoding.Limits(rate=None))
    assert np.abs(own - tone / 2).max() < 1e-6


def test_files_that_are_nothing_of_the_kind_and_very_long_pictures_are_one_line():
    postscript = io.BytesIO()
    Image.new("RGB", (8, 8)).save(postscript, "EPS")  # a program opens it
    for kind, content, line in (
        ("image", postscript.getvalue(), "must be a picture"),
        ("image", b"x" * 30, "must be a picture, got 30 bytes that are none"),
        ("image", png("L", 64, 64)[:-30], "must be a picture"),
        ("image", png("1", 20000, 1), "at most 200 times as long as wide, got '20000 x 1'"),
        ("audio", b"x" * 30, "must be a sound, got 30 bytes that are none"),
    ):
        with pytest.raises(Refused, match=line):
            decoding.decoded(files(kind, content), LIMITS)


def test_limits_follow_the_processor_and_the_free_memory():
    """An area, an edge, the pixels of the smallest picture, and 16 bytes for each pixel that is decoded."""
    images = SimpleNamespace(size={"longest_edge": 3000})
    of = decoding.limits_of(SimpleNamespace(image_processor=images), 16 << 20)
    assert of == decoding.Limits(pixels=1 << 20, samples=1 << 20, largest=9_000_000)
    qwen, clip = transformers.Qwen2VLImageProcessor(), transformers.CLIPImageProcessor()
    qwen.size = {"longest_edge": 12_845_056, "shortest_edge": 3136}
    assert decoding.limits_of(SimpleNamespace(image_processor=qwen), None).largest == 12_845_056
    assert decoding.limits_of(SimpleNamespace(image_processor=clip), None).least == 224 * 224
    limits = decoding.limits_of(SimpleNamespace(image_processor=clip), None)
    with pytest.raises(Refused, match="pixels in all pictures"):  # each becomes one of 224 x 224
        decoding.decoded(files("image", *[png("1", 1, 1)] * 1400), limits)


def test_silence_in_a_chat_is_refused_by_its_length(here):
    status, answer = ask(here, "/v1/chat/completions", chat("input_audio", flac(3000)))
    assert status == 413 and "samples in all sounds" in answer["error"]["message"], answer
