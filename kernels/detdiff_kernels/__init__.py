"""Reference kernels that fix every rounding of a linear operation, forced native paths, dispatch profiles.

Knows nothing of detdiff and of no array library but numpy; numba is imported when a kernel first runs.
"""

from __future__ import annotations

from . import forced
from .attention import Attention
from .dispatch import Call, Choice, Profile, Range, RowSpan, Rule
from .errors import (
    BadOperand,
    KernelLibraryError,
    ProfileError,
    UnknownKernel,
    UnknownProfile,
    UnsupportedFormat,
)
from .gguf_file import read_blocks
from .library import kernel, kernel_names
from .linear import Kernel
from .order import Order, Walk
from .profile_file import load_profile, profile, profile_names
from .staging import Staged
from .weights import Affine, Blocks, Dense, Weight

__all__ = [
    "Affine",
    "Attention",
    "BadOperand",
    "Blocks",
    "Call",
    "Choice",
    "Dense",
    "Kernel",
    "KernelLibraryError",
    "Order",
    "RowSpan",
    "Profile",
    "ProfileError",
    "Range",
    "Rule",
    "Staged",
    "UnknownKernel",
    "UnknownProfile",
    "UnsupportedFormat",
    "Walk",
    "Weight",
    "forced",
    "kernel",
    "kernel_names",
    "load_profile",
    "profile",
    "profile_names",
    "read_blocks",
]
