"""Named cases of ops, and functions that compare their outputs. Importing this imports torch but not TileLang."""

from tk_core.testing.numeric import assert_equal as assert_equal
from tk_core.testing.numeric import calc_diff as calc_diff
from tk_core.testing.numeric import check_bias as check_bias
from tk_core.testing.numeric import nearest_float32 as nearest_float32
from tk_core.testing.poison import Poison as Poison
from tk_core.testing.poison import poison as poison
from tk_core.testing.poison import poisoned_allocations as poisoned_allocations
from tk_core.testing.specs import Case as Case
from tk_core.testing.specs import OpSpec as OpSpec
from tk_core.testing.specs import load_specs as load_specs
from tk_core.testing.specs import packages as packages

__all__ = [
    "Case",
    "OpSpec",
    "Poison",
    "assert_equal",
    "calc_diff",
    "check_bias",
    "load_specs",
    "nearest_float32",
    "packages",
    "poison",
    "poisoned_allocations",
]
