"""The version of casckpt, which is defined only here."""

__version__ = "0.2.0"
