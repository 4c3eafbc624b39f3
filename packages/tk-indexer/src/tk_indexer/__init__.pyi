from . import reference as reference
from .scores.dense import fp8_fp4_mqa_logits as fp8_fp4_mqa_logits
from .scores.dense import fp8_mqa_logits as fp8_mqa_logits
from .selection.topk_indices import topk_indices as topk_indices

__version__: str
