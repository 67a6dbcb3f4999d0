"""The launcher passes only settings to torch's elastic agent that the installed version of torch has."""

from __future__ import annotations

from dataclasses import dataclass

from automodel_ckpt.cli.launch import known_fields


@dataclass
class OldLaunchConfig:
    """LaunchConfig of torch 2.10 and 2.11, as far as this test needs it."""

    max_restarts: int = 3


@dataclass
class NewLaunchConfig(OldLaunchConfig):
    shutdown_timeout: int = 30


def test_a_setting_that_this_torch_lacks_is_left_out() -> None:
    settings = {"max_restarts": 1, "shutdown_timeout": 10}
    assert known_fields(OldLaunchConfig, settings) == {"max_restarts": 1}
    assert known_fields(NewLaunchConfig, settings) == settings
