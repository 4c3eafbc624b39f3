from .combine import combine as combine
from .dispatch import dispatch as dispatch
