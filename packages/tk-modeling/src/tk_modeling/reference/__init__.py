"""The modules of tk_modeling in plain PyTorch: the same parameters and state_dict, any floating-point dtype."""

from tk_modeling.reference.engram import Engram as Engram
from tk_modeling.reference.engram import EngramGate as EngramGate
from tk_modeling.reference.fp8 import FP8Linear as FP8Linear
from tk_modeling.reference.fp8 import GroupedFP8Linear as GroupedFP8Linear
from tk_modeling.reference.mhc import HyperConnection as HyperConnection
from tk_modeling.reference.mhc import HyperHead as HyperHead
from tk_modeling.reference.mhc import expand_from_embedding as expand_from_embedding
from tk_modeling.reference.moe import MoE as MoE
from tk_modeling.reference.moe import Router as Router

__all__ = [
    "Engram",
    "EngramGate",
    "FP8Linear",
    "GroupedFP8Linear",
    "HyperConnection",
    "HyperHead",
    "MoE",
    "Router",
    "expand_from_embedding",
]
