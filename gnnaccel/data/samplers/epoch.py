"""One pass over the batches of one rank."""

from __future__ import annotations

from gnnaccel.data.samplers.plan import Ints
from gnnaccel.data.samplers.state import EpochState


class Epoch:
    """Iterator over the batches of one epoch that knows where it stands.

    Attributes:
        state: What to remember to come back to this place.
    """

    state: EpochState

    def __init__(
        self, order: Ints, starts: Ints, stops: Ints, state: EpochState
    ) -> None:
        """Begins where ``state`` says.

        Args:
            order: ``[n]``, int64: positions in the data set.
            starts: ``[B]``, int64: where in ``order`` each batch begins.
            stops: ``[B]``, int64: where it ends.
            state: The place in this epoch.
        """
        self._order = order
        self._bounds = list(zip(starts.tolist(), stops.tolist(), strict=True))
        self.state = state

    def __iter__(self) -> Epoch:
        return self

    def __next__(self) -> list[int]:
        position = self.state.position
        if position >= len(self._bounds):
            self.state.finished = True
            raise StopIteration
        self.state.position = position + 1
        start, stop = self._bounds[position]
        batch: list[int] = self._order[start:stop].tolist()
        return batch
