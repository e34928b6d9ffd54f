"""A remote command whose bytes travel over the network, as ssh's do, for machines that are network namespaces.

python remote_shell.py serve HOST PORT               on the other machine
python remote_shell.py run HOST PORT COMMAND...      here: stdin, stdout and exit status are the command's
"""

import json
import os
import re
import socket
import subprocess
import sys
import threading

STATUS = re.compile(rb"<exit (-?\d+)>$")


def serve(host: str, port: int) -> None:
    with socket.create_server((host, port)) as listener:
        print("ready", flush=True)
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_serve_one, args=(connection,), daemon=True).start()


def _serve_one(connection: socket.socket) -> None:
    line = b""
    while not line.endswith(b"\n"):
        line += connection.recv(1)
    own = connection.fileno()
    child = subprocess.Popen(json.loads(line), stdin=own, stdout=own, stderr=subprocess.STDOUT)
    with connection:
        status = child.wait()
        connection.sendall(b"<exit %d>" % (status if status >= 0 else 128 - status))
        connection.shutdown(socket.SHUT_RDWR)


def run(host: str, port: int, words: list[str]) -> int:
    with socket.create_connection((host, port), timeout=10) as connection:
        connection.settimeout(None)
        connection.sendall(json.dumps(words).encode() + b"\n")
        threading.Thread(target=_send_stdin, args=(connection,), daemon=True).start()
        last = b""
        while found := connection.recv(1 << 16):
            last = (last + found)[-32:]
            os.write(1, STATUS.sub(b"", found))
        status = STATUS.search(last)
        return int(status[1]) if status else 255


def _send_stdin(connection: socket.socket) -> None:
    while found := os.read(0, 1 << 16):
        connection.sendall(found)
    connection.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], int(sys.argv[3]))
    sys.exit(run(sys.argv[2], int(sys.argv[3]), sys.argv[4:]))
