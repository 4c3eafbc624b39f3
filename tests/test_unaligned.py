"""Every op takes tensors aligned to no more than the size of an element, or says that it does not."""

import pytest

from tk_core.testing import Case, OpSpec, load_specs
from tk_core.testing.tiers import run
from tk_core.testing.trees import map_tensors, tensors, unaligned


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("spec", "case"),
    [
        pytest.param(spec, case, id=f"{spec.name}-{case.name}")
        for spec in load_specs().values()
        for case in spec.cases
        if case.modes
    ],
)
def test_gpu_unaligned_tensors(spec: OpSpec, case: Case) -> None:
    kwargs = case.make("cuda")
    moved = map_tensors(unaligned, kwargs)
    assert all(x.data_ptr() % 16 for x in tensors(moved) if x.numel())
    if spec.name.startswith("tk_gemm."):  # TMA reads the operands as they are; a copy would cost as much as a product.
        with pytest.raises(ValueError, match="expected a base on 16 bytes"):
            run(spec, spec.op, moved)
        return
    spec.compare(run(spec, spec.op, moved), run(spec, spec.reference, kwargs))
