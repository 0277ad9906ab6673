"""The version, in one place: the package, the wheel and every row of results read it here."""

__version__ = "0.2.0.dev0"
