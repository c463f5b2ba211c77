"""
An event loop with a virtual clock, several machines in it, and a seed.

Each machine (`Node`) has its own first-in-first-out queue of callbacks, as a process of its
own would; which machine runs next is drawn from the seed. Time stands still while
anything can run and then jumps to the next timer, so a run of minutes takes milliseconds
and the same seed gives the same run, callback by callback.

A node can crash (it never runs again; what it sent is on its way all the same) or freeze
(it runs on later, as after SIGSTOP). Both may happen before any callback, which is to say
at any await of the code under test.
"""

import asyncio
import contextvars
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any


class Node:
    """One machine."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.frozen_until = 0.0
        self.queue: deque[asyncio.Handle] = deque()

    def __repr__(self) -> str:
        return self.name


_node: contextvars.ContextVar[Node] = contextvars.ContextVar("node")


class Stuck(AssertionError):
    """Nothing can run any more, and the run is not over."""


class _Ready:
    """What the base class takes for its queue; sorts callbacks to their nodes."""

    def __init__(self, root: Node) -> None:
        self.nodes = [root]
        self._root = root

    def append(self, handle: asyncio.Handle) -> None:
        # What is meant for a dead node is kept for the clearing away after the end.
        handle._context.get(_node, self._root).queue.append(handle)

    def __len__(self) -> int:
        return sum(len(node.queue) for node in self.nodes)

    def clear(self) -> None:
        for node in self.nodes:
            node.queue.clear()


class SimLoop(asyncio.BaseEventLoop):
    """
    A loop whose order and time come from *random*.

    *mishap* is asked before every callback of a node other than the root and may crash or
    freeze it.
    """

    def __init__(self, random: Random) -> None:
        super().__init__()
        self.root = Node("root")
        self.random = random
        self.mishap: Callable[[Node], None] = lambda node: None
        self.steps = 0
        self.tasks: list[asyncio.Task[Any]] = []
        self._nodes: list[Node] = []
        self._now = 0.0
        self._ready = _Ready(self.root)  # type: ignore[assignment]
        self.errors: list[dict[str, Any]] = []
        self.set_exception_handler(lambda _, context: self.errors.append(context))

    def time(self) -> float:
        return self._now

    def node(self, name: str) -> Node:
        node = Node(name)
        self._nodes.append(node)
        self._ready.nodes.append(node)
        return node

    def create_task(self, *args: Any, **kwargs: Any) -> "asyncio.Task[Any]":
        task = super().create_task(*args, **kwargs)
        self.tasks.append(task)  # or those of a dead node would be collected in mid-run
        return task

    def spawn(self, node: Node, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Start *work* on *node*; whatever it starts runs there too."""
        context = contextvars.copy_context()
        context.run(_node.set, node)
        return self.create_task(work, context=context)

    def crash(self, node: Node) -> None:
        node.alive = False
        self._ready.nodes.remove(node)

    def revive_all(self) -> None:
        """Let the dead and the frozen run again, to clear away after the end."""
        for node in self._nodes:
            node.frozen_until = 0.0
            if not node.alive:
                node.alive = True
                self._ready.nodes.append(node)

    def freeze(self, node: Node, seconds: float) -> None:
        node.frozen_until = self._now + seconds

    def at_root(self, delay: float, callback: Callable[..., Any], *args: Any) -> None:
        """Call later on no machine in particular: the network, the servers."""
        context = contextvars.copy_context()
        context.run(_node.set, self.root)
        self.call_later(delay, callback, *args, context=context)

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        """Run at once: threads would escape the seed."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - as an executor does
            future.set_exception(error)
        return future

    def _run_once(self) -> None:
        while self._scheduled and self._scheduled[0]._when <= self._now:
            self._make_ready(heapq.heappop(self._scheduled))
        able = [n for n in self._ready.nodes if n.queue and n.frozen_until <= self._now]
        if not able:
            self._advance()
            return
        node = able[0] if len(able) == 1 else self.random.choice(able)
        if node is not self.root:
            self.mishap(node)
            if not node.alive or node.frozen_until > self._now:
                return
        handle = node.queue.popleft()
        if not handle._cancelled:
            self.steps += 1
            handle._run()

    def _make_ready(self, timer: asyncio.TimerHandle) -> None:
        timer._scheduled = False
        if not timer._cancelled:
            self._ready.append(timer)

    def _advance(self) -> None:
        times = [n.frozen_until for n in self._ready.nodes if n.queue]
        while self._scheduled and self._scheduled[0]._cancelled:
            heapq.heappop(self._scheduled)._scheduled = False
        if self._scheduled:
            times.append(self._scheduled[0]._when)
        if not times:
            raise Stuck("nothing left to run")
        self._now = max(self._now, min(times))

    # --- what the base class wants and a simulation has no use for ----------------------

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass
