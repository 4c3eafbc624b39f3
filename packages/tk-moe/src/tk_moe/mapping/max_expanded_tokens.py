"""max_expanded_tokens: how many rows get_fused_mapping can need, whatever experts the tokens choose."""

from tk_core import check


def max_expanded_tokens(num_tokens: int, num_topk: int, num_experts: int, alignment: int) -> int:
    """Most rows that `get_fused_mapping` can need for num_tokens · num_topk pairs, over all routings.

    ⌊(pairs + (alignment - 1) · min(num_experts, pairs)) / alignment⌋ · alignment: at most min(num_experts, pairs)
    experts have pairs, each of these is padded by at most alignment - 1 rows, and the sum is a multiple of alignment.
    The bound is reached where all but one of these experts have one pair each.

    With this many rows, which suffice for any routing, `get_fused_mapping` need not synchronize to read sizes back:

        num_rows = max_expanded_tokens(num_tokens, num_topk, num_experts, 16)
        get_fused_mapping(topk_idx, num_experts, num_rows, 16, force_no_sync=True)

    Args:
        num_tokens: At least 0; may be a torch.SymInt, which torch.compile uses for a dynamic size.
        num_topk: At least 1.
        num_experts: At least 1.
        alignment: The size of each segment is a multiple of this; at least 1.

    Raises:
        TypeError: an argument is not an int. ValueError: it is out of range.
    """
    for name, value, least in (
        ("num_tokens", num_tokens, 0),
        ("num_topk", num_topk, 1),
        ("num_experts", num_experts, 1),
        ("alignment", alignment, 1),
    ):
        check.integer(name, value)
        check.require(value >= least, name, "at least {}", value, least)
    pairs = num_tokens * num_topk
    return (pairs + (alignment - 1) * min(num_experts, pairs)) // alignment * alignment
