"""Swap PyG's layers for the fused ones of :mod:`gnnaccel.nn`, in place, and back.

A swap sets ``module.__class__``. The layers of :mod:`gnnaccel.nn` are subclasses of
PyG's that override ``forward`` alone, so everything a layer *is* lives in its
``__dict__`` and stays what it was: parameters and the optimizer that holds them,
buffers, hooks, the train/eval mode, ``state_dict`` keys, and every reference to the
layer, be it in a container, a DDP wrapper or the user's own variable.

Only exact PyG types get a fused forward, for a subclass may override any method that it
would skip (``message``, say). Every other message passing layer, a user's own included,
gets a subclass of its own class that lifts and reduces by our operators, see
:mod:`gnnaccel.nn.generic`; so do the aggregations.

What was swapped is written on the layer itself (:data:`MARK`), not in a table on the
side: the mark travels through ``copy.deepcopy``, ``pickle`` and ``torch.save``, so
:func:`restore` also works on a copy or in another process, and it leaves alone the
layers that a user built from :mod:`gnnaccel.nn` directly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from torch import nn
from torch_geometric.nn import Aggregation, MessagePassing

from gnnaccel.nn import MODULES, SWAPS
from gnnaccel.nn.constants import REUSE
from gnnaccel.nn.generic import generic, reaching
from gnnaccel.nn.lifting import made_from
from gnnaccel.nn.reach import withdraw
from gnnaccel.nn.stand_in import LayerStandIn, StandIn

#: Instance attribute that records what :func:`optimize` did with a layer.
MARK = "_gnnaccel"
SWAPPED = "swapped"
EXCLUDED = "excluded"

_ORIGINALS: dict[type, type] = {
    ours: theirs for theirs, ours in (SWAPS | MODULES).items()
}


def accelerated(cls: type) -> type | None:
    """The class that stands in for a module's; ``None`` if it stays what it is."""
    return SWAPS.get(cls) or MODULES.get(cls) or generic(cls)


def original(cls: type) -> type | None:
    """The class that a class of ours stands in for; ``None`` if it is not ours."""
    return _ORIGINALS.get(cls) or made_from(cls)


Model = TypeVar("Model", bound=nn.Module)


def optimize(
    model: Model,
    filter: Callable[[str, nn.Module], bool] | None = None,
    *,
    reuse_constant_inputs: bool = False,
) -> Model:
    """Make PyG's layers inside ``model`` run on fused kernels, in place.

    Every submodule whose type is exactly one of PyG's supported layers (the keys of
    ``gnnaccel.nn.SWAPS``) becomes the :mod:`gnnaccel.nn` layer of the same name. Every
    other message passing layer keeps its own code and gets faster gathers and
    reductions, unless its class has a true attribute ``leave_to_pyg``. ``HeteroLinear``
    is replaced, too. The objects stay the same, and so do parameters, optimizers,
    hooks, checkpoints and results. The call is silent and may be repeated: a layer that
    is swapped already stays so, whatever the filter says now. :func:`gnnaccel.explain`
    tells what runs how; :func:`restore` is the way back.

    Not reached: a layer hidden in a plain list or dict (PyTorch itself doesn't see
    it there), and the inside of a ``torch.jit`` module, whose code is fixed; call
    ``optimize`` before ``torch.jit.script``. A model already wrapped by
    ``torch.compile`` is reached: it recompiles at its next call.

    A whole model saved with ``torch.save(model)`` or ``torch.package`` names its
    layers' classes, so that file needs gnnaccel wherever it is loaded; ``restore`` it
    first where that may not be. ``model.state_dict()`` never needs it.

    Args:
        model: The model, or a single layer.
        filter: Called as ``filter(name, layer)`` for each layer that can be swapped,
            ``name`` being its qualified name in ``model`` (``""`` if it is the model
            itself). Where it returns a false value the layer is left to PyG. A layer
            that sits in several places is asked about once, under its first name.
        reuse_constant_inputs: Keep sums over the neighbours of features that want no
            gradient, such as those of a whole graph that a first layer gets at every
            step, and reuse them from the third call on with the same tensors. It takes
            memory, as much as those features do per layer or hop. Changes in place and
            other graphs are seen, except what torch itself cannot see (writes through
            ``.data``, or a NumPy alias). The latest call of ``optimize`` decides.

    Returns:
        ``model`` itself.

    Raises:
        TypeError: ``model`` is no ``torch.nn.Module``, or ``filter`` can't be called.

    Example:
        >>> model = gnnaccel.optimize(model)
        >>> model = gnnaccel.optimize(model, lambda name, _: name != "conv1")
    """
    check_module("optimize", model)
    if filter is not None and not callable(filter):
        raise TypeError(
            "gnnaccel.optimize: 'filter' must be a function (name, module) -> bool, "
            f"got {filter!r}"
        )
    # Ask about all layers before the first swap: a filter that raises leaves the
    # model as it was.
    marks = [
        (layer, SWAPPED if filter is None or filter(name, layer) else EXCLUDED)
        for name, layer in model.named_modules()
        if isinstance(layer, MessagePassing) and accelerated(type(layer)) is not None
    ]
    for layer, mark in marks:
        setattr(layer, MARK, mark)
        if mark == SWAPPED:
            _swap(layer)
    # A fused layer looks at the very type of its aggregation, and what is to be left to
    # PyG stays all PyG's.
    left = inside(model, left_to_pyg)
    fused = inside(model, lambda layer: type(layer) in _ORIGINALS)
    for module in model.modules():
        if (
            not isinstance(module, MessagePassing)
            and id(module) not in left
            and accelerated(type(module)) is not None
            and (type(module) in MODULES or id(module) not in fused)
        ):
            setattr(module, MARK, SWAPPED)
            _swap(module)
    for module in _with_functions(model):
        cls = reaching(type(module))
        if cls is not None:
            setattr(module, MARK, SWAPPED)
            module.__class__ = cls
    for module in model.modules():
        if isinstance(module, LayerStandIn):
            vars(module).pop(REUSE, None)
            if reuse_constant_inputs:
                setattr(module, REUSE, True)
    return model


def inside(model: nn.Module, which: Callable[[nn.Module], bool]) -> set[int]:
    """The modules inside some of a model's, and those, by their id."""
    layers = [layer for layer in model.modules() if which(layer)]
    return {id(module) for layer in layers for module in layer.modules()}


def _with_functions(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules whose own ``forward`` may call functions of PyG.

    Not those with a layer inside that is to be left to PyG.
    """
    if isinstance(module, (MessagePassing, Aggregation)):
        return
    if reaching(type(module)) is None or any(map(left_to_pyg, module.modules())):
        for child in module.children():
            yield from _with_functions(child)
    else:
        yield module


def left_to_pyg(module: nn.Module) -> bool:
    """Whether somebody wants a module, and what is inside, to be left to PyG."""
    return vars(module).get(MARK) == EXCLUDED or getattr(module, "leave_to_pyg", False)


def _swap(module: nn.Module) -> None:
    module.__class__ = accelerated(type(module))  # type: ignore[assignment]


def restore(model: Model) -> Model:
    """Undo :func:`optimize`, in place and exactly.

    Layers that the user built from :mod:`gnnaccel.nn` directly are left as they are.

    Args:
        model: A model that went through :func:`optimize`, a copy of one, or one that
            was loaded from a file. A model that never did is returned unchanged.

    Returns:
        ``model`` itself.

    Raises:
        TypeError: ``model`` is no ``torch.nn.Module``, or the class of a swapped
            layer was replaced after the swap (by a parametrization on the layer, for
            instance), so that the way back is barred. Nothing is changed then.
    """
    check_module("restore", model)
    marked = [
        (name, layer) for name, layer in model.named_modules() if MARK in vars(layer)
    ]
    for name, layer in marked:
        # A PyG type under our mark is what `torch.jit.script` leaves in the model it
        # was given: nothing is left to undo but the mark.
        cls = type(layer)
        if (
            vars(layer)[MARK] == SWAPPED
            and not (original(cls) or accelerated(cls))
            and (isinstance(layer, (MessagePassing, StandIn)))
        ):
            raise TypeError(
                f"gnnaccel.restore: the class of {name or 'the model'!r} became "
                f"{cls.__qualname__} after gnnaccel.optimize; undo that "
                "first (torch.nn.utils.parametrize.remove_parametrizations, say)"
            )
    for module in model.modules():
        vars(module).pop(REUSE, None)
    for _, layer in marked:
        theirs = original(type(layer))
        if theirs is not None:
            layer.__class__ = theirs
            if isinstance(layer, MessagePassing):
                # PyG generates each class's propagate() when an instance is built or
                # unpickled. A layer that was unpickled while swapped never gave PyG's
                # class that chance in this process.
                layer._set_jittable_templates()
        delattr(layer, MARK)
    withdraw()  # models that are still optimised call them back at their next run
    return model


def check_module(caller: str, model: object) -> None:
    """Refuse anything but a module, and name the usual slip.

    Args:
        caller: The public function to name in the message.
        model: What the user passed.

    Raises:
        TypeError: ``model`` is no ``torch.nn.Module``.
    """
    if isinstance(model, nn.Module):
        return
    if isinstance(model, type):
        got = f"the class {model.__qualname__} (construct it first)"
    else:
        got = f"{type(model).__qualname__}"
    raise TypeError(f"gnnaccel.{caller}: 'model' must be a torch.nn.Module, got {got}")
