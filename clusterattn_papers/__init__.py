"""What the papers train and show: their tasks, models, training loop, tables and figures.

Needs the extra "train". The library, ``clusterattn``, imports nothing from here; its command line finds ``commands``.
"""

from clusterattn._version import __version__

__all__ = ["__version__"]
