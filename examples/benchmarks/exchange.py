"""Syncs per second of the exchange, beside a bare gRPC echo.

    python examples/benchmarks/exchange.py

Every participant is a separate process, the exchange runs in this one; they use TLS on loopback. In
one sync each participant sends a gradient and receives the sum of all. The echo is one client with
one stream of the same library and TLS. It sends as many bytes as a gradient has, waits until they
come back, and sends again; nothing is read, checked or added.

    syncs_per_s_1kb          syncs of two participants, gradients of 250 float32 values
    syncs_per_s_1mb          the same with gradients of 250,000 values
    echoes_per_s_1kb         echoes of one client, with the bytes of the small gradient
    echoes_per_s_1mb         the same with the bytes of the large gradient
    share_of_echo_1kb        syncs per second / echoes per second, for the small gradient
    share_of_echo_1mb        the same for the large gradient
    share_of_two_echoes_1kb  the same when two clients send echoes at once, as two participants do;
                             the rate of the slower client counts
    share_of_two_echoes_1mb  the same for the large gradient
    syncs_per_s_1kb_8        syncs of eight participants, small gradients
    share_of_8_echoes_1kb    the same / echoes per second of the slowest of eight clients
    slowdown_8_over_2        1 kB syncs per second: with two participants / with eight
    memory_growth_mb         growth of this process, the server, in resident memory: from the first
                             tenth of --memory-syncs to the last of them
    load_before              the machine's load average when the benchmark began

An echo has less to do than a sync. The server has a gradient of every participant to receive and a
sum to send to each, so the echo of as many clients at once is what is comparable. In an echo one
thread of each process receives and sends. In a sync a frame passes from the thread that reads it
to the thread that waits for it, once at the server and once at the participant, as sums of other
groups and broken connections must be noticed meanwhile. A small sync takes the server about 0.2 ms
of processor time more than an echo of two clients; checking, adding and packing are 0.02 ms of it,
which leaves the rest to the change of threads. A large one has the SHA-256 of each gradient's frame
for the audit log, about 0.5 ms per MB at the site and at the server, while frames travel; checks,
sum and copies take about 0.02 ms each.

All figures but the last two are medians of --repeats, with exchange and echoes measured in turn; a
share is the median of the repeats' shares. The last line of the output is one JSON object with
these keys.

    python examples/benchmarks/exchange.py --table methods

measures a round of DILS, f-DANN, MDAN and FADA (model II) over processes: a server, a target and
--sources sources on loopback. Beside it, the same steps in one loop of this process, which has the
data of all sites and sends nothing (`central.py`; it does not compute FADA's attention). The loop
runs with one thread and with one per core, and the faster one counts. Rounds are timed from their
start to the next one's, without the target's test, and the first is left out, as is DILS's
pretraining. A loop that is slower than the one before it is left after two rounds. Seconds are
medians of the rounds, then of --repeats; a ratio is the median of the repeats' ratios.

    dils_over_central   seconds of a round over processes / seconds in one loop, for DILS
    fdann_over_central  the same for f-DANN
    mdan_over_central   the same for MDAN
    fada_over_central   the same for FADA, with its attention
    fada_steps_over_central  the same without `attention_s`, as the loop computes no attention
    round_s             seconds of a round over processes, by method
    central_s           seconds of the same steps in one loop, by method
    central_threads     threads of that loop, by method
    cpu_over_central    seconds of processor of all processes in a round / of the loop with one
                        thread, by method: what another program beside this one does not change
    cpu_s               seconds of processor in a round over processes, by method
    attention_s         seconds of FADA's round in which the target compares the sources' models
    sums                how often a site sends gradients in a round, by method
    message_s           seconds of one Flower request to all sources, with their replies, and with
                        a tiny model; less the sources' own work
    messages_s          `sums` times `message_s`, by method: what Flower messages in place of the
                        exchange would take. It is calculated; no such round is run
"""

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import live
import numpy as np

from fedda import exchange
from fedda.lane import tls

SIZES = {"1kb": 250, "1mb": 250_000}
WARM_UP = 50  # syncs or echoes not counted
GROUP = "pair"
ECHO = "/echo.Echo/Join"


def participant(flat: dict[str, Any]) -> float:
    """Take part until the last sync -> syncs per second."""
    address = flat.pop("address")
    invitation = exchange.Invitation.parse(flat)
    group = invitation.groups[0]
    mine = np.random.default_rng(0).normal(size=group.size).astype(np.float32)
    with exchange.connect(invitation, address) as stream:
        return rate(lambda: stream.swap(GROUP, mine, 256), group.syncs)


def echo_client(flat: dict[str, Any]) -> float:
    """Send and wait, again and again -> echoes per second."""
    credentials = grpc.ssl_channel_credentials(flat["certificate"].encode())
    options = [("grpc.ssl_target_name_override", GROUP)]
    sent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    payload = bytes(4 * flat["size"])
    with grpc.secure_channel(f"127.0.0.1:{flat['port']}", credentials, options) as channel:
        back = channel.stream_stream(ECHO)(iter(sent.get, None))

        def once() -> None:
            sent.put(payload)
            next(back)

        echoes_per_second = rate(once, flat["count"])
        sent.put(None)
    return echoes_per_second


ROLES = {"participant": participant, "echo": echo_client}


def rate(work: Callable[[], object], count: int) -> float:
    """Do it `count` times, the first few of them without the clock -> times per second."""
    for _ in range(WARM_UP):
        work()
    began = time.perf_counter()
    for _ in range(count - WARM_UP):
        work()
    return (count - WARM_UP) / (time.perf_counter() - began)


def processes(role: str, inputs: Sequence[dict[str, Any]]) -> list[float]:
    """Run one process for each input, all at the same time -> the rate that each measured."""
    command = [sys.executable, __file__, "--role", role]
    started = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in inputs
    ]
    for process, given in zip(started, inputs, strict=True):
        assert process.stdin is not None
        process.stdin.write(json.dumps(given))
        process.stdin.close()
    rates = []
    for process in started:
        assert process.stdout is not None
        with process:
            rates.append(float(process.stdout.read()))
    return rates


def syncs(size: int, participants: int, count: int) -> float:
    """Syncs per second with this number of participants."""
    members = tuple(f"site-{number}" for number in range(participants))
    group = exchange.Group(GROUP, size, count + WARM_UP, members)
    with opened(group) as (_, invitations):
        return min(processes("participant", invitations))


@contextmanager
def opened(group: exchange.Group) -> Iterator[tuple[exchange.Session, list[dict[str, Any]]]]:
    """Open a session -> it, and what each participant needs."""
    with (
        tempfile.TemporaryDirectory() as folder,
        exchange.Host(Path(folder)).open([group], join=60, wait=60, rejoin=0) as session,
    ):
        at = {"address": f"unix:{folder}"}
        yield session, [invitation.flat() | at for invitation in session.invitations.values()]


def echoes(size: int, clients: int, count: int) -> float:
    """Echoes per second of the slowest of this number of clients, which send at the same time."""

    def join(incoming: Iterator[bytes], _: grpc.ServicerContext) -> Iterator[bytes]:
        yield from incoming

    certificate, key = tls.fresh(GROUP)
    _, service, method = ECHO.split("/")
    handler: Any = grpc.stream_stream_rpc_method_handler(join)  # pyright: ignore
    with ThreadPoolExecutor(clients + 1) as pool:
        server = grpc.server(pool)
        generic = grpc.method_handlers_generic_handler(service, {method: handler})
        server.add_generic_rpc_handlers((generic,))
        credentials = grpc.ssl_server_credentials([(key, certificate)])
        port = server.add_secure_port("127.0.0.1:0", credentials)
        server.start()
        given = {"port": port, "certificate": certificate.decode(), "size": size}
        rates = processes("echo", [given | {"count": count + WARM_UP}] * clients)
        server.stop(None).wait()
    return min(rates)


def compare(name: str, count: int, repeats: int) -> dict[str, Any]:
    """Measure exchange and echo in turn -> the figures of one size."""
    size, rates = SIZES[name], []
    for _ in range(repeats):
        ours, one, two = syncs(size, 2, count), echoes(size, 1, count), echoes(size, 2, count)
        live.say(
            f"{name}: {ours:.0f} syncs a second; {one:.0f} echoes of one client, {two:.0f} of each "
            "of two"
        )
        rates.append((ours, one, two))
    return {
        f"syncs_per_s_{name}": round(statistics.median(ours for ours, _, _ in rates), 1),
        f"echoes_per_s_{name}": round(statistics.median(one for _, one, _ in rates), 1),
        f"share_of_echo_{name}": round(statistics.median(a / b for a, b, _ in rates), 3),
        f"share_of_two_echoes_{name}": round(statistics.median(a / c for a, _, c in rates), 3),
    }


def of_eight(count: int, repeats: int) -> dict[str, Any]:
    """Measure two and eight participants and eight echoes in turn -> the figures of eight."""
    size, rates = SIZES["1kb"], []
    for _ in range(repeats):
        two, eight, all_echoes = (
            syncs(size, 2, count),
            syncs(size, 8, count),
            echoes(size, 8, count),
        )
        live.say(
            f"two participants: {two:.0f} syncs a second, eight: {eight:.0f}; {all_echoes:.0f} "
            "echoes of each of eight clients"
        )
        rates.append((two, eight, all_echoes))
    return {
        "syncs_per_s_1kb_8": round(statistics.median(eight for _, eight, _ in rates), 1),
        "share_of_8_echoes_1kb": round(statistics.median(a / b for _, a, b in rates), 3),
        "slowdown_8_over_2": round(statistics.median(a / b for a, b, _ in rates), 2),
    }


def resident() -> float:
    """Resident memory of this process, in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def growth(count: int) -> float:
    """Growth of this process's resident memory over the last nine tenths of the syncs, in MB."""
    size = SIZES["1kb"]
    group = exchange.Group(GROUP, size, count + WARM_UP, ("site-0", "site-1"))
    with opened(group) as (session, invitations):
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(processes, "participant", invitations)
            while session.traffic()["site-0"][1] < 4 * size * count / 10 and not done.done():
                time.sleep(0.02)
            first = resident()
            done.result()
        return resident() - first


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", choices=("sums", "methods"), default="sums")
    parser.add_argument("--syncs", type=int, default=2000, help="of 1 kB, per measurement")
    parser.add_argument("--large-syncs", type=int, default=300, help="of 1 MB, per measurement")
    parser.add_argument("--repeats", type=int, help="3; of methods 2")
    parser.add_argument(
        "--memory-syncs", type=int, default=100_000, help="to measure memory growth; 0: skip it"
    )
    methods = parser.add_argument_group("with --table methods")
    methods.add_argument("--sources", type=int, default=3)
    methods.add_argument("--images", type=int, default=1024, help="of noise, at every site")
    methods.add_argument("--shape", default="32,32,3", help="of an image; one number: vectors")
    methods.add_argument("--network", default="lenet", help="model.name; batches have 64 images")
    methods.add_argument("--rounds", type=int, default=5, help="counted ones, per measurement")
    methods.add_argument(
        "-c", action="append", default=[], metavar="KEY=VALUE", dest="changes", help="a setting"
    )
    parser.add_argument("--role", choices=ROLES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        print(ROLES[args.role](json.load(sys.stdin)))
        return

    figures: dict[str, Any] = {"load_before": round(os.getloadavg()[0], 2)}
    if args.table == "methods":
        import beside  # loads torch, which participants and echoes do without

        print(json.dumps(figures | beside.table(args)))
        return
    repeats = args.repeats or 3
    figures |= compare("1kb", args.syncs, repeats)
    figures |= compare("1mb", args.large_syncs, repeats)
    figures |= of_eight(args.syncs // 2, repeats)
    if args.memory_syncs:
        figures["memory_growth_mb"] = round(growth(args.memory_syncs), 2)
        live.say(f"memory grew by {figures['memory_growth_mb']} MB over {args.memory_syncs} syncs")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
