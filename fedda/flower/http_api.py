"""Flower's HTTP APIs: a POST of one protobuf message, answered by another."""

import ssl
from typing import Any, TypeVar

import httpx
from google.protobuf.message import Message

from fedda.errors import KeyFileError

MEDIA = dict.fromkeys(("content-type", "accept"), "application/protobuf")
TIMEOUT_S = 30.0  # of a call that names no other

A = TypeVar("A", bound=Message)


def client(
    address: str, api: str, *, insecure: bool, authority: bytes | None, **more: Any
) -> httpx.Client:
    """A client of one API of a SuperLink.

    Args:
        address: host:port.
        api: "fleet", which sites call, or "control", which operators call.
        insecure: speak plain HTTP.
        authority: the certificate to trust, in PEM; None means the system's authorities.
        more: for httpx; its headers are added.

    Raises:
        KeyFileError: it is not a certificate.
    """
    return httpx.Client(
        base_url=f"http{'s' * (not insecure)}://{address}/v1/{api}/",
        verify=not insecure and _trusting(authority),
        timeout=TIMEOUT_S,
        headers={**MEDIA, **more.pop("headers", {})},
        **more,
    )


def call(client: httpx.Client, name: str, request: Message, answer: type[A], **more: Any) -> A:
    """Make one call -> its answer; `more` is for httpx.

    Raises:
        httpx.HTTPStatusError: it was refused.
        httpx.TransportError: there was no answer.
        google.protobuf.message.DecodeError: the answer is of something else.
    """
    response = client.post(name, content=request.SerializeToString(), **more)
    response.raise_for_status()
    return answer.FromString(response.content)


def _trusting(certificate: bytes | None) -> ssl.SSLContext:
    if certificate is None:
        return httpx.create_ssl_context()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cadata=certificate.decode("ascii"))
    except (ssl.SSLError, UnicodeDecodeError) as error:
        raise KeyFileError(
            "the file given with --ca is not a PEM certificate: give the ca.crt of the server"
        ) from error
    return context
