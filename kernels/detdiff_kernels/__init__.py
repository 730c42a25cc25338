"""Reference kernels that fix every rounding of a linear operation, forced native paths, dispatch profiles.

Knows nothing of detdiff and of no array library but numpy; numba is imported when a kernel first runs.
"""

from __future__ import annotations

from . import forced
from .dispatch import Call, Choice, Profile, Range, Rule
from .errors import BadOperand, KernelLibraryError, ProfileError, UnknownKernel, UnknownProfile
from .library import Kernel, kernel, kernel_names
from .order import Order, Staged
from .profile_file import load_profile, profile, profile_names

__all__ = [
    "BadOperand",
    "Call",
    "Choice",
    "Kernel",
    "KernelLibraryError",
    "Order",
    "Profile",
    "ProfileError",
    "Range",
    "Rule",
    "Staged",
    "UnknownKernel",
    "UnknownProfile",
    "forced",
    "kernel",
    "kernel_names",
    "load_profile",
    "profile",
    "profile_names",
]
