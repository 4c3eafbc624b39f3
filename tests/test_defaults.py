"""No op depends on torch's default dtype and device, which frameworks change while they build a model."""

import pytest
import torch

import tk_quant
from tk_core import env
from tk_core.testing import assert_equal, load_specs
from tk_core.testing.specs import OpSpec
from tk_core.testing.tiers import run
from tk_core.testing.trees import transfer

SPECS = load_specs()


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_op(spec: OpSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    kwargs = next(case for case in spec.cases if case.small and case.modes).make("cpu")
    runs = [transfer(kwargs) for _ in range(2)]
    expected = run(spec, spec.op, kwargs)
    # Debug checks read tensors, and make some. Cases of the lossless cast have what these refuse.
    monkeypatch.setattr(env, "debug", lambda: spec.op is not tk_quant.per_block_cast_lossless)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta"), torch.no_grad():
            found = [run(spec, function, given) for function, given in zip((spec.op, spec.reference), runs)]
    finally:
        torch.set_default_dtype(before)
    assert_equal(found, [expected, expected])
