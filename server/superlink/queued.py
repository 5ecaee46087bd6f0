"""Requests in a queue for each site, where flwr looks through those of all sites.

flwr's store in memory looks at every open request whenever a site, or a run's program, asks for
messages. So a round of N sites costs it N times N looks, which with a thousand sites is most of a
server's time. A database has an index, and stays as it is.
"""

from datetime import UTC, datetime
from typing import Any


def queued(state: Any) -> None:
    """Let flwr's LinkState find the requests for a node without a look at those for others."""
    if not hasattr(state, "message_ins_store"):
        return
    queues: dict[int, list[str]] = {}  # names of requests, the oldest first, by node
    store = state.store_message_ins

    def stored(message: Any) -> str | None:
        name: str | None = store(message)
        if name is not None:
            with state.lock:
                node_id = message.metadata.dst_node_id
                # Those that a node never asked for are deleted when their run ends.
                kept = [n for n in queues.get(node_id, ()) if n in state.message_ins_store]
                queues[node_id] = list(dict.fromkeys([*kept, name]))
        return name

    def taken(node_id: int, limit: int | None, *, run_id: int | None = None) -> list[Any]:
        found: list[Any] = []
        with state.lock:
            left = []
            for name in queues.pop(node_id, ()):
                state._check_stored_messages({name})  # deletes it if it has expired
                message = state.message_ins_store.get(name)
                if message is None or message.metadata.delivered_at:
                    continue
                if run_id not in (None, message.metadata.run_id) or len(found) == limit:
                    left.append(name)
                    continue
                message.metadata.delivered_at = datetime.now(UTC).isoformat()
                found.append(message)
            if left:
                queues[node_id] = left
        return found

    state.store_message_ins, state.get_message_ins = stored, taken
