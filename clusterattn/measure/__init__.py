"""How close to exact attention, how fast, how much memory: measured, written down as rows, drawn.

Measuring needs torch alone; ``plots``, ``report`` and ``show`` need the extra "cli".
"""

from .._rows import Row, append, commit, dumps, environment, hardware, read, rows_path
from .bounds import Proposition1, proposition1, subset_error
from .error import exact_answer, head_errors, relative_error, row_l1
from .sample import Sample, embedded, load, mixture
from .sampled import ErrorReport, error_report
from .speed import interleaved, peak_memory

__all__ = [
    "ErrorReport",
    "Proposition1",
    "Row",
    "Sample",
    "append",
    "commit",
    "dumps",
    "embedded",
    "environment",
    "error_report",
    "exact_answer",
    "hardware",
    "head_errors",
    "interleaved",
    "load",
    "mixture",
    "peak_memory",
    "proposition1",
    "read",
    "relative_error",
    "row_l1",
    "rows_path",
    "subset_error",
]
