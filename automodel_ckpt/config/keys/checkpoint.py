"""The sections ``checkpoint`` and ``hub``: how checkpoints are saved, loaded and uploaded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from automodel_ckpt.base.hub_access import is_repo_name, is_revision_name
from automodel_ckpt.base.store_url import is_url
from automodel_ckpt.config.tree.rules import (
    AT_LEAST_0,
    AT_LEAST_1,
    AT_LEAST_1_OR_AUTO,
    AT_LEAST_2,
    MISSING,
    NOT_EMPTY,
    POSITIVE,
    UP_TO_2,
    Condition,
    Relation,
    Rule,
    needs,
    setting,
)


@dataclass
class RemoteConfig:
    """Copies of the checkpoints in an object store. Published checkpoints are uploaded in the background. A start
    loads the newest one, unless the local disk has it. Credentials come from the environment."""

    url: str = ""
    """URL of the run's directory in the store: s3://BUCKET/PATH, gs://, az://, or file:// of a mounted disk.
    Without it, checkpoint_dir must be such a URL."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the store, such as endpoint_url and region_name; no secrets."""
    required: bool = False
    """Wait at the end of the run until the last checkpoint is in the store; false: only while uploads make progress."""
    wait_after_signal_seconds: float = setting(90.0, AT_LEAST_0)
    """After a signal and the save, wait for uploads for at most this many seconds after the signal, because the local
    disk may be lost with the machine; 0: do not wait."""
    keep_last: int | None = setting(None, AT_LEAST_1)
    """Keep the newest N checkpoints in the store and remove others; null: keep all."""
    keep_best: int = setting(0, AT_LEAST_0)
    """In addition to keep_last, keep the N best checkpoints in the store."""
    keep_every_steps: int | None = setting(None, AT_LEAST_1)
    """In addition to keep_last, keep checkpoints in the store with a step that is a multiple of N."""
    keep_steps: list[int] = field(default_factory=list)
    """In addition to keep_last, keep the checkpoints of these steps in the store."""
    max_mb_per_second: float | None = setting(None, POSITIVE)
    """Maximum rate of uploads, in 10^6 bytes per second; null: no limit."""
    num_threads: int = setting(8, AT_LEAST_1)
    """Files, and parts of large files, that are transferred at the same time."""

    conditions: ClassVar[tuple[Condition, ...]] = (
        needs(
            "keep_best keep_every_steps keep_steps",
            "keep_last",
            "the store keeps all checkpoints, because keep_last is not set",
            "set checkpoint.remote.keep_last, or remove the key",
        ),
    )


@dataclass
class MemoryConfig:
    """Checkpoints in memory between those on disk. After a failure, a restart continues from the newest one."""

    every_steps: int | Literal["auto"] = setting(1, AT_LEAST_1_OR_AUTO)
    """Copy the state to memory every N steps, which a failure loses at most. auto: as often as training waits for
    copies for about 1% of its time, and never for a copy that is still being written."""
    directory: str = setting("/dev/shm", NOT_EMPTY)  # noqa: S108 - the directory made in it is private
    """Directory on a tmpfs (a file system in memory), with space for two copies of the state of all ranks of a node."""
    replicas: int = setting(1, UP_TO_2)
    """On several nodes: the number of other nodes that get a copy of each node's part of the state in their memory.
    This many nodes can be lost. Each copy takes as much memory and network traffic as a node's own part."""
    max_mb_per_second: float | None = setting(None, POSITIVE)
    """Maximum rate at which a node sends copies to others, in 10^6 bytes per second; null: no limit."""


@dataclass
class CheckpointConfig:
    """How checkpoints are saved and loaded."""

    enabled: bool = True
    """Save checkpoints and resume from them."""
    checkpoint_dir: str = setting("checkpoints/", NOT_EMPTY)
    """Run directory, for checkpoints, training.jsonl and validation.jsonl; or a URL, as remote.url."""
    scratch_dir: str | None = setting(None, NOT_EMPTY)
    """If checkpoint_dir is a URL: the local directory in which this run gets its own directory, where checkpoints are
    written and wait for their upload; null: runs/ in $AUTOMODEL_CKPT_CACHE or ~/.cache/automodel_ckpt. On several nodes
    it has the same path; they need not share it."""
    model_save_format: Literal["safetensors", "torch_save"] = "safetensors"
    """Format of the model's shards; torch_save is the format of torch.distributed.checkpoint (DCP)."""
    model_layout: Literal["shards", "hf", "adapter"] | None = None
    """shards: each rank writes its own files; hf, adapter: all ranks write the final Hugging Face or peft files
    together; null: shards, or adapter with peft."""
    save_consolidated: Literal["final", "every"] | bool | None = None
    """Export Hugging Face files from the final or every (or true) checkpoint, or never (false); null: final with
    safetensors, otherwise false. With model_layout adapter, model/ is the export: any value is accepted."""
    is_async: bool = False
    """Save asynchronously: training continues as soon as the state is copied to CPU memory."""
    incremental: Literal["auto"] | bool = "auto"
    """Share the shards of tensors that do not train with an earlier checkpoint by hard links. auto: if they take 16 MiB
    or more, and never with the checkpoint just before, so that two checkpoints stay independent; true: always."""
    export_best: bool = False
    """At the end, also export the checkpoint that LOWEST_VAL points to. Not needed with adapters."""
    export_ema: bool = False
    """At the end, also export the average of the weights (section ema) of the last checkpoint. Not needed with adapters
    or model_layout hf."""
    average_last: int | None = setting(None, AT_LEAST_2)
    """At the end, average the weights of the newest N checkpoints. The result is a checkpoint of Hugging Face files in
    averaged/ in the run directory; a resume does not use it."""
    restore_from: str | None = None
    """Checkpoint to resume from: LATEST, LOWEST_VAL, a name, a path or a URL; null: the newest usable one."""
    save_optimizer: bool = True
    """Save the optimizer state; false: only weights, so that a resume is not exact."""
    best_metric_key: str = setting("val_loss", NOT_EMPTY)
    """Metric that selects the best checkpoint (LOWEST_VAL)."""
    best_mode: Literal["min", "max"] = "min"
    """Whether a lower (min) or a higher (max) best_metric_key is better."""
    keep_last: int | None = setting(None, AT_LEAST_1)
    """Keep the newest N checkpoints and remove others; null: keep all. Linked and pinned ones are never removed."""
    keep_best: int = setting(0, AT_LEAST_0)
    """In addition to keep_last, keep the N best checkpoints by best_metric_key."""
    keep_every_steps: int | None = setting(None, AT_LEAST_1)
    """In addition to keep_last, keep checkpoints with a step that is a multiple of N."""
    keep_steps: list[int] = field(default_factory=list)
    """In addition to keep_last, keep the checkpoints of these steps."""
    on_save_failure: Literal["stop", "continue"] = "stop"
    """When a save fails: stop the run, or continue with a warning until the next save is due. The exit code is then 4
    unless a later save succeeds."""
    verify: Literal["none", "size", "digest"] = "digest"
    """What to verify of each file before resuming."""
    allow_missing_state: list[str] = field(default_factory=list)
    """Attributes that may be missing in the checkpoint or the recipe, and optimizers with state that may differ."""
    allow_changed_model: bool = False
    """Resume even if the model's config changed in a way that affects its outputs, such as rope_theta."""
    on_incompatible: Literal["error", "sibling"] = "error"
    """If existing checkpoints are of another model: raise an error, or start a new run in a sibling directory."""
    remote: RemoteConfig | None = None
    """Copies of the checkpoints in an object store; null: none."""
    memory: MemoryConfig | None = None
    """Checkpoints in memory between those on disk; null: none."""
    verify_replicas: bool = False
    """Before each save, compare the replicas of the model (DDP, HSDP) bit by bit. If they differ, the run
    names the ranks and ends, or restarts."""

    relations: ClassVar[tuple[Relation, ...]] = (
        Relation(
            ("model_layout", "model_save_format"),
            lambda section: (
                section.model_layout not in ("hf", "adapter")
                or section.model_save_format == "safetensors"
            ),
            "model_save_format torch_save requires model_layout shards",
            "remove model_save_format: Hugging Face files are safetensors",
        ),
        Relation(
            ("save_consolidated", "export_best", "model_layout"),
            lambda section: (
                section.model_layout != "hf"
                or not (section.save_consolidated or section.export_best)
            ),
            "save_consolidated and export_best have no effect with model_layout hf",
            "remove them: model/ in each checkpoint already contains the Hugging Face files",
        ),
        Relation(
            ("average_last", "keep_last"),
            lambda section: (
                section.average_last is None
                or section.keep_last is None
                or section.keep_last >= section.average_last
            ),
            "average_last needs more checkpoints than keep_last keeps",
            "set keep_last to at least average_last",
        ),
        Relation(
            ("memory", "on_incompatible"),
            lambda section: section.memory is None or section.on_incompatible != "sibling",
            "checkpoints in memory belong to one run directory, and on_incompatible: sibling may choose another",
            "remove memory, or set on_incompatible to error",
        ),
        Relation(
            ("remote.url", "checkpoint_dir"),
            lambda section: (
                section.remote is None or bool(section.remote.url) != is_url(section.checkpoint_dir)
            ),
            "exactly one of remote.url and checkpoint_dir must be the URL of the store",
            "set remote.url to a URL and checkpoint_dir to a local directory, or only checkpoint_dir to a URL",
        ),
    )
    conditions: ClassVar[tuple[Condition, ...]] = (
        needs(
            "keep_best keep_every_steps keep_steps",
            "keep_last",
            "all checkpoints are kept, because keep_last is not set",
            "set checkpoint.keep_last, or remove the key",
        ),
        Condition(
            ("on_incompatible",),
            ("restore_from",),
            lambda section: section.restore_from is None,
            "restore_from selects the checkpoint",
            "remove restore_from or on_incompatible",
        ),
        Condition(
            ("scratch_dir",),
            ("checkpoint_dir",),
            lambda section: is_url(section.checkpoint_dir),
            "checkpoint_dir is a local directory",
            "remove it, or set checkpoint_dir to a URL",
        ),
    )


REPOSITORY = Rule(is_repo_name, "ORG/NAME, of letters, digits, -, _ and .")
REVISION = Rule(
    lambda name: name is None or is_revision_name(name),
    "the name of a branch, of letters, digits, -, _, . and /",
)


@dataclass
class HubConfig:
    """Upload the model to the Hugging Face Hub, with a model card, while training continues. The token comes from
    `hf auth login` or HF_TOKEN."""

    repo: str = setting(MISSING, REPOSITORY)
    """Repository ORG/NAME. It is created if it does not exist."""
    push: Literal["final", "best", "every"] = "final"
    """final: the last checkpoint of a run that ends on its own; best: each checkpoint that becomes the best one; every:
    each checkpoint, to a branch step-N, and the best one (without validation, the newest) to revision too."""
    private: bool = True
    """Create a private repository, and upload to no public one."""
    revision: str | None = setting(None, REVISION)
    """Branch; null: the main branch."""
    card: str | None = setting(None, NOT_EMPTY)
    """Path of a README.md to upload; null: a model card is written from the run."""
    base_model: str | None = setting(None, REPOSITORY)
    """Name of the base model on the Hub for the card, if from_pretrained is a local directory."""
    license: str | None = setting(None, NOT_EMPTY)
    """License of the model for the card; null: the base model's."""
    required: bool = False
    """End the run with an error if the last upload failed; false: with a warning."""
