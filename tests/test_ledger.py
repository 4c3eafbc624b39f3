"""Every op was verified on a GPU with its present source, or is marked pending with a reason."""

import pytest

from tk_core import ledger
from tk_core.testing import load_specs, packages

_SPECS = load_specs()


@pytest.mark.parametrize("op", _SPECS)
def test_verified_or_pending(op: str) -> None:
    status = ledger.status(op)
    assert status.state in ("verified", "pending"), (
        f"{op}: {status.state}, {status.reason}; run pytest -m gpu --tk-record, or tk verify --pending {op} WHY"
    )


@pytest.mark.parametrize("package", packages())
def test_no_record_of_an_op_that_is_gone(package: str) -> None:
    gone = set(ledger.entries(package)) - set(_SPECS)
    assert not gone, f"{ledger.path(package)}: expected ops of {package} only, got {sorted(gone)}"
