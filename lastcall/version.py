"""The software version, which locks record."""

__version__ = "0.1.0"
