"""Modules: attention by any method where torch's own stands, encoders, ClusterFormer with its losses."""

from .attention import MultiheadAttention
from .clusterformer import ClusterFormerEncoder, ClusterFormerLayer, ClusterFormerLosses
from .encoder import Encoder, EncoderLayer

__all__ = [
    "ClusterFormerEncoder",
    "ClusterFormerLayer",
    "ClusterFormerLosses",
    "Encoder",
    "EncoderLayer",
    "MultiheadAttention",
]
