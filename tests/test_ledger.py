"""Every op was verified on a GPU and launches the same now, in each of its gpu cases, or is pending with a reason."""

from collections.abc import Callable

import pytest

from tk_core import ledger
from tk_core.testing import launches, load_specs, packages

_SPECS = load_specs()


@pytest.mark.compile
@pytest.mark.parametrize("op", _SPECS)
def test_verified_or_pending(op: str, record_property: Callable[[str, object], None]) -> None:
    if why := ledger.not_comparable(op):
        record_property("tk_line", why)
        pytest.skip(why)
    ((_, status),) = launches.compared([op])
    if status.state == "verified" and status.reason:
        record_property("tk_line", f"{op}: {status.reason}")
    assert status.state in ("verified", "pending"), (
        f"{op}: {status.state}, {status.reason}; run pytest -m gpu --tk-record, or tk verify --pending {op} WHY"
    )


@pytest.mark.parametrize("package", packages())
def test_no_record_of_an_op_that_is_gone(package: str) -> None:
    gone = set(ledger.entries(package)) - set(_SPECS)
    assert not gone, f"{ledger.path(package)}: expected ops of {package} only, got {sorted(gone)}"
