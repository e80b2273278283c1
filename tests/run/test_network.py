import socket

from vime.run.network import reserve_port


def test_a_reserved_port_can_be_served_on_again_and_again_and_is_given_to_nobody_else() -> None:
    reserved = reserve_port("127.0.0.1")
    for _ in range(2):
        server = socket.socket()
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", reserved.port))
        server.listen()
        with socket.create_connection(("127.0.0.1", reserved.port), timeout=5):
            server.accept()[0].close()
        server.close()
    others = [socket.create_server(("127.0.0.1", 0)) for _ in range(200)]
    assert reserved.port not in {other.getsockname()[1] for other in others}
    for other in others:
        other.close()
    assert reserved.url == f"http://127.0.0.1:{reserved.port}"
    reserved.holder.close()
