"""Read the audio of a data set: paths, bytes, or arrays, as one channel at the sampling rate that a model expects.

WAV files with PCM samples are read by the standard library. Other formats need soundfile, and other sampling rates
soxr (the extra ``audio``). These are the libraries with which transformers reads audio files, so the samples are equal.
"""

from __future__ import annotations

import io
import math
import wave
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from automodel_ckpt.data.conversations.messages import UnusableSample
from automodel_ckpt.data.media.media_source import MediaReader, shortened, shown

_HINT = (
    "give the path of an audio file, absolute or relative to the data file, or remove this sample"
)
_INSTALL = "pip install 'automodel_ckpt[audio]'"
_UNKNOWN_SIZE = 2**31 - 2**12
"""Programs that write to a pipe state a size of at least this many bytes, because they do not know it."""

Samples = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Recording:
    """Samples [channels, length] between -1 and 1, and the sampling *rate* in Hz."""

    samples: Samples
    rate: int


def open_audio(value: Any, folder: Path, sampling_rate: int) -> Samples:
    """Read an audio as float32 samples [length] at *sampling_rate*; several channels are averaged.

    *value* is a path (relative paths start at *folder*), a ``file://`` or ``data:`` URL, bytes, or a mapping with one
    of them in ``bytes``, ``path`` or ``url``, with text in ``base64``, or with an ``array`` [length] and its
    ``sampling_rate``. The library ``datasets`` stores audio as such mappings. Raises :class:`UnusableSample` for any
    other value, for a damaged or empty file, and for another sampling rate if soxr is not installed.
    """
    if isinstance(value, Mapping) and value.get("array") is not None:
        where = "an array of the data"
        recording = _of_array(value)
    else:
        source = MediaReader("an audio", _HINT).source(value, folder)
        where = shown(source)
        recording = _read(source, where)
    if not recording.samples.size:
        raise UnusableSample("an audio has no samples", where, "remove this sample")
    samples = _mono(recording.samples)
    if not np.isfinite(samples).all():
        raise UnusableSample("an audio has samples that are not numbers", where, _HINT)
    return _resampled(samples, recording.rate, sampling_rate, where)


def duration_of(value: Any, folder: Path) -> float:
    """Return the seconds of an audio as :func:`open_audio` reads it, from the header of the file where that is enough.

    Raises :class:`UnusableSample` as :func:`open_audio` does.
    """
    if isinstance(value, Mapping) and value.get("array") is not None:
        decoded = _of_array(value)
        return float(decoded.samples.shape[-1] / decoded.rate)
    source = MediaReader("an audio", _HINT).source(value, folder)
    where = shown(source)
    try:
        with wave.open(_file(source), "rb") as file:
            num_bytes = file.getnframes() * file.getnchannels() * file.getsampwidth()
            if num_bytes < _UNKNOWN_SIZE and file.getframerate() > 0:
                return float(file.getnframes() / file.getframerate())
    except (wave.Error, EOFError):
        pass
    except OSError as error:
        raise _unreadable(where, error) from error
    recording = _read_pcm_file(source, where)
    if recording is not None:
        return float(recording.samples.shape[-1] / recording.rate)
    soundfile = _soundfile(where)
    try:
        info = soundfile.info(_file(source))
        return float(info.frames / info.samplerate)
    except (OSError, RuntimeError, ValueError) as error:
        raise _unreadable(where, error) from error


def _of_array(value: Mapping[Any, Any]) -> Recording:
    """Convert a decoded audio of ``datasets``."""
    rate = value.get("sampling_rate")
    try:
        samples = np.asarray(value["array"], dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise UnusableSample("an audio's array is not numbers", str(error)[:80], _HINT) from error
    if samples.ndim not in (1, 2) or not isinstance(rate, int) or rate < 1:
        raise UnusableSample(
            "an audio's array needs one or two dimensions and a sampling rate",
            f"shape {list(samples.shape)}, sampling_rate {rate}",
            'give {"array": [0.0, ...], "sampling_rate": 16000}',
        )
    return Recording(np.atleast_2d(samples), rate)


def _read(source: Any, where: str) -> Recording:
    recording = _read_pcm_file(source, where)
    return _read_by_soundfile(source, where) if recording is None else recording


def _read_pcm_file(source: Any, where: str) -> Recording | None:
    try:
        return _read_pcm(_file(source), where)
    except OSError as error:
        raise _unreadable(where, error) from error


def _file(source: Any) -> Any:
    return io.BytesIO(source) if isinstance(source, bytes) else str(source)


def _read_pcm(file: Any, where: str) -> Recording | None:
    """Read a WAV file with PCM samples; None for other formats.

    Raises OSError, and :class:`UnusableSample` for a file that ends early.
    """
    try:
        with wave.open(file, "rb") as opened:
            width, rate = opened.getsampwidth(), opened.getframerate()
            num_channels = opened.getnchannels()
            num_bytes = opened.getnframes() * width * num_channels
            content = opened.readframes(opened.getnframes())
    except (wave.Error, EOFError):
        return None
    if len(content) < num_bytes < _UNKNOWN_SIZE:
        raise UnusableSample(
            "an audio file ends before its header says",
            f"{where}: {len(content)} of {num_bytes} bytes",
            "copy it again, or remove this sample",
        )
    num_frames = len(content) // (width * num_channels)
    numbers = _as_numbers(content[: num_frames * width * num_channels], width)
    if numbers is None or rate < 1:
        return None
    return Recording(numbers.reshape(num_frames, num_channels).T, rate)


def _as_numbers(content: bytes, width: int) -> Samples | None:
    """Convert PCM samples of *width* bytes to float32 between -1 and 1, as soundfile does."""
    if width == 1:
        unsigned = np.frombuffer(content, np.uint8).astype(np.float32)
        return ((unsigned - 128) / 128).astype(np.float32)
    if width == 3:
        # As the upper three bytes of integers of four.
        padded = np.zeros((len(content) // 3, 4), np.uint8)
        padded[:, 1:] = np.frombuffer(content, np.uint8).reshape(-1, 3)
        return (padded.view("<i4").reshape(-1) / 2.0**31).astype(np.float32)
    if width in (2, 4):
        scale = 2.0 ** (8 * width - 1)
        return (np.frombuffer(content, f"<i{width}") / scale).astype(np.float32)
    return None


def _read_by_soundfile(source: Any, where: str) -> Recording:
    soundfile = _soundfile(where)
    try:
        samples, rate = soundfile.read(_file(source), dtype="float32", always_2d=True)
    except MemoryError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        raise _unreadable(where, error) from error
    return Recording(samples.T, int(rate))


def _soundfile(where: str) -> Any:
    """Import soundfile. Raises :class:`UnusableSample` if it is not installed."""
    try:
        import soundfile  # type: ignore[import-not-found]
    except (ImportError, OSError) as error:
        raise UnusableSample(
            "an audio is no WAV file with PCM samples, and reading others requires soundfile",
            f"{where} ({error})",
            f"install it: {_INSTALL}; or convert the file, if it is one of audio",
        ) from error
    return soundfile


def _unreadable(where: str, error: Exception) -> UnusableSample:
    reason = shortened(str(getattr(error, "strerror", None) or error or type(error).__name__))
    return UnusableSample("an audio cannot be read", f"{where} ({reason})", _HINT)


def _mono(samples: Samples) -> Samples:
    if len(samples) == 1:
        return np.ascontiguousarray(samples[0])
    mean: Samples = samples.mean(axis=0, dtype=np.float32)
    return mean


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
