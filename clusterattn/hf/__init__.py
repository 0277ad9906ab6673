"""Pretrained models: put a method in the place of their attention, look at what flows, put everything back.

Importing this registers "clusterattn" as an attention implementation of Hugging Face transformers.
"""

try:
    import transformers as _transformers  # noqa: F401
except ModuleNotFoundError as _missing:
    raise ModuleNotFoundError(
        f'{_missing.name} is not installed; clusterattn.hf needs it: pip install "clusterattn[hf]"', name=_missing.name
    ) from None

from .._layer_call import LayerCall
from .._report import LayerRow, Report
from .observing import observe
from .register import NAME
from .swapping import layers, restore, swap

__all__ = ["NAME", "LayerCall", "Report", "LayerRow", "layers", "observe", "restore", "swap"]
