"""The repository of a recipe's model: its revision, and whether its code may run."""

from __future__ import annotations

from dataclasses import replace

from automodel_ckpt.config.callables.trust import trusts_remote_code
from automodel_ckpt.config.keys.model import ModelConfig
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.models.inspect.repository import RepositoryOptions


def repository_options(section: ModelConfig) -> RepositoryOptions:
    """How the repository of ``model.from_pretrained``, or of a name in ``model.from_config``, is read."""
    return RepositoryOptions(
        section.revision,
        requests_code=section.trust_remote_code,
        trusts_code=trusts_remote_code(),
    )


def preprocessor_options(config: RecipeConfig, name: str, where: str) -> RepositoryOptions:
    """How the repository *name* of a tokenizer or processor, which the dotted key *where* gives, is read.

    The options of the model apply to its repository only. A tokenizer of another repository can run code with a
    ``_target_`` and its argument ``trust_remote_code``.
    """
    section = config.model
    options = RepositoryOptions()
    if isinstance(section, ModelConfig) and name in (section.from_pretrained, section.from_config):
        options = repository_options(section)
    own = getattr(config, where.partition(".")[0])
    if own is not section and own.revision is not None:
        options = replace(options, revision=own.revision)
    return options
