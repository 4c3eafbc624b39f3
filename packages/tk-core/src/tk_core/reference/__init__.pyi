from . import fma as fma
from . import quantize as quantize
from . import scales as scales
