"""How much processor time others have used."""

import os
from pathlib import Path

import psutil


def cpu_s(pid: int) -> float:
    """Give the CPU time of all threads of a process, in seconds; finer than in ticks."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def family_cpu_s(pid: int) -> float:
    """Give the CPU time of a process and of all it has started, those that have ended included."""
    children = psutil.Process(pid).children(recursive=True)
    return sum(cpu_s(one) for one in (pid, *(child.pid for child in children))) + _ended_s(pid)


def _ended_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")
