"""NamedTuples as parameters of a launch, whose operator has their fields."""

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, Signature
from itertools import islice
from typing import Any, get_type_hints


def spelled_out(launch: Callable[..., None]) -> Callable[..., None]:
    """The launch with the fields of its NamedTuples as parameters, as torch's schemas know no tuple of mixed types."""
    hints = get_type_hints(launch)
    del hints["return"]
    tuples = [hint if hasattr(hint, "_fields") else None for hint in hints.values()]
    fields: dict[str, Any] = {}
    for name, hint in hints.items():
        fields |= get_type_hints(hint) if hasattr(hint, "_fields") else {name: hint}

    @wraps(launch)
    def spelled(*args: Any) -> None:
        values = iter(args)
        launch(*(next(values) if each is None else each(*islice(values, len(each._fields))) for each in tuples))

    parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, annotation=hint) for name, hint in fields.items()]
    spelled.__signature__ = Signature(parameters, return_annotation=None)  # type: ignore[attr-defined]
    return spelled
