"""Modules: attention by any method where torch's own stands, encoders, ClusterFormer with its losses."""

from .attention import MultiheadAttention
from .clusterformer import ClusterFormerEncoder, ClusterFormerLayer, ClusterFormerLosses
from .decoder import COMMITMENT, Decoder, DecoderLayer
from .encoder import Encoder, EncoderLayer
from .swap import restore, swap

__all__ = [
    "COMMITMENT",
    "ClusterFormerEncoder",
    "ClusterFormerLayer",
    "ClusterFormerLosses",
    "Decoder",
    "DecoderLayer",
    "Encoder",
    "EncoderLayer",
    "MultiheadAttention",
    "restore",
    "swap",
]
