"""Answers that come in time though their sites looked dead, which flwr would drop.

flwr answers a run in a site's place, and forgets its request, as soon as the site's heartbeats are
late: also if the site's answer has come. And it deletes an answer of which no piece came for three
minutes. Here a run's program learns from the list of connected sites who is gone (`present`), and
its own deadlines say how long an answer is waited for.
"""

from typing import Any

from fedda import flower

GONE_S = 3600.0  # so long after a site's last sign a run hears that its answer will not come
PIECES_S = 24 * 3600  # so long an answer waits for its next piece


def awaited() -> None:
    """Let flwr's LinkState wait for late answers, from now on and in the whole process."""
    for module in (flower.in_memory_linkstate, flower.sql_linkstate):
        vars(module)["check_node_availability_for_in_message"] = _gone
    for module in (flower.in_memory_corestate, flower.sql_corestate):
        vars(module)["OBJECT_PUSH_SESSION_TTL_SECONDS"] = PIECES_S


def _gone(*, node_id_to_online_until: dict[int, Any], **asked: Any) -> dict[str, Any]:
    """Flwr's own check, for sites that are away for long; one without a key is away at once."""
    until = {n: t + GONE_S for n, t in node_id_to_online_until.items() if t is not None}
    return flower.check_node_availability_for_in_message(node_id_to_online_until=until, **asked)
