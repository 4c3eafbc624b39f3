"""expand_to_fused_bwd: gradient of `expand_to_fused`, each token's sum of the gradients of its copies.

    acc = 0;  acc = acc + grad_rows[pos]  for k = 0, 1, ... with pos = token_topk_to_pos[t, k] >= 0    (float32)
    grad_x[t] = round(acc)

This is `reduce_fused` without weights, bit for bit (fma(x, 1, acc) is x + acc, rounded once), and launches its kernel.
"""

from torch import Tensor

from tk_core import check
from tk_core.replay import replayable
from tk_moe.lib.check_maps import check_positions
from tk_moe.reduce.reduce_fused import _INPUT_DTYPES, _reduce_fused_out


@replayable
def expand_to_fused_bwd(grad_rows: Tensor, token_topk_to_pos: Tensor) -> Tensor:
    """Gradient of `expand_to_fused` with respect to x: each token's sum of the gradients of its copies.

    The slots are added from the first to the last in float32, and the sum is rounded to the dtype of grad_rows. Rows of
    padding, which no position names, are not read.

    Args:
        grad_rows: (num_expanded_tokens, hidden) bfloat16 or float32, contiguous, hidden % 64 == 0. (`expand_to_fused`
            itself takes any hidden and dtype.)
        token_topk_to_pos: int32 (num_tokens, num_topk); negative means none, and a position past the last row is
            ignored (`TK_DEBUG=1` raises ValueError).

    Returns:
        (num_tokens, hidden) of grad_rows' dtype; zeros for a token without any position.

    Raises:
        TypeError: a wrong type or dtype. ValueError: a wrong shape, stride or device.
    """
    num_expanded_tokens, hidden = check.tensor("grad_rows", grad_rows, _INPUT_DTYPES, ("num_expanded_tokens", "hidden"))
    check.multiple_of("hidden (columns of grad_rows)", hidden, 64)
    num_tokens, _ = check_positions(token_topk_to_pos, "num_tokens", num_expanded_tokens, grad_rows.device)
    grad_x = grad_rows.new_empty((num_tokens, hidden))
    _reduce_fused_out(grad_rows, None, None, token_topk_to_pos, None, grad_x)
    return grad_x
