from . import fma as fma
from . import scales as scales
