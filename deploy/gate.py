"""The only way out of a site's container: forward TCP to one host, port by port, and nowhere else.

    python gate.py HOST PORT...

TLS goes through as it is: nothing here can read or change what a site and its server say.
"""

import asyncio
import sys
from functools import partial


async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """Pass on all that comes, and its end."""
    while data := await source.read(65536):
        sink.write(data)
        await sink.drain()
    sink.write_eof()


async def meet(
    host: str, port: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Give a connection one of its own to the same port of the host."""
    ends = [writer]
    try:
        there, back = await asyncio.open_connection(host, port)
        ends.append(back)
        await asyncio.gather(copy(reader, back), copy(there, writer))
    except OSError as error:
        print(f"a connection to {host}:{port} broke: {error}", file=sys.stderr)
    finally:
        for end in ends:
            end.close()


async def main() -> None:
    """Listen at each port until the container stops."""
    host, *ports = sys.argv[1:]
    _ = [await asyncio.start_server(partial(meet, host, port), port=port) for port in ports]
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
