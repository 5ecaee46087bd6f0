"""Certificates and keys: what is made, who may read it, and what is refused."""

import errno
import ipaddress
import os
import ssl
import stat
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID
from typer.testing import CliRunner

from fedda import cli
from fedda.cli import app as server
from fedda.cli.client import _check_options
from fedda.cli.superlink import _certificates
from fedda.errors import KeyFileError
from fedda.ops import certificate, keys


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the keys and certificates of a server and the key of one site."""
    directory = tmp_path_factory.mktemp("keys") / "hub"
    certificate.init(directory, ["hub.example.org", "10.1.2.3"])
    keys.add(directory, "clinic-a")
    return directory


def certified(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def self_signed(path: Path, starts: datetime, ends: datetime) -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "old")])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name)
    builder = builder.public_key(key.public_key()).serial_number(7)
    signed = builder.not_valid_before(starts).not_valid_after(ends).sign(key, hashes.SHA384())
    path.write_bytes(signed.public_bytes(serialization.Encoding.PEM))


def test_server_certificate_names_its_hosts_and_is_signed_by_the_authority_on_p384(
    made: Path,
) -> None:
    ca, server = certified(made / "ca.crt"), certified(made / "server.pem")
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["hub.example.org", "localhost"]
    assert names.get_values_for_type(x509.IPAddress) == [
        ipaddress.ip_address("10.1.2.3"),
        ipaddress.ip_address("127.0.0.1"),
    ]
    server.verify_directly_issued_by(ca)
    for each in (ca, server):
        key = each.public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey)
        assert key.curve.name == "secp384r1"
    assert ca.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not server.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


@pytest.mark.parametrize("name", ["ca.key", "server.key", "nodes/clinic-a"])
def test_only_the_owner_may_read_private_files(made: Path, name: str) -> None:
    assert stat.S_IMODE((made / name).stat().st_mode) == 0o600


def test_a_second_authority_or_key_of_a_name_is_refused_and_the_first_is_kept(made: Path) -> None:
    before = (made / "ca.key").read_bytes()
    with pytest.raises(KeyFileError, match="exists already"):
        certificate.init(made)
    assert (made / "ca.key").read_bytes() == before
    with pytest.raises(KeyFileError, match="exists already"):
        keys.add(made, "clinic-a")


def test_node_key_is_openssh_p256_and_matches_its_public_half(made: Path) -> None:
    assert (made / "nodes" / "clinic-a").read_bytes().startswith(b"-----BEGIN OPENSSH PRIVATE KEY")
    assert (made / "nodes" / "clinic-a.pub").read_text().startswith("ecdsa-sha2-nistp256 ")
    private = keys.load_node_key(made / "nodes" / "clinic-a")
    assert private.public_key() == keys.public_keys(made)["clinic-a"]


@pytest.mark.parametrize("name", ["../x", "", "a/b", ".hidden", "revoked", "a.pub", "x" * 80])
def test_a_name_must_be_a_plain_file_name(made: Path, name: str) -> None:
    with pytest.raises(KeyFileError, match="cannot name a site"):
        keys.add(made, name)


def test_revoked_keys_move_away_and_the_name_is_free_again(tmp_path: Path) -> None:
    keys.add(tmp_path, "clinic-b")
    old = keys.public_keys(tmp_path)["clinic-b"]
    keys.revoke(tmp_path, "clinic-b")
    assert keys.names(tmp_path) == []
    assert keys.revoked_keys(tmp_path) == [old]
    keys.add(tmp_path, "clinic-b")
    assert keys.public_keys(tmp_path)["clinic-b"] != old
    with pytest.raises(KeyFileError, match=r"known: clinic-b"):
        keys.revoke(tmp_path, "clinic-c")


def test_a_site_may_keep_its_private_key_to_itself(made: Path, tmp_path: Path) -> None:
    keys.admit(tmp_path, "clinic-a", made / "nodes" / "clinic-a.pub")
    assert keys.public_keys(tmp_path) == keys.public_keys(made)
    assert not (tmp_path / "nodes" / "clinic-a").exists()
    with pytest.raises(KeyFileError, match="not an OpenSSH public key"):
        keys.admit(tmp_path, "clinic-b", made / "ca.crt")


def test_a_valid_certificate_passes_with_its_key(made: Path) -> None:
    certificate.check_certificate(made / "ca.crt", made / "ca.key")
    certificate.check_certificate(made / "server.pem", made / "server.key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made / "server.pem", made / "server.key")
    trusting = ssl.create_default_context(cafile=str(made / "ca.crt"))
    assert trusting.cert_store_stats()["x509_ca"] == 1
    ca, server = (
        x509.load_pem_x509_certificate((made / file).read_bytes()).extensions
        for file in ("ca.crt", "server.pem")
    )
    issuer = server.get_extension_for_class(x509.AuthorityKeyIdentifier).value
    own = ca.get_extension_for_class(x509.SubjectKeyIdentifier).value
    assert issuer.key_identifier == own.key_identifier  # Python 3.13 asks for it


def test_a_certificate_is_refused_before_and_after_its_time(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    self_signed(tmp_path / "old.pem", now - timedelta(days=30), now - timedelta(days=1))
    with pytest.raises(KeyFileError, match=rf"expired on {now - timedelta(days=1):%Y-%m-%d}"):
        certificate.check_certificate(tmp_path / "old.pem")
    # It signed itself, so it is an authority: to renew it would refuse in the same words.
    with pytest.raises(KeyFileError, match="makes another with `fedda keys init` and hands it out"):
        certificate.check_certificate(tmp_path / "old.pem")
    self_signed(tmp_path / "new.pem", now + timedelta(days=2), now + timedelta(days=9))
    with pytest.raises(KeyFileError, match=r"valid from .*clock"):
        certificate.check_certificate(tmp_path / "new.pem")


def test_a_server_starts_with_a_certificate_only_that_it_can_use_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It admits sites' keys at 127.0.0.1, and would pass all of them over."""
    monkeypatch.setattr(certificate, "ALWAYS", ())
    certificate.init(tmp_path, ["other.example.org"])
    done = CliRunner().invoke(server, ["superlink", "--dir", str(tmp_path)])
    assert done.exit_code == 3, done.output
    assert "server.pem names other.example.org and not 127.0.0.1" in done.output
    remedy = f"`fedda keys renew --dir {tmp_path} --host other.example.org`"
    assert remedy in done.output
    bare = "server.pem names no host and not 127.0.0.1"
    certificate.renew(tmp_path)
    (tmp_path / "ca.key").unlink()  # as of one who keeps it elsewhere
    said = CliRunner().invoke(server, ["superlink", "--dir", str(tmp_path)]).output
    assert bare in said and "for which ca.key has to be put back there" in said
    certificate.init(tmp_path / "other")
    (tmp_path / "other" / "ca.crt").replace(tmp_path / "ca.crt")  # as from an older copy
    done = CliRunner().invoke(server, ["superlink", "--dir", str(tmp_path)])
    assert done.exit_code == 3 and f"server.pem is not signed by {tmp_path}/ca.crt" in done.output
    (tmp_path / "server.pem").unlink()
    done = CliRunner().invoke(server, ["superlink", "--dir", str(tmp_path)])
    assert done.exit_code == 3 and "`fedda keys renew" in done.output


@pytest.mark.parametrize("days", [29, 31])
def test_sites_and_server_warn_of_an_authority_that_expires_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], days: int
) -> None:
    monkeypatch.setattr(certificate, "CA_DAYS", days)
    certificate.init(tmp_path)
    key = keys.add(tmp_path, "clinic-a")
    for told in (_certificates, lambda at: _check_options(at / "ca.crt", key, False)):
        told(tmp_path)
        said = capsys.readouterr().err
        assert ("ca.crt expires on" in said and "hands it out" in said) == (days < 30)


def test_of_several_authorities_in_a_file_that_one_counts_which_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While one replaces another, each stands first somewhere, and the old one ends."""
    certificate.init(tmp_path / "new")
    new = (tmp_path / "new" / "ca.crt").read_bytes()
    monkeypatch.setattr(certificate, "CA_DAYS", 3)
    certificate.init(tmp_path)
    soon, ca = (tmp_path / "ca.crt").read_bytes(), tmp_path / "ca.crt"
    now = datetime.now(UTC)
    self_signed(tmp_path / "ended.pem", now - timedelta(days=30), now - timedelta(days=1))
    ended = (tmp_path / "ended.pem").read_bytes()
    for content in (soon + new, new + soon, ended + new, new + ended):
        ca.write_bytes(content)
        assert certificate.check_certificate(ca) == ""
    for content in (soon + new, new + soon):  # but the server's own is signed by that which ends
        ca.write_bytes(content)
        certificate.renew(tmp_path)
        _certificates(tmp_path)
        assert "ca.crt expires on" in capsys.readouterr().err
    for file in ("server.pem", "server.key"):
        (tmp_path / "new" / file).replace(tmp_path / file)
    _certificates(tmp_path)
    assert capsys.readouterr().err == ""
    ca.write_bytes(ended + ended)
    with pytest.raises(KeyFileError, match="expired on"):
        certificate.check_certificate(ca)
    server, chain = (tmp_path / "server.pem").read_bytes(), tmp_path / "chain.pem"
    chain.write_bytes(server + ended)  # of a chain each counts
    with pytest.raises(KeyFileError, match="expired on"):
        certificate.check_certificate(chain)


def test_a_certificate_is_renewed_where_the_authoritys_key_is(tmp_path: Path) -> None:
    certificate.init(tmp_path, ["hub.example.org"])
    (tmp_path / "ca.key").unlink()
    with pytest.raises(KeyFileError, match=r"put it back until this is done; or renew where"):
        certificate.renew(tmp_path)


def test_an_authority_that_is_there_has_a_servers_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in between, it is made anew: what makes keys once looks for ca.crt alone."""
    write = certificate.write_pair

    def killed(*files: Path | bytes) -> None:
        if (tmp_path / "ca.crt").exists() or (tmp_path / "server.pem").exists():
            raise KeyboardInterrupt
        write(*files)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(certificate, "write_pair", killed)
    with pytest.raises(KeyboardInterrupt):
        certificate.init(tmp_path)
    assert not (tmp_path / "ca.crt").exists()
    monkeypatch.setattr(certificate, "write_pair", write)
    certificate.init(tmp_path)
    _certificates(tmp_path)


def test_keys_are_written_both_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that became full lost the old key, or left a half new one."""
    certificate.init(tmp_path)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    really = Path.write_bytes

    def full(path: Path, content: bytes) -> int:
        if "CERTIFICATE" in content.decode() or "ecdsa" in content.decode():
            raise OSError(errno.ENOSPC, "No space left on device")
        return really(path, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    for make in (lambda: certificate.renew(tmp_path), lambda: keys.request(tmp_path, "clinic-a")):
        with pytest.raises(OSError, match="No space"):
            make()
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize("days", [29, 31])
def test_a_server_warns_of_a_certificate_that_expires_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], days: int
) -> None:
    monkeypatch.setattr(certificate, "SERVER_DAYS", days)
    certificate.init(tmp_path, ["hub.example.org", "10.1.2.3"])
    _certificates(tmp_path)
    said = capsys.readouterr().err
    assert bool(said) == (days < 30)
    if said:
        ends = datetime.now(UTC) + timedelta(days=days)
        assert said.startswith(f"warning: {tmp_path}/server.pem expires on {ends:%Y-%m-%d}")
        assert said.count("\n") == 1
        assert f"`fedda keys renew --dir {tmp_path} --host hub.example.org --host 10.1.2.3`" in said


def test_a_server_warns_of_a_key_that_others_can_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    certificate.init(tmp_path)
    (tmp_path / "server.key").chmod(0o644)
    _certificates(tmp_path)
    assert f"`chmod 600 {tmp_path / 'server.key'}`" in capsys.readouterr().err


def test_a_file_that_is_missing_or_not_the_one_that_is_needed_is_refused(made: Path) -> None:
    with pytest.raises(KeyFileError, match="not the private key of"):
        certificate.check_certificate(made / "server.pem", made / "ca.key")
    with pytest.raises(KeyFileError, match="not a PEM certificate: give what `fedda keys init`"):
        certificate.check_certificate(made / "nodes" / "clinic-a.pub")
    with pytest.raises(KeyFileError, match="cannot be read"):
        certificate.check_certificate(made / "nothing.pem")


def test_renewing_keeps_the_authority(tmp_path: Path) -> None:
    certificate.init(tmp_path)
    before = certified(tmp_path / "server.pem")
    certificate.renew(tmp_path, ["new.example.org"])
    after = certified(tmp_path / "server.pem")
    after.verify_directly_issued_by(certified(tmp_path / "ca.crt"))
    assert after.serial_number != before.serial_number
    certificate.check_certificate(tmp_path / "server.pem", tmp_path / "server.key")


@pytest.mark.parametrize("host", ["https://hub", "hub:8443", "a b"])
def test_a_host_is_a_bare_name(tmp_path: Path, host: str) -> None:
    with pytest.raises(KeyFileError, match="neither a host name nor an IP address"):
        certificate.init(tmp_path, [host])
    assert list(tmp_path.iterdir()) == []


def test_other_kinds_of_keys_are_refused(tmp_path: Path, made: Path) -> None:
    key = rsa.generate_private_key(65537, 2048)
    path = tmp_path / "rsa"
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.OpenSSH,
            serialization.NoEncryption(),
        )
    )
    with pytest.raises(KeyFileError, match="not elliptic-curve"):
        keys.load_node_key(path)
    with pytest.raises(KeyFileError, match="not an OpenSSH private key"):
        keys.load_node_key(made / "nodes" / "clinic-a.pub")


def test_the_commands_make_list_and_revoke_or_end_with_a_sentence(tmp_path: Path) -> None:
    run, hub = CliRunner(), str(tmp_path / "hub")
    made = run.invoke(server, ["keys", "init", "--dir", hub, "--host", "hub.example.org"])
    assert made.exit_code == 0
    again = run.invoke(server, ["keys", "init", "--dir", hub])
    assert again.exit_code == 3 and "exists already" in again.output
    nowhere = run.invoke(server, ["keys", "list", "--dir", str(tmp_path / "nowhere")])
    assert nowhere.exit_code == 3 and "there is no folder" in nowhere.output
    assert run.invoke(server, ["keys", "add", "clinic-a", "--dir", hub]).exit_code == 0
    assert "clinic-a" in run.invoke(server, ["keys", "list", "--dir", hub]).output
    assert run.invoke(server, ["keys", "revoke", "clinic-a", "--dir", hub]).exit_code == 0
    assert run.invoke(server, ["keys", "list", "--dir", hub]).output.strip() == "1 revoked"


# ---- requests ------------------------------------------------------------------------------------


def asked(folder: Path, name: str = "clinic-a", *options: str) -> tuple[Path, str]:
    """Make a request at a site -> its file and the fingerprint that the site is shown."""
    done = CliRunner().invoke(server, ["keys", "request", name, "--out", str(folder), *options])
    assert done.exit_code == 0, done.output
    fingerprint = next(line for line in done.output.splitlines() if line.startswith("SHA256:"))
    return folder / f"{name}.pub", fingerprint.partition(": ")[0]


def signed(request: Path, hub: Path, *options: str, answer: str | None = None) -> tuple[int, str]:
    words = ["keys", "sign", str(request), "--dir", str(hub), *options]
    done = CliRunner().invoke(server, words, answer)
    return done.exit_code, " ".join(done.output.split())


def forged(path: Path, key: ec.EllipticCurvePrivateKey, said: str) -> Path:
    """Write a public key whose comment says anything."""
    line = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    path.write_bytes(line + f" {said}\n".encode())
    return path


def test_a_site_is_admitted_and_its_private_key_stays_where_it_was_made(tmp_path: Path) -> None:
    site, hub = tmp_path / "site", tmp_path / "hub"
    request, fingerprint = asked(site, "clinic-a", "--role", "source")
    private = keys.load_node_key(site / "clinic-a")
    assert stat.S_IMODE((site / "clinic-a").stat().st_mode) == 0o600
    code, said = signed(request, hub, "--fingerprint", fingerprint)
    assert code == 0 and f"clinic-a, source only: {fingerprint}" in said
    assert keys.public_keys(hub) == {"clinic-a": private.public_key()}
    assert keys.role(hub / "nodes" / "clinic-a.pub") == "source"
    assert keys.peers(hub / "peers") == {"clinic-a": private.public_key()}
    assert b"PRIVATE" not in request.read_bytes()
    assert not any(b"PRIVATE" in f.read_bytes() for f in hub.rglob("*") if f.is_file())


def test_the_fingerprint_is_the_one_that_ssh_shows() -> None:
    line = "ecdsa-sha2-nistp384 " + (
        "AAAAE2VjZHNhLXNoYTItbmlzdHAzODQAAAAIbmlzdHAzODQAAABhBNKnkPvARm+HytELGj1hy6mz7Wqu"
        "pznUsiNhnqPpTamA/BfgrbUPzyCh3W4+7TnPX/gff8dkSDKZFQ+2mUpQFf4V1TtFVlbLRn9TVBdt7arO"
        "4dHHtNsnVyqBac2/1WrvQw=="
    )
    key = serialization.load_ssh_public_key(line.encode())
    assert isinstance(key, ec.EllipticCurvePublicKey)
    shown = "SHA256:RQP3JIPGuHTQEE2l/OB/o/UV7nQVLsIn7YVqIBwCtvc"  # ssh-keygen -l
    assert keys.fingerprint(key) == shown


def test_a_request_needs_the_fingerprint_that_the_site_reads_out(tmp_path: Path) -> None:
    request, fingerprint = asked(tmp_path / "site")
    _, other = asked(tmp_path / "thief")
    hub = tmp_path / "hub"
    code, said = signed(request, hub)
    assert code == 3 and "nobody compared the fingerprint of clinic-a" in said
    code, said = signed(request, hub, "--fingerprint", other)
    assert code == 3 and "the key was exchanged on its way" in said
    code, said = signed(request, hub, "--fingerprint", fingerprint[:-1])
    assert code == 3
    assert not hub.exists()
    assert signed(request, hub, "--yes")[0] == 0


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("n\n", 3), ("\n", 3)])
def test_at_a_terminal_it_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, code: int
) -> None:
    request, fingerprint = asked(tmp_path)
    monkeypatch.setattr("fedda.cli.keys._at_terminal", lambda: True)
    found, said = signed(request, tmp_path / "hub", answer=answer)
    assert found == code and fingerprint in said
    assert (tmp_path / "hub" / "nodes" / "clinic-a.pub").exists() == (code == 0)


def test_what_is_no_public_key_is_refused(tmp_path: Path) -> None:
    request, _ = asked(tmp_path)
    for nothing in (b"", b"\xff" * 99, (tmp_path / "clinic-a").read_bytes()):
        request.write_bytes(nothing)
        with pytest.raises(KeyFileError, match="is not an OpenSSH public key"):
            keys.read_request(request)


def test_a_name_and_a_key_are_admitted_once(tmp_path: Path) -> None:
    request, _ = asked(tmp_path)
    hub, key = tmp_path / "hub", keys.load_node_key(tmp_path / "clinic-a")
    assert signed(request, hub, "--yes")[0] == 0
    code, said = signed(request, hub, "--yes")
    assert code == 3 and "clinic-a.pub exists already" in said
    code, said = signed(forged(tmp_path / "b", key, "clinic-b"), hub, "--yes")
    assert code == 3 and "this key is registered under the name clinic-a" in said
    with pytest.raises(KeyFileError, match="under the name clinic-a"):
        keys.admit(hub, "clinic-b", hub / "nodes" / "clinic-a.pub")
    keys.revoke(hub, "clinic-a")
    code, said = signed(request, hub, "--yes")
    assert code == 3 and "this key was revoked" in said
    assert keys.names(hub) == []


def test_requests_of_other_names_and_texts_are_refused(tmp_path: Path) -> None:
    path, own = tmp_path / "x.pub", ec.generate_private_key(ec.SECP256R1())
    for name in ("../a", "", "revoked"):
        with pytest.raises(KeyFileError, match="cannot name a site"):
            keys.read_request(forged(path, own, name))
    for more in ("role=boss", "role=source x", "b"):
        with pytest.raises(KeyFileError, match="more than a site's name and its role"):
            keys.read_request(forged(path, own, f"a {more}"))
    code, said = signed(asked(tmp_path, "c", "--role", "source")[0], tmp_path, "--role", "target")
    assert code == 3 and "asks to be a source only" in said


def test_a_request_never_replaces_a_key(tmp_path: Path) -> None:
    asked(tmp_path)
    before = (tmp_path / "clinic-a").read_bytes()
    with pytest.raises(KeyFileError, match="exists already"):
        keys.request(tmp_path, "clinic-a")
    (tmp_path / "clinic-a.pub").unlink()
    with pytest.raises(KeyFileError, match="exists already"):
        keys.request(tmp_path, "clinic-a")
    assert (tmp_path / "clinic-a").read_bytes() == before
    with pytest.raises(KeyFileError, match="cannot name a site"):
        keys.request(tmp_path, "../clinic-b")


@pytest.mark.parametrize(
    "written",
    [
        lambda pem: pem.replace(b"\n", b"\r\n"),
        lambda pem: b"\xef\xbb\xbf" + pem,
        lambda pem: b"\xff\xfe" + pem.decode().encode("utf-16-le"),
        lambda pem: ssl.PEM_cert_to_DER_cert(pem.decode()),
    ],
)
def test_a_certificate_is_read_as_windows_writes_it(
    made: Path, tmp_path: Path, written: Callable[[bytes], bytes]
) -> None:
    file = tmp_path / "ca.crt"
    file.write_bytes(written((made / "ca.crt").read_bytes()))
    certificate.check_certificate(file)
    ssl.create_default_context(cadata=certificate.pem(file).decode("ascii"))


def test_other_accounts_can_change_no_key_whatever_the_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["fedda", "keys", "init", "--dir", str(tmp_path / "hub")])
    before = os.umask(0)
    try:
        with pytest.raises(SystemExit):
            cli.main()
        keys.add(tmp_path / "hub", "anna")
    finally:
        os.umask(before)
    made = [tmp_path / "hub", *(tmp_path / "hub").rglob("*")]
    assert len(made) > 6 and not any(path.stat().st_mode & 0o002 for path in made)
