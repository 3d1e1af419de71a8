"""Alias of `configuration/configuration_adaperceiver.py`: remote code finds only files that stand side by side."""

from .configuration.configuration_adaperceiver import *  # noqa: F403
