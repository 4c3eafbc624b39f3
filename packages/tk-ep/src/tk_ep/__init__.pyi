from . import reference as reference
from .buffer import ElasticBuffer as ElasticBuffer
from .errors import EPTimeoutError as EPTimeoutError
from .errors import UnsupportedTopologyError as UnsupportedTopologyError
from .events import EventHandle as EventHandle
from .events import EventOverlap as EventOverlap
from .handle import EPHandle as EPHandle
from .handle import topk_idx_t as topk_idx_t
from .local_group import LocalGroup as LocalGroup

__version__: str
