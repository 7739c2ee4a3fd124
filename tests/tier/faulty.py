"""A proxy in front of an S3 store that behaves like a bad network or a busy store: it answers SlowDown and 500, truncates
answers, changes a byte of them, waits, and closes connections. One request per connection.

faulty.py PORT STORE-PORT SEED [PERCENT [FILE]]   PERCENT: harmed requests in a hundred (default: 10). While FILE exists and
                                                  contains `VERB STATUS CODE`, all requests with that verb (`*`: all
                                                  requests) get this error, as from a store that is full or does not know a
                                                  key. With `VERB slow SECONDS` these requests wait before they are passed on.
"""

import asyncio
import pathlib
import random
import sys

FAULTS = ("slow_down", "server_error", "truncate", "corrupt", "wait", "close", "close_after")
# Longer bodies are passed on in parts.
PART = 1 << 20
WAIT_S = 2.0


async def read_head(reader):
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head[:-4].split(b"\r\n")
    fields = [line.split(b":", 1) for line in lines]
    return first, {name.strip().lower(): value.strip() for name, value in fields}


def head_of(first, fields):
    lines = [first] + [name + b": " + value for name, value in fields.items()]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def error(status, code):
    body = f"<Error><Code>{code}</Code><Message>made by the proxy</Message></Error>".encode()
    head = f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    return head.encode() + body


async def pass_body(reader, writer, length, harm=None):
    """Passes on `length` bytes, harmed in the middle."""
    middle, done = length // 2, 0
    while done < length:
        part = bytearray(await reader.readexactly(min(PART, length - done)))
        if done <= middle < done + len(part):
            if harm == "truncate":
                writer.write(part[: middle - done])
                await writer.drain()
                return
            if harm == "corrupt":
                part[middle - done] ^= 0x20
        writer.write(bytes(part))
        await writer.drain()
        done += len(part)


class Proxy:
    def __init__(self, port, seed, percent, file):
        self.port, self.percent, self.random, self.file = port, percent, random.Random(seed), file
        self.harmed = {}

    def choose(self):
        if self.random.random() * 100 >= self.percent:
            return None
        fault = self.random.choice(FAULTS)
        self.harmed[fault] = self.harmed.get(fault, 0) + 1
        return fault

    async def refusal(self, first):
        """The error from the file for this request, if there is one. Slow requests wait here."""
        if not self.file or not self.file.exists():
            return None
        verb, status, code = self.file.read_text().split()
        if verb not in ("*", first.split()[0].decode()):
            return None
        return error(f"{status} Refused", code) if status != "slow" else await asyncio.sleep(float(code))

    async def serve(self, reader, writer):
        try:
            await self.request(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def request(self, reader, writer):
        first, fields = await read_head(reader)
        length = int(fields.get(b"content-length", b"0"))
        fault, refusal = self.choose(), await self.refusal(first)
        if fault == "close":
            return
        if fault == "slow_down":
            refusal = error("503 Slow Down", "SlowDown")
        if fault == "server_error":
            refusal = error("500 Error", "InternalError")
        if refusal:
            while length > 0:
                length -= len(await reader.readexactly(min(PART, length)))
            writer.write(refusal)
            await writer.drain()
            return
        if fault == "wait":
            await asyncio.sleep(WAIT_S)
        store_reader, store_writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            fields[b"connection"] = b"close"
            if fields.pop(b"expect", None):
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            store_writer.write(head_of(first, fields))
            await pass_body(reader, store_writer, length)
            status, answer = await read_head(store_reader)
            if fault == "close_after":
                return
            answer[b"connection"] = b"close"
            writer.write(head_of(status, answer))
            head_only = first.startswith(b"HEAD ") or b" 204 " in status + b" "
            body = 0 if head_only else int(answer.get(b"content-length", b"0"))
            await pass_body(store_reader, writer, body, fault)
        finally:
            store_writer.close()


async def main(port, store_port, seed, percent=10, file=None):
    proxy = Proxy(store_port, seed, percent, file and pathlib.Path(file))
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", port, limit=1 << 20)
    print("ready", flush=True)
    async with server:
        while True:
            await asyncio.sleep(10)
            print(f"harmed so far: {proxy.harmed}", flush=True)


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:5]), *sys.argv[5:]))
