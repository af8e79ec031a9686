"""Hold the commands of this package, and its version, which setup.py reads."""

__version__ = "0.1.0"
