from .configuration_adaperceiver import AdaPerceiverConfig, AdaptiveConfig, OperatingPoint


__all__ = ["AdaPerceiverConfig", "AdaptiveConfig", "OperatingPoint"]
