"""Integer helpers for shapes."""


def ceil_div(a: int, b: int) -> int:
    """⌈a / b⌉ for b > 0."""
    return -(-a // b)


def align(a: int, b: int) -> int:
    """The least multiple of b that is at least a."""
    return -(-a // b) * b
