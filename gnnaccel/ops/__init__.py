"""Graph operations: one family per file, each differentiable to any order.

They run on the fastest backend that serves the tensors at hand (see :func:`backend`)
and are registered with torch as ``torch.ops.gnnaccel.*``, so that ``torch.compile``
takes them whole.
"""

from gnnaccel.kernels import backend, backends
from gnnaccel.ops.attention import attention
from gnnaccel.ops.gather import gather, scatter, segment
from gnnaccel.ops.message import message_sum
from gnnaccel.ops.sddmm import sddmm
from gnnaccel.ops.softmax import edge_softmax, softmax
from gnnaccel.ops.spmm import spmm

__all__ = [
    "attention",
    "backend",
    "backends",
    "edge_softmax",
    "gather",
    "message_sum",
    "scatter",
    "sddmm",
    "segment",
    "softmax",
    "spmm",
]
