"""Delays TCP connections, and counts their round trips: stands in for a distance.

python bench/delay_proxy.py --delay-ms MS --first-port N ADDRESS…    port N + i leads to address i

What comes from either side is handed on MS / 2 later, in order and without a limit of the rate; a
new connection pays one round trip for its handshake. A round trip is counted where the client
speaks after the server has spoken. For every line on standard input one line of JSON is printed,
and the counters begin anew: {"round_trips", "connections", "bytes"}, over all ports.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from dataclasses import asdict, dataclass


@dataclass
class Counters:
    round_trips: int = 0
    connections: int = 0
    bytes: int = 0


class Proxy:
    def __init__(self, delay_s: float) -> None:
        self.half = delay_s / 2
        self.counters = Counters()

    async def pass_on(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, talk: list[str], who: str
    ) -> None:
        """One direction: reads at once, writes half a round trip after that."""
        loop = asyncio.get_running_loop()
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def write() -> None:
            while True:
                due, block = await waiting.get()
                if (left := due - loop.time()) > 0:
                    await asyncio.sleep(left)
                if not block:
                    target.write_eof()
                    return
                target.write(block)
                await target.drain()

        writer = asyncio.create_task(write())
        try:
            while block := await source.read(1 << 16):
                if who == "client" and talk[0] == "server":
                    self.counters.round_trips += 1
                talk[0] = who
                self.counters.bytes += len(block)
                waiting.put_nowait((loop.time() + self.half, block))
        except ConnectionError:
            pass
        waiting.put_nowait((loop.time() + self.half, b""))
        with contextlib.suppress(OSError):  # it was closed meanwhile
            await writer

    async def connected(
        self, address: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.counters.connections += 1
        self.counters.round_trips += 1
        await asyncio.sleep(2 * self.half)
        try:
            far_reader, far_writer = await asyncio.open_connection(address, 22)
        except OSError:
            writer.close()
            return
        talk = ["server"]
        await asyncio.gather(
            self.pass_on(reader, far_writer, talk, "client"),
            self.pass_on(far_reader, writer, talk, "server"),
        )
        for one in (writer, far_writer):
            one.close()

    def tell(self) -> None:
        if not sys.stdin.readline():
            asyncio.get_running_loop().stop()
            return
        print(json.dumps(asdict(self.counters)), flush=True)
        self.counters = Counters()

    async def serve(self, first_port: int, addresses: list[str]) -> None:
        for number, address in enumerate(addresses):

            async def come(
                reader: asyncio.StreamReader, writer: asyncio.StreamWriter, to: str = address
            ) -> None:
                await self.connected(to, reader, writer)

            await asyncio.start_server(come, "127.0.0.1", first_port + number, backlog=200)
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), self.tell)
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--delay-ms", type=float, required=True)
    parser.add_argument("--first-port", type=int, required=True)
    parser.add_argument("addresses", nargs="+")
    args = parser.parse_args()
    with contextlib.suppress(RuntimeError):  # stopped: nobody asks any more
        asyncio.run(Proxy(args.delay_ms / 1000).serve(args.first_port, args.addresses))


if __name__ == "__main__":
    main()
