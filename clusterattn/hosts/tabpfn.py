"""TabPFN (9 or later): attention by clustering among its attention backends, for tables of many rows.

    served = ca.hosts.tabpfn.register()
    TabPFNClassifier().fit(x, y).predict(more)
    print(served)  # how many calls were answered how

Every TabPFN model of the process asks the backend before each call; what it declines goes on as before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from .._checks import FLOATS
from .._errors import check_whole
from .._plan import check_stateless
from .._types import Method
from ..methods import MethodSpec
from ..methods import method as as_method
from ..methods.budgets import Shape
from ._served import CallCounts, answer, chosen, need

__all__ = ["register", "unregister"]

METHOD: MethodSpec = "auto"
MIN_ROWS = 3000
MIN_DIM = 32


@dataclass(frozen=True, eq=False)
class TabpfnBackend:
    """What TabPFN's registry holds: it sees the shapes of a call first, and its tensors if it takes it."""

    name: ClassVar[str] = "clusterattn"

    method: Method
    min_rows: int
    min_dim: int
    served: CallCounts = field(default_factory=CallCounts)

    def is_preferred(self, spec: Any) -> bool:
        method, reason = self.method, self._why_not(spec)
        if not reason:
            group = spec.num_heads // spec.num_kv_heads
            shape = Shape(spec.seq_len_q, spec.seq_len_kv, spec.head_dim, spec.head_dim, group=group)
            rows = (spec.batch_size or 1) * spec.num_heads
            method, reason = chosen(method, shape, rows, spec.device, spec.dtype)
        self.served.note("exact" if reason else str(method), reason)
        return not reason

    def run(self, q_BSHD: Tensor, k_BSJD: Tensor, v_BSJD: Tensor, **context: Any) -> Tensor:
        return answer(q_BSHD, k_BSJD, v_BSJD, self.method)

    def _why_not(self, spec: Any) -> str:
        n, m = spec.seq_len_q, spec.seq_len_kv
        if n is None or m is None:
            return "its lengths are not known"
        if min(n, m) < self.min_rows:
            return f"fewer than {self.min_rows} rows"
        if spec.head_dim < self.min_dim:
            return f"heads of less than {self.min_dim} dimensions"
        if self.method.self_only and n != m:
            return f"{type(self.method).__name__} needs as many keys as queries"
        return "" if spec.dtype in FLOATS else f"no kernels for {spec.dtype}"


def register(method: MethodSpec = METHOD, *, min_rows: int = MIN_ROWS, min_dim: int = MIN_DIM) -> CallCounts:
    """Let a method answer TabPFN's long attention calls: rows that attend to the training rows.

    Args:
        method: "auto": Refined where it is faster on this device, TabPFN's own attention elsewhere. Any other method
            answers whatever the settings below let through
        min_rows: calls with fewer queries or keys stay as they are, however slow: attention over features, inducing
            points, small tables, where an error would buy nothing
        min_dim: so do heads of fewer dimensions, where grouping costs as much as attention

    Returns the counts of how calls are answered from now on; print them. Registering again replaces the settings.
    Rows are grouped together, so the answer for a test row depends a little on the other rows of its batch.
    """
    check_whole("register", min_rows=min_rows, min_dim=min_dim)
    method = as_method(method)
    check_stateless(method)
    backend = TabpfnBackend(method, min_rows, min_dim)
    unregister()
    _registry().register_attention_backend(backend)
    return backend.served


def unregister() -> None:
    """TabPFN's own attention answers again. Does nothing where nothing was registered."""
    _registry().unregister_attention_backend(TabpfnBackend.name)


def _registry() -> Any:
    need("tabpfn", "tabpfn.architectures.shared.scaled_dot_product_attention", "9")  # registers TabPFN's own first
    return need("tabpfn", "tabpfn.architectures.shared.attention_backends", "9")
