"""An SSH server that lets in whoever has a key, runs commands, and forwards to other ports.

    python sshd.py ADDRESS [--only USER]

Prints its port, then lines: "login USER", and "to HOST PORT" for a channel to elsewhere.
"""

from __future__ import annotations

import select
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import paramiko

KEY = paramiko.ECDSAKey.generate()


class Server(paramiko.ServerInterface):
    def __init__(self, only: str | None) -> None:
        self.only = only
        self.to: dict[int, socket.socket] = {}

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_auth_publickey(self, username: str, key: Any) -> int:
        if self.only not in (None, username):
            return paramiko.AUTH_FAILED  # type: ignore[attr-defined, no-any-return]
        print(f"login {username}\n", end="", flush=True)
        return paramiko.AUTH_SUCCESSFUL  # type: ignore[attr-defined, no-any-return]

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return paramiko.OPEN_SUCCEEDED  # type: ignore[attr-defined, no-any-return]

    def check_channel_direct_tcpip_request(self, chanid: int, origin: Any, destination: Any) -> int:
        print("to {} {}\n".format(*destination), end="", flush=True)
        try:
            self.to[chanid] = socket.create_connection(destination, 5)
        except OSError:
            return paramiko.OPEN_FAILED_CONNECT_FAILED  # type: ignore[attr-defined, no-any-return]
        return paramiko.OPEN_SUCCEEDED  # type: ignore[attr-defined, no-any-return]

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        threading.Thread(target=run, args=(channel, command), daemon=True).start()
        return True


def run(channel: paramiko.Channel, command: bytes) -> None:
    done = subprocess.run(["sh", "-c", command], stdin=subprocess.DEVNULL, capture_output=True)
    time.sleep(0.2)  # paramiko says yes to the request only after check_… has returned
    channel.sendall(done.stdout)
    channel.sendall_stderr(done.stderr)
    channel.send_exit_status(done.returncode)
    channel.close()


def pump(channel: paramiko.Channel, sock: socket.socket) -> None:
    ways: dict[Any, Any] = {channel: sock, sock: channel}
    while True:
        for one in select.select(list(ways), [], [])[0]:
            data = one.recv(65536)
            if not data:
                channel.close()
                sock.close()
                return
            ways[one].sendall(data)


def serve(client: socket.socket, only: str | None) -> None:
    transport, server = paramiko.Transport(client), Server(only)
    transport.add_server_key(KEY)
    transport.start_server(server=server)
    while transport.is_active():
        channel = transport.accept(1)
        if channel is not None and channel.chanid in server.to:
            args = (channel, server.to.pop(channel.chanid))
            threading.Thread(target=pump, args=args, daemon=True).start()


def main() -> None:
    only = sys.argv[sys.argv.index("--only") + 1] if "--only" in sys.argv else None
    address = sys.argv[1]
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as listening:
        print(listening.getsockname()[1], flush=True)
        while True:
            client, _ = listening.accept()
            threading.Thread(target=serve, args=(client, only), daemon=True).start()


main()
