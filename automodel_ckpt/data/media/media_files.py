"""Read the images and the audio of a data set: paths, bytes, or objects that are decoded already.

Images require Pillow (the extra ``vision``). WAV files with PCM samples of 16 bits are read by the standard library.
Other formats need soundfile, and other sampling rates soxr (the extra ``audio``). These are the libraries with which
transformers reads audio files, so the samples are equal.
"""

from __future__ import annotations

import base64
import inspect
import io
import math
import warnings
import wave
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from automodel_ckpt.data.conversations.messages import UnusableSample
from automodel_ckpt.errors import RecipeError

IMAGE = "image"
AUDIO = "audio"
MEDIA = (IMAGE, AUDIO)
Media = frozenset[str]
_USUAL_RATE = 16_000
"""The sampling rate in Hz that transformers assumes for a processor that states none."""


def media_of(processor: Any) -> Media:
    """The kinds of media that a processor takes."""
    parts = {
        IMAGE: getattr(processor, "image_processor", None),
        AUDIO: audio_processor_of(processor),
    }
    return frozenset(kind for kind, part in parts.items() if part is not None)


def audio_processor_of(processor: Any) -> Any:
    """The part of a processor that converts audio. Returns None when it has none."""
    for name in ("audio_processor", "feature_extractor"):
        part = getattr(processor, name, None)
        # In some classes for images alone, the image processor has this second name.
        if part is not None and part is not getattr(processor, "image_processor", None):
            return part
    return None


def takes_audio_with_text(processor: Any) -> bool:
    """Whether a processor that converts audio takes it with texts in one call.

    Voxtral's does it only within its chat template, and Voxtral Realtime's only for a fixed request.
    """
    parameters = inspect.signature(processor.__call__).parameters
    return {"text", "audio"} <= parameters.keys()


def sampling_rate_of(processor: Any) -> int:
    """The sampling rate in Hz of the audio that a processor takes."""
    rate = getattr(audio_processor_of(processor), "sampling_rate", None)
    return int(rate or _USUAL_RATE)


def placeholders_of(processor: Any) -> dict[str, str]:
    """The text that a processor replaces by each kind of media; kinds without such a text are left out."""
    tokens = {kind: getattr(processor, f"{kind}_token", None) for kind in MEDIA}
    return {kind: token for kind, token in tokens.items() if isinstance(token, str) and token}


def usual_media(processor: Any) -> Media:
    """The kinds of media that samples may have if nothing else is known: images, if the processor takes them."""
    found = media_of(processor)
    return frozenset([IMAGE]) if IMAGE in found else found


def media_of_data(dataset: Any, processor: Any) -> Media:
    """The kinds of media that the samples of a data set, or of the sources of a mixture, may have."""
    sources = getattr(dataset, "sources", None)
    if isinstance(sources, dict):
        return frozenset[str]().union(
            *(media_of_data(each, processor) for each in sources.values())
        )
    media = getattr(dataset, "media", None)
    return media if isinstance(media, frozenset) else usual_media(processor)


def _unusable(kind: str, what: str, value: str) -> UnusableSample:
    """Make the error for a value of a *kind* with which *what* is wrong."""
    hint = f"give the path of {kind} file, absolute or relative to the data file, or remove this sample"
    return UnusableSample(f"{kind} {what}", value, hint)


def _source(kind: str, value: Any, folder: Path, decoded: tuple[type, ...] = ()) -> Any:
    """Return the path, the bytes or the object that *value* of a *kind*, such as ``an image``, names.

    Objects of classes in *decoded* are returned. Relative paths start at *folder*. Raises :class:`UnusableSample` for
    other values, and for links.
    """
    if isinstance(value, Mapping):
        if isinstance(value.get("base64"), str):
            return _from_base64(kind, value["base64"], value["base64"])
        value = next(
            (value[key] for key in ("bytes", "path", "url") if value.get(key)), dict(value)
        )
    if isinstance(value, bytearray | memoryview):
        value = bytes(value)
    if isinstance(value, (bytes, *decoded)):
        return value
    if not isinstance(value, str) or not value:
        raise _unusable(kind, "is neither a path nor the content of a file", repr(value))
    if value.startswith("data:"):
        return _from_base64(kind, value.partition(";base64,")[2], value)
    value = value.removeprefix("file://")
    if "://" in value:
        noun = kind.split()[-1]
        raise _unusable(kind, f"is not a local file, and {noun}s are not downloaded", value)
    try:
        return folder / Path(value).expanduser()
    except RuntimeError:
        # The home directory of an unknown user: a file with a name that begins with ~.
        return folder / value


def _from_base64(kind: str, content: str, value: str) -> bytes:
    """Decode base64 text. Raises :class:`UnusableSample` if it is not base64, or empty."""
    try:
        decoded = base64.b64decode(content, validate=True)
    except ValueError:
        decoded = b""
    if not decoded:
        raise _unusable(kind, "in the data is not base64 text", value)
    return decoded


def _shown(source: Any) -> str:
    """Describe the result of :func:`_source` in an error message."""
    if isinstance(source, Path):
        return str(source)
    if isinstance(source, bytes):
        return f"{len(source)} bytes of the data"
    return f"{type(source).__name__} of the data"


_ORIENTATION = 0x0112
_TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
"""Orientation of EXIF -> what puts the image upright (source: PIL.ImageOps.exif_transpose)."""


def pillow() -> Any:
    """Import Pillow's module ``Image``. Raises :class:`RecipeError` if Pillow is not installed."""
    try:
        from PIL import Image
    except ImportError as error:
        raise RecipeError(
            "images require Pillow",
            where="recipe: vlm_finetune",
            value=str(error),
            hint="install it: pip install 'automodel_ckpt[vision]'",
        ) from error
    return Image


def open_image(value: Any, folder: Path) -> Any:
    """Open an image as a Pillow image in RGB with 8 bits per channel, turned upright as its EXIF data state.

    *value* is a path (relative paths start at *folder*), a ``file://`` or ``data:`` URL, bytes, a Pillow image, or a
    mapping with one of them in ``bytes``, ``path`` or ``url``, or with text in ``base64``. The library ``datasets``
    stores images as such mappings. Raises :class:`UnusableSample` for any other value, and for a damaged image.
    """
    image_module = pillow()
    source = _source("an image", value, folder, (image_module.Image,))
    where = _shown(source)
    if isinstance(source, bytes):
        source = io.BytesIO(source)
    try:
        with warnings.catch_warnings():
            # Above its limit of pixels, Pillow only warns. It raises an error above twice the
            # limit.
            warnings.simplefilter("error", image_module.DecompressionBombWarning)
            opened = source
            if not isinstance(source, image_module.Image):
                opened = image_module.open(source)
            _check_bits(opened)
            return _upright(opened).convert("RGB")
    except MemoryError:
        raise
    except UnusableSample as error:
        raise UnusableSample(error.what, f"{where} ({error.value})", error.hint) from error
    except Exception as error:  # damaged files make Pillow's decoders raise many types
        raise _unreadable(where, error, "an image") from error


def _check_bits(image: Any) -> None:
    """Raise :class:`UnusableSample` for a grayscale image of 16 or 32 bits. Pillow would clip its values to 8."""
    if image.mode.startswith(("I", "F")):
        raise UnusableSample(
            "an image has more than 8 bits per channel",
            f"mode {image.mode}",
            "convert it to 8 bits per channel, scaled so that the largest value is white",
        )


def _upright(image: Any) -> Any:
    """Turn an image as its EXIF data state, as transformers, datasets and viewers do; not if these are damaged."""
    # First, because it raises the errors of damaged pixels, and turns TIFF files itself.
    image.load()
    try:
        orientation = image.getexif().get(_ORIENTATION)
    except Exception:  # as for damaged files: many types
        return image
    # Not ImageOps.exif_transpose: it also writes the EXIF data again, and fails on values that it cannot write.
    turn = _TURNS.get(orientation)
    return image if turn is None else image.transpose(pillow().Transpose[turn])


_INSTALL = "pip install 'automodel_ckpt[audio]'"
_UNKNOWN_SIZE = 2**31 - 2**12
"""Programs that write to a pipe state a size of at least this many bytes, because they do not know it."""

Samples = npt.NDArray[np.float32]


Recording = tuple[Samples, int]
"""Samples [channels, length] between -1 and 1, and the sampling rate in Hz."""


def open_audio(value: Any, folder: Path, sampling_rate: int) -> Samples:
    """Read an audio as float32 samples [length] at *sampling_rate*; several channels are averaged.

    *value* is a path (relative paths start at *folder*), a ``file://`` or ``data:`` URL, bytes, or a mapping with one
    of them in ``bytes``, ``path`` or ``url``, with text in ``base64``, or with an ``array`` [length] and its
    ``sampling_rate``. The library ``datasets`` stores audio as such mappings. Raises :class:`UnusableSample` for any
    other value, for a damaged or empty file, and for another sampling rate if soxr is not installed.
    """
    if isinstance(value, Mapping) and value.get("array") is not None:
        where = "an array of the data"
        channels, rate = _of_array(value)
    else:
        source = _source("an audio", value, folder)
        where = _shown(source)
        found = _read_pcm(source, where)
        if found is None:
            content, rate = _with_soundfile("read", source, where, dtype="float32", always_2d=True)
            found = content.T, int(rate)
        channels, rate = found
    if not channels.size:
        raise UnusableSample("an audio has no samples", where)
    samples = np.ascontiguousarray(channels[0])
    if len(channels) > 1:
        samples = np.asarray(channels.mean(axis=0, dtype=np.float32))
    if not np.isfinite(samples).all():
        raise _unusable("an audio", "has samples that are not numbers", where)
    return _resampled(samples, rate, sampling_rate, where)


def duration_of(value: Any, folder: Path) -> float:
    """Return the seconds of an audio as :func:`open_audio` reads it, from the header of the file where that is enough.

    Raises :class:`UnusableSample` as :func:`open_audio` does.
    """
    if isinstance(value, Mapping) and value.get("array") is not None:
        samples, rate = _of_array(value)
        return float(samples.shape[-1] / rate)
    source = _source("an audio", value, folder)
    where = _shown(source)
    try:
        with wave.open(_file(source), "rb") as file:
            num_frames, rate = file.getnframes(), file.getframerate()
            num_bytes = num_frames * file.getnchannels() * file.getsampwidth()
    except (wave.Error, EOFError):
        info = _with_soundfile("info", source, where)
        num_frames, rate, num_bytes = info.frames, info.samplerate, 0
    except OSError as error:
        raise _unreadable(where, error) from error
    if rate < 1:
        raise _unusable("an audio", "has no sampling rate", where)
    if num_bytes >= _UNKNOWN_SIZE:
        num_frames = len(open_audio(value, folder, rate))
    return float(num_frames / rate)


def _of_array(value: Mapping[Any, Any]) -> Recording:
    """Convert a decoded audio of ``datasets``."""
    rate = value.get("sampling_rate")
    try:
        samples = np.asarray(value["array"], dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise _unusable("an audio", "has an array that is not numbers", str(error)) from error
    if samples.ndim not in (1, 2) or not isinstance(rate, int) or rate < 1:
        raise UnusableSample(
            "an audio's array needs one or two dimensions and a sampling rate",
            f"shape {list(samples.shape)}, sampling_rate {rate}",
            'give {"array": [0.0, ...], "sampling_rate": 16000}',
        )
    return np.atleast_2d(samples), rate


def _file(source: Any) -> Any:
    return io.BytesIO(source) if isinstance(source, bytes) else str(source)


def _read_pcm(source: Any, where: str) -> Recording | None:
    """Read a WAV file with PCM samples of 16 bits; None for other formats.

    Raises :class:`UnusableSample` for a file that ends early or cannot be read.
    """
    try:
        with wave.open(_file(source), "rb") as opened:
            width, rate = opened.getsampwidth(), opened.getframerate()
            num_channels = opened.getnchannels()
            num_bytes = opened.getnframes() * width * num_channels
            content = opened.readframes(opened.getnframes())
    except (wave.Error, EOFError):
        return None
    except OSError as error:
        raise _unreadable(where, error) from error
    if width != 2 or rate < 1:
        return None
    if len(content) < num_bytes < _UNKNOWN_SIZE:
        raise UnusableSample(
            "an audio file ends before its header says",
            f"{where}: {len(content)} of {num_bytes} bytes",
            "copy it again, or remove this sample",
        )
    num_frames = len(content) // (width * num_channels)
    numbers = np.frombuffer(content[: num_frames * width * num_channels], "<i2")
    # As soundfile does.
    samples = (numbers / 2.0**15).astype(np.float32)
    return samples.reshape(num_frames, num_channels).T, rate


def _with_soundfile(function: str, source: Any, where: str, **options: Any) -> Any:
    """Call a function of soundfile. Raises :class:`UnusableSample` if it is not installed or cannot read the file."""
    try:
        import soundfile  # type: ignore[import-not-found]
    except (ImportError, OSError) as error:
        raise UnusableSample(
            "an audio is no WAV file with PCM samples of 16 bits, and reading others requires soundfile",
            f"{where} ({error})",
            f"install it: {_INSTALL}; or convert the file, if it is one of audio",
        ) from error
    try:
        return getattr(soundfile, function)(_file(source), **options)
    except MemoryError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        raise _unreadable(where, error) from error


def _unreadable(where: str, error: Exception, kind: str = "an audio") -> UnusableSample:
    reason = str(getattr(error, "strerror", None) or error or type(error).__name__)
    if type(error).__name__ == "UnidentifiedImageError":
        # Its text repeats the path, or the address of an object in memory.
        reason = "not an image of a known format"
    return _unusable(kind, "cannot be read", f"{where} ({reason})")


def _resampled(samples: Samples, rate: int, wanted: int, where: str) -> Samples:
    """Change the sampling rate as librosa and transformers do: soxr in high quality, and as many samples as fit."""
    if rate == wanted:
        return samples
    try:
        import soxr  # type: ignore[import-not-found]
    except ImportError as error:
        raise UnusableSample(
            f"an audio has another sampling rate than the model's {wanted} Hz, and changing it requires soxr",
            f"{rate} Hz, {where}",
            f"install it: {_INSTALL}; or convert the audio to {wanted} Hz",
        ) from error
    length = math.ceil(len(samples) * wanted / rate)
    changed = soxr.resample(samples, rate, wanted, quality="soxr_hq")
    padded = np.pad(changed, (0, max(0, length - len(changed))))[:length]
    return np.ascontiguousarray(padded, dtype=np.float32)
