"""ScoringFunc: how a gate's logits become scores (lib/scores.py has the code that the kernels of gates share).

sigmoid        1 / (1 + exp(-x))
sqrtsoftplus   sqrt(log(1 + exp(x))), where the logarithm is replaced by x for x above 20
softmax        exp(x - max) / Σ exp(x - max), over the experts of a token
identity       x

Every operation rounds as torch's does on the same device: accurate exponentials, IEEE divisions and square roots. Only
top2_sum_gate approximates sigmoids.
"""

import enum

from tk_core import check

__all__ = ["ScoringFunc"]


class ScoringFunc(enum.IntEnum):
    """How logits become scores. Its str() is the lower-case name; numbers and names are those of TileKernels 1.0.0."""

    SIGMOID = 0
    SQRTSOFTPLUS = 1
    SOFTMAX = 2
    IDENTITY = 3

    def __str__(self) -> str:
        return self.name.lower()

    @classmethod
    def from_str(cls, label: str) -> "ScoringFunc":
        """The member of that name, in upper or lower case; ValueError for any other name."""
        try:
            return cls[label.upper()]
        except (KeyError, AttributeError):
            names = ", ".join(repr(str(member)) for member in cls)
            raise ValueError(f"label: expected one of {names}, got {label!r}") from None


def scoring_func_of(scoring_func: ScoringFunc | str) -> ScoringFunc:
    """A ScoringFunc itself, or that of a name in upper or lower case; TypeError or ValueError for anything else."""
    if isinstance(scoring_func, str):
        check.one_of("scoring_func", scoring_func.lower(), [str(member) for member in ScoringFunc])
        return ScoringFunc.from_str(scoring_func)
    check.require_type(isinstance(scoring_func, ScoringFunc), "scoring_func", "a ScoringFunc or its name", scoring_func)
    return scoring_func


LEAST_SUM = 1e-20
"""Lower bound of the sum by which a token's scores are divided."""
