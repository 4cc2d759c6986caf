"""Mini-batches of as many graphs as fit into a budget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Generator
from torch.utils.data import Sampler

from gnnaccel.data.samplers.checks import check_choice, check_count, check_generator
from gnnaccel.data.samplers.epoch import Epoch
from gnnaccel.data.samplers.plan import Ints, cut, split
from gnnaccel.data.samplers.policy import Limits, admit
from gnnaccel.data.samplers.state import (
    EpochState,
    fingerprint,
    read_state,
    warn_same_order,
    write_state,
)

#: Seeds of the orders that say how many batches an epoch has. Any would do.
_REFERENCES = (1, 2, 3, 4)
#: How often an order is drawn before a reference serves instead.
_TRIES = 16


class BudgetBatchSampler(Sampler[list[int]]):
    """Batches of as many graphs as fit into every budget that is given.

    Graphs are taken in order (shuffled or not) and a batch ends where the next graph
    would break a budget. Every graph comes exactly once per epoch, and no batch is
    empty.

    **Length.** Every epoch has the same, exactly known number of batches, so that
    progress bars, schedulers and trainers can rely on ``len``. With ``shuffle`` it is
    the most that a few reference orders need; in an epoch that needs fewer the
    fullest batches are halved, and an order that needs more is drawn again.

    **Random order.** As in torch's ``RandomSampler``, every iteration draws one
    number from ``generator`` (torch's own if ``None``), which fixes the order. After
    :meth:`set_epoch`, and always on several ranks, the order follows from the epoch
    and from the seed of ``generator`` instead, and nothing is drawn. On several ranks
    without a ``generator`` that seed is 0, as in ``DistributedSampler``.

    **Several ranks.** Every rank makes the same plan and takes every
    ``world_size``-th batch of it; nothing is communicated. All get the same number
    of batches: the remainder is made up by halving batches, so that still no graph
    comes twice. Only if there are fewer graphs than batches needed (nearly every
    graph alone in its batch) do the first batches of the epoch come a second time.

    **Resume.** ``state_dict`` / ``load_state_dict`` continue in mid-epoch. A loader
    with workers or look-ahead has taken more batches from the sampler than the
    training loop has seen: give :meth:`state_dict` the number that was seen.

    Args:
        dataset: Any data set of graphs that has a length. Sizes are measured once,
            here: a transform that makes graphs of random size can break a budget.
        max_nodes: Most nodes in a batch, all node types together.
        max_edges: Most edges in a batch, all edge types together.
        max_graphs: Most graphs in a batch.
        max_bytes: Most bytes of tensors in a batch, as in the graphs themselves; the
            vectors ``batch`` and ``ptr`` come on top.
        shuffle: Whether each epoch has a new random order.
        too_big: What becomes of a graph that breaks a budget alone: ``"error"``
            raises now, ``"alone"`` makes a batch of it, ``"skip"`` leaves it out
            (counted by ``num_skipped``).
        generator: Where random order comes from. On several ranks it must be seeded
            alike.
        rank: Which share of the batches to give, from 0.
        world_size: How many shares there are.

    Attributes:
        num_skipped: How many graphs are left out for being too big.

    Raises:
        ValueError: No budget is given, an argument is out of range, or a graph is too
            big and ``too_big="error"``.
        TypeError: An argument has a wrong type, or an item is no graph.

    Example::

        sampler = BudgetBatchSampler(dataset, max_nodes=10_000, shuffle=True)
        loader = DataLoader(dataset, batch_sampler=sampler)
    """

    num_skipped: int

    def __init__(
        self,
        dataset: Any,
        *,
        max_nodes: int | None = None,
        max_edges: int | None = None,
        max_graphs: int | None = None,
        max_bytes: int | None = None,
        shuffle: bool = False,
        too_big: str = "error",
        generator: Generator | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__()
        self.limits = Limits(max_nodes, max_edges, max_graphs, max_bytes)
        self.shuffle = bool(shuffle)
        self.too_big = check_choice("too_big", too_big, ("error", "alone", "skip"))
        self.generator = check_generator(generator)
        self.world_size = check_count("world_size", world_size, 1)
        self.rank = check_count("rank", rank, 0)
        if self.rank >= self.world_size:
            raise ValueError(
                f"Expected 'rank' to be below 'world_size' (got rank={rank}, "
                f"world_size={world_size}): ranks count from 0"
            )
        self.dataset = dataset
        # `_graphs` are the graphs that are dealt out, `_sizes` [k, n] their sizes.
        self._graphs, self._sizes, self._extra = admit(
            dataset, self.limits, self.too_big, self._also_measured()
        )
        self.num_skipped = len(dataset) - len(self._graphs)
        self._count: int | None = None
        self._epoch: int | None = None if self.world_size == 1 else 0
        self._resume: EpochState | None = None
        self._running: Epoch | None = None
        self._warned = False

    # What a subclass arranges differently --------------------------------------------

    def _also_measured(self) -> tuple[str, ...]:
        """Kinds of size that the order depends on; they arrive in ``_extra``."""
        return ()

    def _order(self, generator: Generator | None) -> Ints:
        """The order of the graphs that is cut into batches.

        Args:
            generator: Draws it; ``None``: unshuffled.

        Returns:
            ``[n]``, int64, a permutation.
        """
        if generator is None:
            return np.arange(len(self._graphs))
        return torch.randperm(len(self._graphs), generator=generator).numpy()

    def _deal(self, steps: int, generator: Generator | None) -> Ints:
        """The order of the steps; in each, every rank takes one of adjacent batches."""
        return np.arange(steps)

    # Sampler -------------------------------------------------------------------------

    def __len__(self) -> int:
        """How many batches a whole epoch gives this rank, in every epoch the same."""
        return -(-self._num_batches // self.world_size)

    def __iter__(self) -> Iterator[list[int]]:
        # A generator, so that nothing happens before the first batch is asked for: a
        # loader with workers makes one iterator that it throws away.
        state, self._resume = self._resume, None
        if state is None:
            self._warn_of_a_repeat()
            state = EpochState(self._next_seed(), self._epoch)
        self._running = running = self._plan(state)
        yield from running

    def set_epoch(self, epoch: int) -> None:
        """Fixes the order of the next iterations to the one of this epoch.

        Args:
            epoch: Its number. A resumed epoch goes on if it has this number.
        """
        self._epoch = check_count("epoch", epoch, 0)
        if self._resume is not None and self._resume.epoch != self._epoch:
            self._resume = None

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """Where the running epoch stands, the same on all ranks; small and picklable.

        Args:
            batches: How many batches of this epoch the training loop has seen, those
                before a resume included. ``None``: all that the sampler has given,
                which is right for a loader without workers and look-ahead.

        Raises:
            ValueError: ``batches`` is more than the sampler has given.
        """
        state = self._resume
        if state is None and self._running is not None:
            state = self._running.state
        if batches is not None:
            given = 0 if state is None else state.position
            if check_count("batches", batches, 0) > given:
                raise ValueError(
                    f"Expected 'batches' to be at most the {given} that the sampler "
                    f"gave in this epoch (got {batches}): count from 0 in every epoch"
                )
            if state is not None:
                state = state.at(batches)
        return write_state(state, self._epoch, self._fingerprint, self.generator)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Lets the next iteration go on where ``state_dict`` was taken.

        It gives the rest of that epoch; later ones are whole. ``len`` stays that of a
        whole epoch. The order of later epochs is what it would have been if torch's
        random state is restored too (that of ``generator`` is part of the state).

        Raises:
            ValueError: The state was taken with other graphs, budgets or ranks.
        """
        self._resume, self._epoch = read_state(
            state_dict, self._fingerprint, self.generator
        )
        self._running = None

    # Planning ------------------------------------------------------------------------

    @property
    def _num_batches(self) -> int:
        """Batches per epoch before they are dealt to ranks."""
        if self._count is None:
            orders = [self._order(None)] if not self.shuffle else self._references()
            self._count = max(len(self._cut(order)) - 1 for order in orders)
        return self._count

    def _references(self) -> Iterator[Ints]:
        for seed in _REFERENCES:
            yield self._order(Generator().manual_seed(seed))

    def _cut(self, order: Ints) -> Ints:
        sizes = np.take(self._sizes, order, axis=1)
        return cut(sizes, self.limits.values, self.limits.max_graphs)

    def _plan(self, state: EpochState) -> Epoch:
        steps = len(self)
        # Fewer graphs than batches needed: the first batches come again.
        count = min(steps * self.world_size, len(self._graphs))
        draws = Generator().manual_seed(state.seed) if self.shuffle else None
        order, bounds = self._draw(draws)
        bounds = split(bounds, count)
        mine = self._deal(steps, draws) * self.world_size + self.rank
        mine %= max(count, 1)
        return Epoch(self._graphs[order], bounds[mine], bounds[mine + 1], state)

    def _draw(self, generator: Generator | None) -> tuple[Ints, Ints]:
        """An order that needs no more batches than an epoch has, and its bounds."""
        for _ in range(_TRIES):
            order = self._order(generator)
            bounds = self._cut(order)
            if len(bounds) - 1 <= self._num_batches:
                return order, bounds
        order = next(self._references())
        return order, self._cut(order)

    # Seeds and epochs ----------------------------------------------------------------

    def _next_seed(self) -> int:
        if not self.shuffle:
            return 0
        if self._epoch is None:
            device = "cpu" if self.generator is None else self.generator.device
            drawn = torch.empty((), dtype=torch.int64, device=device)
            return int(drawn.random_(generator=self.generator).item())
        if self.generator is not None:
            base = self.generator.initial_seed()
        else:
            # Ranks are often seeded differently, and must agree.
            base = torch.initial_seed() if self.world_size == 1 else 0
        return (base + self._epoch) % 2**63

    def _warn_of_a_repeat(self) -> None:
        if self._warned or self._running is None or not self.shuffle:
            return
        last = self._running.state
        if self.world_size > 1 and last.finished and last.epoch == self._epoch:
            self._warned = True
            warn_same_order(self)

    @property
    def _fingerprint(self) -> int:
        return fingerprint(
            self._graphs,
            self._sizes,
            self.limits.values,
            [
                *(self.limits.max_graphs or 0, self._num_batches, self.world_size),
                *(int(self.shuffle), len(self.dataset)),
            ],
        )
