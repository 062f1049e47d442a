"""A learner's address: tokens, certificates, ports and sockets that are taken, and the file that says where it is."""

import datetime
import os
import socket
import time

import pytest

from podracer.remote.settings import Remote
from tests.support import workers
from tests.support.peers import COUNTING, FINISHED, RemoteEnvironments, hello, learner, peer, played

grpc = pytest.importorskip("grpc")
worker = pytest.importorskip("podracer.remote.worker")

TOKEN = b"a-secret-of-sixteen-bytes"


def test_a_token_is_asked_for(tmp_path, capfd):
    (tmp_path / "token").write_bytes(TOKEN + b"\n")
    (tmp_path / "other").write_bytes(b"another-secret-of-many-bytes")
    with learner(token_file=str(tmp_path / "token")) as made:
        with pytest.raises(worker.RefusedError, match="the token is missing or wrong"):
            worker.serve_envs(COUNTING, made.where, token_file=str(tmp_path / "other"), quiet=True)
        with pytest.raises(worker.RefusedError, match="the token is missing or wrong"):
            worker.serve_envs(COUNTING, made.where, quiet=True)
        thread = workers.Thread(workers.Counting(), made.where, token_file=str(tmp_path / "token"))
        environment = made.make(4, 5)
        played(environment, 2)
        environment.close()
    thread.join(5.0)
    assert thread.error is None
    with learner(token_file=str(tmp_path / "token")) as made:
        now = 1000.0
        made._server._clock = lambda: now

        def refused():
            begin = time.monotonic()
            with peer(made.where) as wrong:
                wrong.raw(hello())
                assert wrong.status() == (grpc.StatusCode.UNAUTHENTICATED, "the token is missing or wrong.")
            return time.monotonic() - begin

        for _ in range(5):
            refused()
            now += 1.0
        assert refused() >= 1.0, "others are answered meanwhile"
        with peer(made.where, metadata=[("authorization", f"Bearer {TOKEN.decode()}")]) as right:
            right.join()  # others of its address, such as all behind a gateway, do not keep it out
        assert len(made._server._logins["ipv4:127.0.0.1"]) == 5
        now += 61.0
        assert refused() < 1.0
    assert TOKEN.decode() not in capfd.readouterr().err
    (tmp_path / "short").write_bytes(b"short")
    with pytest.raises(ValueError, match="holds 5 bytes"):
        worker.serve_envs(COUNTING, "127.0.0.1:1", token_file=str(tmp_path / "short"))
    for wrong in (b"a secret of sixteen bytes", b"a-secret\n-of-sixteen-bytes", "ä-secret-of-sixteen-bytes".encode()):
        (tmp_path / "odd").write_bytes(wrong)
        with pytest.raises(ValueError, match=r"odd must hold one line of printable ASCII without spaces\.$"):
            worker.serve_envs(COUNTING, "127.0.0.1:1", token_file=str(tmp_path / "odd"))


def test_certificates(tmp_path, capfd):
    trustme = pytest.importorskip("trustme")
    ca, strange = trustme.CA(), trustme.CA()
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    for name, authority in (("server", ca), ("client", ca), ("stranger", strange), ("expired", ca)):
        until = {"not_before": now - 2 * day, "not_after": now - day} if name == "expired" else {}
        made = authority.issue_cert("learner.example", "127.0.0.1", **until)
        made.private_key_pem.write_to_path(tmp_path / f"{name}.key")
        for blob in made.cert_chain_pems:
            blob.write_to_path(tmp_path / f"{name}.crt", append=True)
    for name, authority in (("ca", ca), ("strange", strange)):
        authority.cert_pem.write_to_path(tmp_path / f"{name}.crt")
    file = lambda name: str(tmp_path / name)  # noqa: E731
    secured = {"tls_cert": file("server.crt"), "tls_key": file("server.key"), "client_ca": file("ca.crt")}
    mine = {"tls_cert": file("client.crt"), "tls_key": file("client.key")}

    def refused(where, said, **wrong):
        capfd.readouterr()
        with pytest.raises(worker.LearnerError, match="no learner at"):
            worker.serve_envs(COUNTING, where, name="stranger", give_up_after=0.1, **wrong)
        lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("stranger: unavailable: ")]
        assert said in lines[0]

    with learner(**secured) as made:
        thread = workers.Thread(workers.Counting(), made.where, tls_ca=file("ca.crt"), **mine)
        environment = made.make(4, 5)
        played(environment, 2)
        refused(made.where, "unable to get local issuer certificate", tls_ca=file("strange.crt"), **mine)
        refused(made.where, "Hostname Verification", tls_ca=file("ca.crt"), tls_name="elsewhere.example", **mine)
        refused(made.where, "it may ask for a certificate that it knows (tls_cert)", tls_ca=file("ca.crt"))
        for name in ("stranger", "expired"):  # gRPC's own log has why, on the learner's side
            wrong = {"tls_cert": file(f"{name}.crt"), "tls_key": file(f"{name}.key")}
            refused(made.where, "Socket closed", tls_ca=file("ca.crt"), **wrong)
        refused(made.where, "it may ask for TLS (tls_ca)")
        # What is renewed is used for the next connection, and what is half renewed is not.
        for kind, said in (("key", "Hostname"), ("crt", "certificate has expired")):
            os.replace(tmp_path / f"expired.{kind}", tmp_path / f"server.{kind}")
            refused(made.where, said, tls_ca=file("ca.crt"), tls_name="elsewhere.example", **mine)
        played(environment, 2)
        environment.close()
    thread.join(5.0)
    assert thread.error is None
    with learner() as made:
        refused(made.where, "WRONG_VERSION_NUMBER", tls_ca=file("ca.crt"))


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "unix:{}/folder/socket"])
def test_a_taken_port_is_said(listen, tmp_path):
    with learner(listen=listen.format(tmp_path)) as made:
        with pytest.raises(OSError, match=rf"cannot listen at {made.where}: the address is in use"):
            RemoteEnvironments("counting", COUNTING, None, Remote(listen=made.where), answer_timeout=1.0, strict=False)
        with peer(made.where) as one:
            one.join()
        if listen.startswith("unix"):
            left = made.where.removeprefix("unix:")
    if listen.startswith("unix"):  # of a learner that was killed
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(left)
        with learner(listen=listen.format(tmp_path)):
            pass


def test_a_certificate_that_is_none_is_said(tmp_path):
    for name in ("crt", "key"):
        (tmp_path / name).write_text("nothing")
    pair = {"tls_cert": str(tmp_path / "crt"), "tls_key": str(tmp_path / "key")}
    with pytest.raises(OSError, match="or not ours, or tls_cert and tls_key are no pair"), learner(**pair):
        pass


def test_a_socket_is_in_a_folder_of_ones_own(tmp_path):
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(ValueError, match=r"^remote: the folder .*/open of the socket is open to others \(mode 755\)"):
        RemoteEnvironments(
            "counting", COUNTING, None, Remote(listen=f"unix:{tmp_path}/open/s"), answer_timeout=1.0, strict=False
        )
    with learner(listen=f"unix:{tmp_path}/open/s", insecure=True):
        pass
    with learner(listen=f"unix:{tmp_path}/made/s"):
        assert (tmp_path / "made").stat().st_mode & 0o777 == 0o700


def test_a_learner_says_where_it_is(tmp_path):
    with learner(announce=str(tmp_path / "where")) as made:
        assert (tmp_path / "where").read_text().strip() == made.where
        thread = workers.Thread(workers.Counting(), f"file:{tmp_path}/where")
        environment = made.make(4, 5)
        played(environment, 2)
        environment.close()
    thread.join(5.0)
    assert thread.error is None
    assert not (tmp_path / "where").exists()


@pytest.mark.parametrize("where", ["another address", "the same"])
def test_what_a_later_learner_announces_stays(where, tmp_path):
    file = tmp_path / "where"
    with learner(announce=str(file)) as old:
        address = old.where if where == "the same" else "127.0.0.1:0"
        if where == "the same":  # it listens no more, and has not come to remove its file
            old._server._loop.run(old._server._server.stop(0.0))
        with learner(announce=str(file), listen=address) as new:
            old.close(FINISHED)
            assert file.read_text().strip() == new.where
    assert not file.exists()


def test_who_cannot_announce_does_not_listen(tmp_path):
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{one.getsockname()[1]}"
    (tmp_path / "folder").mkdir()
    for name in ("missing/where", "folder"):
        with (
            pytest.raises(OSError, match=rf"^remote: announce={tmp_path}/{name} cannot be written \(.*; name a file"),
            learner(announce=str(tmp_path / name), listen=where),
        ):
            pass
        assert [each.name for each in tmp_path.iterdir()] == ["folder"]
        with learner(listen=where):
            pass
