"""Attention over a sequence that many ranks hold together: each its share of the queries and of the keys.

``ca.parallel.attention`` is ``ca.attention`` for the clustered family (Clustered, Improved, Refined) on shares of a
sequence; what travels between ranks does not grow with its length. docs/parallel.md says what that is.
"""

from __future__ import annotations

from ._attention import attention
from ._collectives import Traffic
from ._exact import few_exactly

__all__ = ["Traffic", "attention", "few_exactly"]
