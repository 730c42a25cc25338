"""The trace format: writer, reader, digests and validation. docs/trace-format.md states its rules."""

from detdiff.trace.contents import (
    PHASES,
    Embeddings,
    Generated,
    Lens,
    Port,
    RowIndex,
    Rows,
    Site,
    Value,
    format_ranges,
    parse_ranges,
    ports_of,
)
from detdiff.trace.digest import (
    B_DTYPE,
    B_LENGTH,
    DTYPE_CODES,
    coefficients,
    combine_entries,
    digest_bias,
    digest_rows,
    head_weight,
    position_weight,
    splitmix64,
)
from detdiff.trace.log import computed, flat_row
from detdiff.trace.reader import Trace
from detdiff.trace.shard import Shard
from detdiff.trace.store import Address, Place, local, place
from detdiff.trace.writer import TraceWriter

__all__ = [
    "B_DTYPE",
    "B_LENGTH",
    "DTYPE_CODES",
    "PHASES",
    "Address",
    "Embeddings",
    "Generated",
    "Lens",
    "Place",
    "Port",
    "RowIndex",
    "Rows",
    "Shard",
    "Site",
    "Trace",
    "TraceWriter",
    "Value",
    "coefficients",
    "combine_entries",
    "computed",
    "digest_bias",
    "digest_rows",
    "flat_row",
    "format_ranges",
    "head_weight",
    "local",
    "parse_ranges",
    "place",
    "ports_of",
    "position_weight",
    "splitmix64",
]
