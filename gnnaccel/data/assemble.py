"""The last step of batching: PyG's ``Batch`` around the tensors of a filled slab."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch_geometric.data import Batch
from torch_geometric.data.collate import _batch_and_ptr, _collate
from torch_geometric.data.data import BaseData

from gnnaccel.data.increments import store_of
from gnnaccel.data.leaves import Fields, Items, Tree
from gnnaccel.data.pack import Pack
from gnnaccel.data.recipe import Leaf, StoreSteps
from gnnaccel.data.storage import Blocks

if TYPE_CHECKING:
    from gnnaccel.data.batcher import Layout


def assemble(pack: Pack, layout: Layout, slab: Tensor, small: Tensor | None) -> Batch:
    """See ``Batcher.assemble``."""
    recipe = layout.recipe
    made = _Made(pack, layout, slab, small)
    batch, stores = recipe.shell(recipe.keys)
    slice_dict: dict[Any, Any] = {}
    inc_dict: dict[Any, Any] = {}
    blocks = Blocks({slab.data_ptr(): layout.nbytes})
    if small is not None and layout.small_nbytes:
        blocks.add(small.data_ptr(), layout.small_nbytes)
    for steps, store in zip(recipe.stores, stores, strict=True):
        fields = store.__dict__
        fields["_blocks"] = blocks
        mapping = fields["_mapping"]
        if steps.key is None:
            slices, incs = slice_dict, inc_dict
        else:
            slices, incs = {}, {}
        made.put(steps, fields, slices, incs)
        if steps.key is not None and slices:
            slice_dict[steps.key], inc_dict[steps.key] = slices, incs
        if steps.counts is not None:
            mapping["batch"], mapping["ptr"] = made.numbering(steps.counts)
    own = stores[0].__dict__
    own["_num_graphs"] = len(layout.index)
    own["_slice_dict"] = slice_dict
    own["_inc_dict"] = inc_dict
    return batch


class _Made:
    """The tensors of one batch, and what PyG makes of the rest."""

    def __init__(
        self, pack: Pack, layout: Layout, slab: Tensor, small: Tensor | None
    ) -> None:
        self._pack = pack
        self._layout = layout
        values = layout.values
        self._starts = values.unbind()
        self._incs = values[:, :-1].unbind()
        first = slab.untyped_storage()
        storages = (first, first if small is None else small.untyped_storage())
        self.tensors = []
        for view, offset in zip(layout.recipe.views, layout.offsets, strict=True):
            tensor = torch.empty(0, dtype=view.dtype)
            tensor.set_(  # type: ignore[call-overload]
                storages[view.slab],
                offset // view.item,
                (*view.before, layout.totals[view.row], *view.after),
            )
            self.tensors.append(tensor)
        self._graphs: list[int] | None = None
        self._data_list: list[BaseData] | None = None
        self._device: torch.device | None = None

    @property
    def graphs(self) -> list[int]:
        """The batch's graphs, as positions in the pack."""
        if self._graphs is None:
            self._graphs = self._layout.index.tolist()
        return self._graphs

    def numbering(self, part: int) -> tuple[Tensor, Tensor]:
        """A batch vector and its ``ptr``, on the GPU if PyG would make them there."""
        batch, ptr = self.tensors[part : part + 2]
        if self._device is not None:
            return batch.to(self._device), ptr.to(self._device)
        return batch, ptr

    def put(
        self,
        steps: StoreSteps,
        fields: dict[str, Any],
        slices: dict[str, Any],
        incs: dict[str, Any],
    ) -> None:
        """Puts a storage's attributes, in order, where PyG's collate would."""
        tensors, mapping = self.tensors, fields["_mapping"]
        for step in steps.steps:
            name, made = step.name, step.made
            if type(made) is Leaf and not made.column:
                mapping[name] = tensors[made.part]
                slices[name] = self._starts[made.starts]
                incs[name] = self._incs[made.inc]
            elif step.tree is None:
                # A graph without the storage has no nodes in it.
                numbers = [0 if made[i] is None else made[i] for i in self.graphs]
                fields["_num_nodes"], mapping[name] = numbers, sum(numbers)
                continue
            else:
                value, slices[name], incs[name] = self._tree(
                    name, step.tree, made, steps.key
                )
                mapping[name] = value
                if isinstance(value, Tensor) and value.is_cuda:
                    self._device = value.device
            if step.follow is not None:
                if step.follow >= 0:
                    batch, ptr = self.numbering(step.follow)
                else:
                    batch, ptr = _batch_and_ptr(slices[name], self._device)
                for key, value in ((f"{name}_batch", batch), (f"{name}_ptr", ptr)):
                    if value is not None:
                        mapping[key] = value

    def _tree(self, name: Any, tree: Tree, made: Any, key: Any) -> tuple[Any, Any, Any]:
        if isinstance(made, Leaf):
            incs = self._incs[made.inc]
            if made.column:
                values = self._layout.values
                graphs = values.shape[1] - 1
                incs = values.as_strided(
                    (graphs, made.column, 1),
                    (1, graphs + 1, 1),
                    values.storage_offset() + made.inc * (graphs + 1),
                )
            return self.tensors[made.part], self._starts[made.starts], incs
        if isinstance(tree, Fields):
            parts = {k: self._tree(k, t, made[k], key) for k, t in tree.items.items()}
            return tuple({k: p[j] for k, p in parts.items()} for j in range(3))  # type: ignore[return-value]
        if isinstance(tree, Items):
            items = zip(tree.items, made, strict=True)
            found = [self._tree(name, t, m, key) for t, m in items]
            return tuple([f[j] for f in found] for j in range(3))  # type: ignore[return-value]
        objects = [tree.value(i) for i in self.graphs]
        if isinstance(objects[0], str):
            return _collate(name, objects, [], [], True)
        if self._data_list is None:
            self._data_list = [self._pack.graph(i) for i in self.graphs]
        stores = [store_of(graph, key) for graph in self._data_list]
        return _collate(name, objects, self._data_list, stores, True)
