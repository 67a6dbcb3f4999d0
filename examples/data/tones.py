"""Synthetic audio without a network: tones of three pitches with their names, and a small processor for them.

``python -P -m automodel_ckpt.examples.data.tones DIRECTORY`` writes WAV files, ``train.jsonl`` and
``validation.jsonl`` for :func:`automodel_ckpt.data.vlm.transcripts`.
"""

from __future__ import annotations

import json
import sys
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from automodel_ckpt.examples.data.python_docs import train_tokenizer

SAMPLING_RATE = 16_000
NUM_MELS = 16
WINDOW_SECONDS = 1
PITCHES = {"low": 300.0, "middle": 900.0, "high": 2700.0}
"""Name -> frequency in Hz."""
_NUM_TONES = 2
_TONE_SECONDS = 0.4
_SIZES = {"train": 480, "validation": 60}
_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% for part in message['content'] %}{% if part['type'] == 'audio' %}"
    "<|audio_bos|><|AUDIO|><|audio_eos|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def processor(vocab_size: int = 512) -> Any:
    """Make a processor of Qwen2-Audio for audio of at most one second.

    Its tokenizer has *vocab_size* entries and is trained on the Python documentation.
    """
    import transformers

    library: Any = transformers  # its constructors have no annotations
    tokenizer = train_tokenizer(vocab_size)
    names = ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>", "<|user|>", "<|assistant|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    features = library.WhisperFeatureExtractor(
        feature_size=NUM_MELS, sampling_rate=SAMPLING_RATE, chunk_length=WINDOW_SECONDS
    )
    return library.Qwen2AudioProcessor(features, tokenizer, chat_template=_TEMPLATE)


def write(directory: Path) -> Iterator[Path]:
    """Write WAV files of two tones each, and the rows of each split. Yields the files with the rows."""
    directory.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    for split, size in _SIZES.items():
        lines = []
        for number in range(size):
            words = [str(word) for word in generator.choice(list(PITCHES), _NUM_TONES)]
            name = f"{split}_{number}.wav"
            _write_wav(directory / name, words, generator)
            lines.append(json.dumps({"audio": name, "text": " ".join(words)}))
        path = directory / f"{split}.jsonl"
        path.write_text("\n".join(lines) + "\n")
        yield path


def _write_wav(path: Path, words: list[str], generator: np.random.Generator) -> None:
    """Write tones with these names, of different loudness, with noise, as samples of 16 bits."""
    times = np.arange(int(_TONE_SECONDS * SAMPLING_RATE)) / SAMPLING_RATE
    tones = [np.sin(2 * np.pi * PITCHES[word] * times) for word in words]
    samples = np.concatenate(tones) * generator.uniform(0.3, 0.8)
    samples += generator.normal(0, 0.01, len(samples))
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLING_RATE)
        file.writeframes((samples * 2**15).clip(-(2**15), 2**15 - 1).astype("<i2").tobytes())


def _main() -> None:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python -P -m automodel_ckpt.examples.data.tones DIRECTORY")
    for path in write(Path(sys.argv[1])):
        sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    _main()
