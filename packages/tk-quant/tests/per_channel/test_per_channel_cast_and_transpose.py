"""The tiers of per_channel_cast_and_transpose; its results are tested in test_per_channel_cast.py."""

from tk_core.testing import tiers
from tk_quant.testing.per_channel.per_channel_cast_and_transpose import SPEC

test_cpu = tiers.cpu_tests(SPEC)
test_compile = tiers.compile_tests(SPEC)
test_gpu = tiers.gpu_tests(SPEC)
test_gpu_modes = tiers.gpu_mode_tests(SPEC)
