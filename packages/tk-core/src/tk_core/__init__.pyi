from . import check as check
from . import compat as compat
from . import device as device
from . import env as env
from . import flat_operator as flat_operator
from . import headers as headers
from . import kernel as kernel
from . import lazy as lazy
from . import math as math
from . import op as op
from . import reference as reference
from . import repeat as repeat
from . import scales as scales
from . import serving as serving
from . import testing as testing
from .arch import Arch as Arch
from .arch import UnsupportedArchError as UnsupportedArchError
from .arch import get_arch as get_arch
from .num_sms import get_device_num_sms as get_device_num_sms
from .num_sms import get_num_sms as get_num_sms
from .num_sms import num_sms as num_sms
from .num_sms import set_num_sms as set_num_sms
from .serving import backend as backend

__version__: str
