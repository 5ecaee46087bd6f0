"""Import the strategies by the name they have here: `strategies`, or `fedda.strategies`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING or __package__ == "server":
    from strategies import base
    from strategies.sites import mail, post, roster
else:  # in the wheel all folders lie inside fedda
    from fedda.strategies import base
    from fedda.strategies.sites import mail, post, roster

__all__ = ["base", "mail", "post", "roster"]
