"""What is removed from a table, and what every wait for a host or a child is bounded by: lists of all
such places, so that a new one is looked at.

A table is what a call, a process or a question is found by. Whatever is removed from one before
something that can fail leaves a caller that nothing answers any more.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "vla_rl"

REMOVALS = {
    # read first, removed in `finally`
    "actors/calls/exchange.py": [
        "del self._calls[call]",
        "del self._questions[call]",
        # every call is failed in the same step, with errors that any future takes
        "self.unanswered.clear()",
    ],
    "actors/calls/running_calls.py": ["del self._calls[call]"],
    "actors/remote/host_connection.py": ["del self._preparations[number]"],
    "cluster/ray_hosts.py": ["del self._reserved[reserved.host.name]", "self._reserved.popitem()"],
    # as above
    "actors/calls/client.py": ["self.unanswered.clear()"],
    # compared with the request first; where sending fails, its process is told; where the server ends,
    # all are told
    "actors/processes/fork_server_process.py": [
        "self._queue.popleft()",
        "self._queue.remove(process)",
        "self._queue.clear()",
        "self._forked.pop(reply.number, None)",
        "self._forked.clear()",
    ],
    # the end is reported in words that any message takes; of a process that waits, nothing that follows
    # in the same step can fail
    "actors/remote/hosted_clients.py": [
        "self._waiting.pop((takeover.owner, takeover.name), None)",
        "self._waiting.pop(key, None)",
        "del self._waiting[key]",
        "self._children.pop(actor)",
        "self._children.pop(actor, None)",
        "self._takeovers.pop(actor, None)",
        "del self._takeovers[actor]",
    ],
    # nothing that follows in the same step can fail
    "actors/processes/fork_server.py": ["self._children.pop(pidfd)"],
    "actors/host.py": ["self._clients.pop(identity)"],
    "actors/calls/pending.py": ["self._waiters.popleft()", "self._waiters.remove(waiter)"],
    "actors/processes/liveness.py": ["self._watched.pop(watched, None)"],
    "actors/calls/server.py": ["mailbox.popleft()"],
    "util/stalls.py": ["_waits.pop(token, None)", "_sources.pop(token, None)"],
    "cluster/listed_hosts.py": ["self._there.pop(name)"],
}

NO_TABLES = {
    # counters, buffers and events
    "actors/calls/running_calls.py": ["self._sizes.popleft()"],
    "actors/processes/child.py": ["self._spawn_messages.clear()"] * 3,
    "actors/calls/client.py": ["pending.items.popleft()"],
    "actors/wire/codec.py": ["self._slots_taken.clear()"] * 3 + ["self._known_slots.clear()"],
    "util/processes.py": ["del variables[name]", "_overlays.remove(overlay)"],
    "actors/calls/handles.py": ["done.pop()"],
    "actors/wire/sockets.py": ["self._news.clear()", "frames.clear()"],
    "actors/calls/pending.py": [
        "self._settled.clear()",
        "self._sizes.popleft()",
        "self._news.clear()",
    ],
    "util/rlimits.py": ["left.pop()"],
    "util/error_reports.py": ["waiting.pop()"],
    "util/ownership.py": ["_HELD_LOCKS.clear()"],
    "actors/supervision.py": ["self._ended.clear()"],
}

WAITS = {
    "actors/supervision.py": {
        "self._prepare()": "the limits of `HostConnection.prepare` and of fork servers",
        "self._ready": "start_timeout_s",
        "self._kill(channel)": "GONE_WITHIN_S",
        "self._kill(self._channel)": "GONE_WITHIN_S",
        "channel.until_gone()": "GONE_WITHIN_S, or the owner's grace",
        "self._ended.wait()": "for ever: it ends with the actor",
        "self._replace(self._intensity)": "the limits of `start`",
        "self._restarting": "the limits of `start`",
        "self._fork_servers.prepare(placement)": "prepare_timeout_s, and that of the interpreter",
        "connection.prepare_process(placement.launched_process, start_timeout_s)": "start_timeout_s",
        "self._fork_servers.close()": "_STOP_WITHIN_S, then a kill",
    },
    "actors/remote/host_connection.py": {
        "asyncio.shield(self._connected)": "connect_within_s",
        "self._answered(answer, process.most_preparation_s, connect_within_s)": "both arguments",
        "asyncio.wait([answer], timeout=left_s)": "its argument",
        "self._link.wait_for_room()": "the end of the link",
        "asyncio.shield(self._gone)": "_OTHER_END_WITHIN_S after `kill`",
    },
}


def removals_in(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Delete):
            yield from (
                f"del {ast.unparse(each)}"
                for each in node.targets
                if isinstance(each, ast.Subscript)
            )
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("pop", "popleft", "popitem", "clear", "remove")
        ):
            yield ast.unparse(node)


def test_every_removal_from_a_table_is_in_the_list() -> None:
    found = {
        str(path.relative_to(PACKAGE)): removals
        for room in ("actors", "cluster", "util")
        for path in (PACKAGE / room).rglob("*.py")
        if (removals := sorted(removals_in(path)))
    }
    known = {
        name: sorted(REMOVALS.get(name, []) + NO_TABLES.get(name, []))
        for name in REMOVALS | NO_TABLES
    }
    assert found == known, "remove an entry once nothing can fail any more, and list the place"


@pytest.mark.parametrize("name", WAITS)
def test_every_wait_for_a_host_or_a_child_is_in_the_list_with_its_limit(name: str) -> None:
    found = {
        ast.unparse(node.value)
        for node in ast.walk(ast.parse((PACKAGE / name).read_text()))
        if isinstance(node, ast.Await)
    }
    assert found == set(WAITS[name]), "bound the wait, and list it with its limit"
