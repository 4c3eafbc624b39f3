from . import reference as reference
from .selection.topk_indices import topk_indices as topk_indices

__version__: str
