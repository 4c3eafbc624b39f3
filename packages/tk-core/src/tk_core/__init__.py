"""What the tk packages share: compilation, op registration, checks, architectures, testing. Names load on first use."""

from typing import TYPE_CHECKING

from tk_core.lazy import export

if TYPE_CHECKING:
    from tk_core.arch import Arch as Arch
    from tk_core.arch import UnsupportedArchError as UnsupportedArchError
    from tk_core.arch import get_arch as get_arch
    from tk_core.num_sms import get_device_num_sms as get_device_num_sms
    from tk_core.num_sms import get_num_sms as get_num_sms
    from tk_core.num_sms import num_sms as num_sms
    from tk_core.num_sms import set_num_sms as set_num_sms
    from tk_core.op import backend as backend

__version__: str

__all__ = [
    "Arch",
    "UnsupportedArchError",
    "backend",
    "get_arch",
    "get_device_num_sms",
    "get_num_sms",
    "num_sms",
    "set_num_sms",
]

export(
    __name__,
    {
        "Arch": "arch",
        "UnsupportedArchError": "arch",
        "backend": "op",
        "get_arch": "arch",
        "get_device_num_sms": "num_sms",
        "get_num_sms": "num_sms",
        "num_sms": "num_sms",
        "set_num_sms": "num_sms",
    },
)
