"""Modules: attention by any method where torch's own stands, encoders, ClusterFormer with its losses."""

from .attention import MultiheadAttention
from .clusterformer import ClusterFormerEncoder, ClusterFormerLayer, ClusterFormerLosses, ClusterMap
from .decoder import COMMITMENT, Decoder, DecoderLayer
from .encoder import Encoder, EncoderLayer
from .swapping import restore, swap
from .watch import Grouping, warn_if_collapsed, watched

__all__ = [
    "COMMITMENT",
    "ClusterFormerEncoder",
    "ClusterFormerLayer",
    "ClusterFormerLosses",
    "ClusterMap",
    "Decoder",
    "DecoderLayer",
    "Encoder",
    "EncoderLayer",
    "Grouping",
    "MultiheadAttention",
    "restore",
    "swap",
    "warn_if_collapsed",
    "watched",
]
