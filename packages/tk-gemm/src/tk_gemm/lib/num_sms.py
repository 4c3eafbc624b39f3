"""tk_core's limit on SMs, under the names that DeepGEMM's users expect in this package."""

from tk_core.num_sms import get_num_sms, set_num_sms

__all__ = ["get_num_sms", "set_num_sms"]
