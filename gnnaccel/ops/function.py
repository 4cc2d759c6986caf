"""The base of our autograd functions: torch's, with a shorter way in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import unwrap_dead_wrappers


class Function(torch.autograd.Function):
    """A :class:`torch.autograd.Function` that is always called with all arguments.

    torch's ``apply`` looks up the signature of ``forward`` at every call, to fill in
    defaults that ours do not have. That takes 15 microseconds, more than the whole
    product on a small graph.
    """

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """See :meth:`torch.autograd.Function.apply`."""
        if torch._C._are_functorch_transforms_active():
            return super().apply(*args)
        # Past torch.autograd.Function, to what it calls.
        skip: Any = super(torch.autograd.Function, cls)
        return skip.apply(*unwrap_dead_wrappers(args))


def differentiable_gradients(
    function: Callable[..., Tensor],
    inputs: Sequence[Tensor | None],
    grad: Tensor,
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of ``function(*inputs)`` that have gradients themselves.

    Args:
        function: Differentiable to any order.
        inputs: Its arguments.
        grad: The gradient of its result.
        wanted: For which inputs.

    Returns:
        One per input; ``None`` where it isn't wanted.
    """
    if not any(wanted):
        return [None] * len(inputs)
    create = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views: one tensor may be two inputs, each with a gradient of its own.
        own = [None if x is None else x.view_as(x) for x in inputs]
        out = function(*own)
    sources = [x for x, w in zip(own, wanted, strict=True) if w and x is not None]
    found = iter(
        torch.autograd.grad(out, sources, grad, create_graph=create, allow_unused=True)
    )
    return [next(found) if w else None for w in wanted]
