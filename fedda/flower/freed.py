"""Memory that Flower's HTTP client gives back as soon as it is not used any more.

In httpx an answer and the stream that it was read from refer to each other, and the answer to its
request. So both bodies, pieces of models, stay in memory until a garbage collection, which large
bodies alone never begin: at a site these were several models.
"""

from typing import Any

import httpx


def freeing(client: httpx.Client) -> httpx.Client:
    """Let a client's answers be freed, with their requests, when nobody refers to them any more."""
    send = client.send

    def sent(request: httpx.Request, **more: Any) -> httpx.Response:
        response = send(request, **more)
        if response.is_closed:  # it has been read as a whole
            response.stream = httpx.ByteStream(b"")
        return response

    client.send = sent
    return client
