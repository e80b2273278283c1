"""How the parts of an engine begin and end together, over a real store."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from vime.buffer.control import Control
from vime.config.compose import compose
from vime.errors import BadMessage, UserError, WaitTimeout
from vime.rollout.engine.multinode import EngineNodes, NodeEnd, Rendezvous
from vime.rollout.engine.server import headless_command, server_command, server_environment, span_flags
from vime.run.network import reserve_port


def three() -> tuple[Control, list[EngineNodes]]:
    control, _ = Control.serve("127.0.0.1", 1, "t")
    return control, [EngineNodes(control.clone(), 4, node, 3, "127.0.0.1") for node in range(3)]


def never() -> bool:
    return False


def test_all_parts_meet_where_the_first_listens() -> None:
    _, nodes = three()
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda node: node.rendezvous(0, 10, never), reversed(nodes)))
    assert found[0] is not None
    assert found[0] == found[1] == found[2]
    socket.create_connection((found[0].host, found[0].port), timeout=5).close()


def test_the_first_end_is_everybodys_and_the_next_start_waits_for_all() -> None:
    _, nodes = three()
    assert not nodes[0].ended_elsewhere(0)
    nodes[2].report_end(0, 137)
    nodes[1].report_end(0, 1)  # its neighbour's end broke it too
    assert [node.end(0) for node in nodes] == [NodeEnd(node=2, exit_code=137)] * 3
    nodes[1].confirm_stopped(0)
    with pytest.raises(WaitTimeout, match="node 2 of engine 4 to end incarnation 0"):
        nodes[0].rendezvous(1, 0.3, never)
    nodes[2].confirm_stopped(0)
    assert nodes[0].rendezvous(1, 5, never) is not None
    assert not nodes[0].ended_elsewhere(1)


def test_a_server_that_breaks_off_lets_the_part_that_was_lost_say_so() -> None:
    _, nodes = three()
    threading.Timer(0.5, nodes[1].report_end, (0, 137)).start()
    nodes[0].report_end(0, 1)
    assert nodes[2].end(0) == NodeEnd(node=1, exit_code=137)
    nodes[0].report_end(1, 1)  # no other node says anything: it was the server
    assert nodes[2].end(1) == NodeEnd(node=0, exit_code=1)


def test_a_part_waits_for_the_first_until_it_is_stopped_or_too_long() -> None:
    _, nodes = three()
    with pytest.raises(WaitTimeout, match="node 0 of engine 4 to begin incarnation 0"):
        nodes[1].rendezvous(0, 0.3, never)
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    assert nodes[1].rendezvous(0, 30, stop.is_set) is None


def test_a_meeting_of_the_wrong_shape_is_refused() -> None:
    control, nodes = three()
    control.put("engine-parts/4/0/meeting", {"host": "127.0.0.1", "port": "22; rm"})
    with pytest.raises(BadMessage, match=r"engine-parts/4/0/meeting"):
        nodes[1].rendezvous(0, 5, never)


def test_the_parts_of_an_engine_are_told_their_place() -> None:
    wide = ("rollout.tensor_parallel=16", "rollout.engines=2")
    config = compose("h200", "qwen3_4b_grpo", wide)
    assert config.nodes_per_engine == 2
    _, nodes = three()
    rendezvous = Rendezvous(host="10.0.0.7", port=4711)
    first = server_command(config, Path("/models/qwen3"), reserve_port("127.0.0.1"), 1, 1024)
    second = headless_command(config, Path("/models/qwen3"), 1, 1024)
    assert (first[2], second[2]) == ("vllm.entrypoints.openai.api_server", "vime.rollout.engine.headless")
    # But for the address both are the same engine.
    assert first[first.index("--model") :] == second[second.index("--model") :]
    assert "--host" not in second
    flags = " ".join(span_flags(nodes[1], rendezvous))
    assert flags == (
        "--distributed-executor-backend mp --nnodes 3 --node-rank 1 --master-addr 10.0.0.7 --master-port 4711"
    )
    assert server_environment(config, "10.0.0.8", "t", 0, gated=False)["TORCHELASTIC_USE_AGENT_STORE"] == "True"


def test_an_engine_of_one_part_is_none_of_this() -> None:
    config = compose("local", "tiny_grpo")
    control, _ = Control.serve("127.0.0.1", 1, "t")
    alone = EngineNodes(control, 0, 0, config.nodes_per_engine, "127.0.0.1")
    assert alone.rendezvous(0, 0, never) is None
    assert span_flags(alone, None) == []
    assert "TORCHELASTIC_USE_AGENT_STORE" not in server_environment(config, "127.0.0.1", "t", 0, gated=False)
    with pytest.raises(UserError, match=r"rollout.engine_args.nnodes: vime sets this"):
        server_command(
            compose("local", "tiny_grpo", ["rollout.engine_args.nnodes=2"]),
            config.run.root,
            reserve_port("127.0.0.1"),
            0,
            128,
        )
