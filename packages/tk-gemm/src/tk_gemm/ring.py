"""The ring's macros, as hopper/fp8_loop.py names them."""

from tk_core.macros.ring import Ring as Ring
from tk_core.macros.ring import fill as fill
from tk_core.macros.ring import load as load
from tk_core.macros.ring import move_on as move_on
from tk_core.macros.ring import release as release
from tk_core.macros.ring import wait_empty as wait_empty
from tk_core.macros.ring import wait_full as wait_full
from tk_core.macros.ring import while_filling as while_filling
from tk_gemm.scheduler import send_end as send_end
