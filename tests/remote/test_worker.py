"""A worker's side alone: whom it talks to."""

import pytest

worker = pytest.importorskip("podracer.remote.worker")

ELSEWHERE = "10.0.0.5:7777"


@pytest.mark.parametrize(
    "where",
    [
        ELSEWHERE,
        f"dns:///{ELSEWHERE}",
        f"localhost:7777,{ELSEWHERE}",
        f"{ELSEWHERE},unix:socket",
        "dns:///unix:7777",
        f"ipv4:{ELSEWHERE}",
        f"ipv4:127.0.0.1:1,{ELSEWHERE}",
    ],
)
def test_no_token_goes_to_another_machine_in_the_clear(where, tmp_path):
    """Wherever the address comes from: also out of a file, which is read again before every try."""
    (tmp_path / "where").write_text("127.0.0.1:7777\n")
    (tmp_path / "token").write_bytes(b"a secret of sixteen bytes")
    with pytest.raises(ValueError, match="is on another machine, so tls_ca must say"):
        worker.Connection(where, token_file=str(tmp_path / "token"))
    connection = worker.Connection(f"file:{tmp_path}/where", token_file=str(tmp_path / "token"))
    assert connection.target("anybody") == "127.0.0.1:7777"
    (tmp_path / "where").write_text(where + "\n")
    with pytest.raises(ValueError, match="is on another machine, so tls_ca must say"):
        connection.target("anybody")
    with pytest.raises(ValueError, match="is on another machine"):
        worker.serve_envs("gymnasium:CartPole-v1", f"file:{tmp_path}/where", quiet=True, give_up_after=5.0)
    for allowed in ({"insecure": True}, {"tls_ca": "ca"}):
        assert worker.Connection(f"file:{tmp_path}/where", **allowed).target("w1") in where.split(",")


def test_where_a_learner_is(tmp_path):
    connection = worker.Connection(f"file:{tmp_path}/where")
    assert connection.target("w") == ""
    (tmp_path / "where").write_text("127.0.0.1:1,localhost:2\n")
    assert {connection.target(f"w{i}") for i in range(20)} == {"127.0.0.1:1", "localhost:2"}
    (tmp_path / "where").write_text("nonsense")
    with pytest.raises(ValueError, match="use HOST:PORT"):
        connection.target("w")
    (tmp_path / "where").write_text("")
    assert connection.target("w") == ""
