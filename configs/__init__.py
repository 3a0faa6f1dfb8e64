"""Default configuration and formats, shipped as ``stager.configs``."""
