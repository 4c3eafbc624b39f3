"""Matrices and scales for the optimizer's steps, and how their results are compared."""

from typing import Any

import torch

from tk_core.testing.numeric import assert_same_metadata
from tk_core.testing.trees import tensors


def make_rows(num_rows: int, width: int, device: str, *, first_element: int = 0) -> dict[str, Any]:
    """A normal matrix with a column of 1000-fold values, and scales of 0.5 … 2.

    Tensors start at element `first_element` of their storage.
    """

    def tensor(*shape: int) -> torch.Tensor:
        return torch.empty(first_element + torch.Size(shape).numel(), device=device)[first_element:].view(shape)

    matrix = tensor(num_rows, width).normal_()
    matrix[:, width // 2] *= 1000
    row_scale, col_scale = tensor(num_rows).uniform_(0.5, 2.0), tensor(width).uniform_(0.5, 2.0)
    return {"matrix": matrix, "row_scale": row_scale, "col_scale": col_scale, "eps": 1e-20}


def compare(actual: Any, expected: Any) -> None:
    """Within torch.testing's tolerances for float32, and with the same metadata."""
    torch.testing.assert_close(actual, expected)
    for index, (x, y) in enumerate(zip(tensors(actual), tensors(expected), strict=True)):
        assert_same_metadata(x, y, f"tensor {index}")
