from .configuration_adaperceiver import AdaPerceiverConfig


__all__ = ["AdaPerceiverConfig"]
