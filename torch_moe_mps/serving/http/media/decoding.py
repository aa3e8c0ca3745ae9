"""Decoding of a request's images and audio, after their headers were checked against limits."""

import io
import math
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal

import numpy as np

from ..request import Refused, wrong

MOST_PIXELS = 1 << 26  # in all pictures of a request
MOST_SAMPLES = 1 << 25  # in all sounds of a request, of all channels: half an hour at 16 kHz
_PIXEL_BYTES, _SAMPLE_BYTES = 16, 16  # while one is decoded: PIL's 4 and the processor's float32 of 3 colours
_UNSHRUNK = 1 << 22  # pixels up to which the processor gets a picture as it is, whatever it makes of it
_LONGEST_EDGE = 1 << 13
_LONGEST = 200  # times as long as wide: processors that scale the short side make very long ones of others
_BLOCK = 1 << 16  # frames of sound that are decoded at a time
_FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")  # none that starts a program


@dataclass(frozen=True)
class Limits:
    """Limits of the images and audio of one request.

    Args:
        pixels, samples: of all files together.
        least: pixels to which the processor enlarges the smallest image.
        largest: pixels to which the processor shrinks a larger image.
        rate: sampling rate of the model's audio input; None if unknown.
    """

    pixels: int = MOST_PIXELS
    samples: int = MOST_SAMPLES
    least: int = 1
    largest: int = _UNSHRUNK
    rate: int | None = None


def limits_of(processor: Any, free: int | None) -> Limits:
    """Limits for a model's processor and `free` bytes of memory; None is unlimited memory."""
    images, sounds = (getattr(processor, name, None) for name in ("image_processor", "feature_extractor"))
    pixels, samples = MOST_PIXELS, MOST_SAMPLES
    if free is not None:
        pixels, samples = min(pixels, free // _PIXEL_BYTES), min(samples, free // _SAMPLE_BYTES)
    rate = getattr(sounds, "sampling_rate", None)
    return Limits(pixels, samples, _least_pixels(images), _pixels_used(images), rate)


def _pixels_used(processor: Any) -> int:
    """Maximum number of pixels of an image that the processor uses, from its settings."""
    size: Any = getattr(processor, "size", None) or {}
    found = [getattr(processor, "max_pixels", None)]
    for name in ("longest_edge", "max_pixels"):
        value = size.get(name) if hasattr(size, "get") else None
        if isinstance(value, int):  # Qwen's have an area as their longest edge
            found.append(value if value > _LONGEST_EDGE else value * value)
    return min(MOST_PIXELS, max([_UNSHRUNK, *(value for value in found if isinstance(value, int))]))


def _least_pixels(processor: Any) -> int:
    """Pixels that the processor makes of a small image; it may enlarge it."""
    from PIL import Image

    try:
        values = processor(images=[Image.new("RGB", (32, 32))], return_tensors="np")["pixel_values"]
    except Exception:  # none, or one of another kind: the pixels of the files count alone
        return 1
    return max(1, math.prod(np.shape(values)) // 3)


Kind = Literal["image", "audio"]


@dataclass
class MediaFile:
    """An opened file of a request. `field` names it in errors."""

    kind: Kind
    field: str
    content: BinaryIO


def decoded(files: Sequence[MediaFile], limits: Limits) -> list[Any]:
    """Decoded files in order: PIL images, and arrays of mono float32 audio.

    Raises: Refused for a file that is no image or audio, and, before any is decoded, with status 413 for
        files beyond the limits.
    """
    opened = deque(map(_opened, files))
    pixels = samples = 0
    for file, each in zip(files, opened, strict=True):
        if file.kind == "image":
            width, height = each.size
            if max(width, height) > _LONGEST * min(width, height):
                expected = f"a picture at most {_LONGEST} times as long as wide"
                raise wrong(file.field, expected, f"{width} x {height}")
            pixels += max(width * height, limits.least)
            _check(pixels, limits.pixels, "pixels in all pictures", file.field)
        else:
            grown = 1.0 if limits.rate is None else limits.rate / max(1, each.samplerate)
            samples += math.ceil(each.frames * max(each.channels, grown))
            _check(samples, limits.samples, "samples in all sounds", file.field)
    decoded_files = []
    for file in files:  # a picture's own pixels are gone before the next one's are there
        decoded_files.append((_picture if file.kind == "image" else _sound)(opened.popleft(), file, limits))
        file.content.close()
    return decoded_files


def _check(count: int, limit: int, what: str, field: str) -> None:
    if count > limit:
        message = f"'{field}' must leave the request at most {limit:,} {what}, got {count:,} with it."
        raise Refused(message, field, "too_large", 413)


def _opened(file: MediaFile) -> Any:
    """Image or audio file opened up to its header. Raises: Refused."""
    if file.kind == "image":
        from PIL import Image

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our limit is below
                return Image.open(file.content, formats=_FORMATS)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            raise _none(file, "picture") from None
    import soundfile  # type: ignore[import-not-found, import-untyped, unused-ignore]

    try:
        return soundfile.SoundFile(file.content)
    except (soundfile.SoundFileError, OSError, ValueError):
        raise _none(file, "sound") from None


def _none(file: MediaFile, what: str) -> Refused:
    nbytes = file.content.seek(0, io.SEEK_END)
    return Refused(f"'{file.field}' must be a {what}, got {nbytes} bytes that are none.", file.field)


def _picture(picture: Any, file: MediaFile, limits: Limits) -> Any:
    """RGB image, shrunk during decoding if the processor would shrink it anyway."""
    width, height = picture.size
    factor = (limits.largest / (width * height)) ** 0.5
    try:
        if picture.mode.startswith("I;16"):  # a conversion to colours would take 256 and more for white
            picture = picture.point(lambda value: value / 256).convert("L")
        if factor < 1:
            size = max(1, int(width * factor)), max(1, int(height * factor))
            picture.draft("RGB", size)
            if picture.mode in ("1", "P"):  # these have no colours between two pixels
                picture = picture.convert("L" if picture.mode == "1" else "RGB")
            picture.thumbnail(size, reducing_gap=2.0)
        picture.load()
        return picture if picture.mode == "RGB" else picture.convert("RGB")
    except (OSError, ValueError, SyntaxError):
        raise _none(file, "picture") from None


def _sound(sound: Any, file: MediaFile, limits: Limits) -> Any:
    """Mono samples at the model's rate; decodes no more than the header's length."""
    import soundfile

    blocks, frames, announced = [], 0, sound.frames
    try:
        for block in sound.blocks(_BLOCK, dtype="float32", always_2d=True):
            frames += len(block)
            if frames > announced:
                break
            blocks.append(block.mean(axis=1))
    except soundfile.SoundFileError:
        raise _none(file, "sound") from None
    mono = np.concatenate(blocks) if blocks else np.zeros(0, "float32")
    if limits.rate in (None, sound.samplerate):
        return mono
    import soxr  # type: ignore[import-not-found, import-untyped, unused-ignore]

    return soxr.resample(mono, sound.samplerate, limits.rate)
