"""What a site does in an exchange: send a gradient, receive the sum.

    with exchange.connect(invitation) as stream:
        total = stream.swap("pair", gradient, examples)

Instead of `swap`, a site may `send`, go on computing, and `receive` the sum later. The site itself
checks here all that it sends and receives, with or without a network.
"""

from abc import ABC, abstractmethod
from typing import Self

import numpy as np

from fedda.errors import ExchangeError, NotFiniteError
from fedda.exchange.groups import Group, Invitation
from fedda.exchange.sums import Vector
from fedda.exchange.tally import Tally


class Stream(ABC):
    """One site's connection to a session; only one thread may use it.

    Attributes:
        node: the site's name.
        tallies: what left over a network, by group; a gradient that is sent again counts once.
    """

    def __init__(self, invitation: Invitation) -> None:
        self.node = invitation.node
        self.tallies: dict[str, Tally] = {}
        self._groups = {group.name: group for group in invitation.groups}
        self._sent = dict.fromkeys(self._groups, 0)
        self._due: set[str] = set()  # groups whose sum is still to be received

    def swap(self, group: str, gradient: Vector, examples: int) -> Vector:
        """Send a gradient and wait for the sum over all members -> a copy of it (size,).

        Raises:
            ExchangeError: the session ended early, or this is not what was agreed on.
            NotFiniteError: the gradient holds NaN or infinity; nothing was sent.
        """
        self.send(group, gradient, examples)
        return self.receive(group)

    def send(self, group: str, gradient: Vector, examples: int) -> None:
        """Send a gradient; its sum must be received before the next one is sent.

        Args:
            group: name of the group.
            gradient: (size,) float32, a sum over examples.
            examples: how many.

        Raises:
            ExchangeError: the session ended early, or this is not what was agreed on.
            NotFiniteError: the gradient holds NaN or infinity; nothing was sent.
        """
        agreed = self._agreed(group)
        if group in self._due:
            raise ExchangeError(
                f"Group '{group}' still owes the sum of sync {self._sent[group]}: "
                "receive it before the next gradient is sent."
            )
        if self._sent[group] == agreed.syncs:
            raise ExchangeError(
                f"All {agreed.syncs} syncs of group '{group}' are done: this session takes no more."
            )
        if gradient.dtype != np.float32 or gradient.shape != (agreed.size,):
            raise ExchangeError(
                f"A gradient for group '{group}' is {gradient.dtype} of shape {gradient.shape}: "
                f"it must be float32 of shape ({agreed.size},)."
            )
        if type(examples) is not int or examples < 1:
            raise ExchangeError(
                f"A gradient for group '{group}' sums over {examples!r} examples: "
                "it must be a whole number above 0."
            )
        if not agreed.masked and not np.isfinite(gradient).all():
            raise NotFiniteError(
                f"The gradient for group '{group}' holds values that are not finite: "
                "lower the learning rate or the weight of the adversarial loss."
            )
        self._push(group, self._sent[group], gradient, examples)
        self._sent[group] += 1
        self._due.add(group)

    def receive(self, group: str) -> Vector:
        """Wait for the sum of the gradient sent last -> a copy of it (size,).

        Raises:
            ExchangeError: the session ended early, or the sum is not usable.
        """
        agreed = self._agreed(group)
        if group not in self._due:
            raise ExchangeError(f"Group '{group}' owes no sum: send a gradient first.")
        total = self._pull(group, self._sent[group] - 1)
        if total.size != agreed.size:
            raise ExchangeError(
                f"The sum of group '{group}' came with {total.size} values instead of "
                f"{agreed.size}: it is not used."
            )
        total = total.copy()
        if not agreed.masked and not np.isfinite(total).all():
            raise ExchangeError(
                f"The sum of group '{group}' at sync {self._sent[group]} holds values that are not "
                "finite: it is not used."
            )
        self._due.discard(group)
        return total

    def sent(self, group: str) -> int:
        """How many gradients of this site the session has.

        It is more than 0 at the start if this site's program was restarted during the session; the
        last sum is then still to be received.
        """
        self._agreed(group)
        return self._sent[group]

    @abstractmethod
    def close(self) -> None:
        """Leave the session; it ends if other sites wait for this one's gradient."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _push(self, group: str, index: int, gradient: Vector, examples: int) -> None: ...

    @abstractmethod
    def _pull(self, group: str, index: int) -> Vector: ...

    def _agreed(self, group: str) -> Group:
        if group not in self._groups:
            raise ExchangeError(
                f"{self.node} is in no group '{group}' of this session: "
                f"its groups are {', '.join(self._groups)}."
            )
        return self._groups[group]
