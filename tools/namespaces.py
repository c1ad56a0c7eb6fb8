"""Ranks in network namespaces of their own, as if on machines of their own: addresses, a switch between them, counted bytes.

    sudo python tools/namespaces.py [-n 2] [--fault cut|outage|delay|loss] program.py [arguments]

Makes a bridge and ``n`` namespaces with one cable each, starts one rank in each through mpiexec, prints the bytes every cable carried
and takes everything down again. ``--fault`` happens to the cable of the last rank: it is cut, cut for two seconds, or (with ``tc``'s netem)
delays each packet by 20 ms or loses one of twenty. Without netem in the kernel, a slow link with a long queue delays packets, one with a
short queue loses them. Ranks that are cut off end by their own timeout; mpiexec, which does not, is ended here.
Needs Linux, root and ``ip``; mpiexec must be MPICH's (hydra), whose remote launcher is replaced here by ``ip netns exec``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from netcl.distributed.launch import mpiexec

NET = "10.97.0"
NETEM = {"delay": "netem delay 20ms", "loss": "netem loss 5%"}
SLOW = {"delay": "tbf rate 2mbit burst 3000 latency 300ms", "loss": "tbf rate 2mbit burst 3000 limit 4500"}  # for kernels without netem
TALK = 40_000  # bytes: the ranks have met and train
LAUNCHER = """#!/bin/sh
# Called as a remote shell would be: options, host, command.
while [ "${1#-}" != "$1" ]; do shift; done
host="$1"; shift
exec ip netns exec "netcl${host##*.}" sh -c "$*"
"""


def ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=not check)


def put_up(count: int) -> None:
    """A bridge, and a namespace on each of its cables."""
    ip("link", "add", "netcl-br", "type", "bridge")
    ip("addr", "add", f"{NET}.1/24", "dev", "netcl-br")
    ip("link", "set", "netcl-br", "up")
    for number in range(2, count + 2):
        name, cable = f"netcl{number}", f"netcl-v{number}"
        ip("netns", "add", name)
        ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("link", "set", cable, "master", "netcl-br", "up")
        for words in (["addr", "add", f"{NET}.{number}/24", "dev", "eth0"], ["link", "set", "eth0", "up"], ["link", "set", "lo", "up"]):
            ip("-n", name, *words)


def take_down(count: int) -> None:
    """Also what an earlier run left."""
    for number in range(2, count + 2):
        ip("netns", "del", f"netcl{number}", check=False)
        ip("link", "del", f"netcl-v{number}", check=False)
    ip("link", "del", "netcl-br", check=False)


def carried(count: int) -> dict[str, int]:
    """Bytes each rank has sent: what its end of the cable at the bridge has received."""
    path = "/sys/class/net/netcl-v{}/statistics/rx_bytes"
    return {f"rank {number - 2}": int(Path(path.format(number)).read_text()) for number in range(2, count + 2)}


def lost(cable: str) -> int:
    """Packets that the queue of a cable has dropped."""
    said = subprocess.run(["tc", "-s", "qdisc", "show", "dev", cable], capture_output=True, text=True, check=False).stdout
    return sum(map(int, re.findall(r"dropped (\d+)", said)))


def disturb(fault: str, cable: str, job: subprocess.Popen[bytes]) -> None:
    """Make a fault, once the ranks talk to each other."""
    if fault in NETEM:
        add = ["tc", "qdisc", "add", "dev", cable, "root"]
        if subprocess.run([*add, *NETEM[fault].split()], capture_output=True, check=False).returncode:
            subprocess.run([*add, *SLOW[fault].split()], check=True)
        return
    path = Path(f"/sys/class/net/{cable}/statistics/rx_bytes")
    while job.poll() is None and int(path.read_text()) < TALK:
        time.sleep(0.02)
    if job.poll() is None and fault:
        ip("link", "set", cable, "down")
        if fault == "outage":
            time.sleep(2.0)
            ip("link", "set", cable, "up")


def ended(count: int, job: subprocess.Popen[bytes], cut: bool) -> int:
    """The status of mpiexec. It waits for news from beyond a cut cable for ever: without ranks it is ended."""
    while (status := job.poll()) is None:
        time.sleep(0.2)
        ranks = [subprocess.run(["ip", "netns", "pids", f"netcl{n}"], capture_output=True, text=True).stdout for n in range(2, count + 2)]
        names = [Path(f"/proc/{pid}/cmdline") for text in ranks for pid in text.split()]
        if cut and not any(b"python" in path.read_bytes().split(b"\0")[0] for path in names if path.exists()):
            job.kill()
            return job.wait() or 1
    return status


def run(count: int, program: list[str], fault: str = "") -> int:
    hosts = ",".join(f"{NET}.{number}" for number in range(2, count + 2))
    with tempfile.NamedTemporaryFile("w", suffix=".sh", delete=False) as file:
        file.write(LAUNCHER)
    os.chmod(file.name, 0o700)
    # Without shared memory between ranks, as on machines of their own.
    apart = ["-genv", "MPIR_CVAR_NOLOCAL", "1", "-genv", "FI_PROVIDER", "tcp", "-genv", "UCX_TLS", "tcp,self"]
    remote = ["-launcher", "ssh", "-launcher-exec", file.name, "-localhost", f"{NET}.1", "-iface", "netcl-br"]
    command = [mpiexec(), "-hosts", hosts, "-ppn", "1", "-n", str(count), *remote, *apart, sys.executable, *program]
    try:
        before = carried(count)
        with subprocess.Popen(command) as job:
            disturb(fault, f"netcl-v{count + 1}", job)
            status = ended(count, job, fault == "cut")
        sent = {name: total - before[name] for name, total in carried(count).items()}
        more = {"packets lost": lost(f"netcl-v{count + 1}")} if fault in NETEM else {}
    finally:
        os.unlink(file.name)
    sys.stdout.write(json.dumps({"bytes on the cable": sent, **more}) + "\n")
    return status


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-n", type=int, default=2, help="ranks, one namespace each")
    parser.add_argument("--fault", choices=["cut", "outage", *NETEM], default="", help="what happens to the cable of the last rank")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    take_down(given.n)
    try:
        put_up(given.n)
        return run(given.n, given.program, given.fault)
    finally:
        take_down(given.n)


if __name__ == "__main__":
    sys.exit(main())
