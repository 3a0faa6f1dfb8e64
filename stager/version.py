"""The version, also where stager runs from its source tree without being installed."""

__version__ = "0.1.0"
