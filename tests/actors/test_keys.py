"""Keys of hosts: secret ones are readable by their owner only, and none is ever replaced."""

from pathlib import Path

import pytest

from vla_rl.actors.keys import make_keys, read_keys, read_public_key


def test_each_name_has_a_secret_pair_and_a_public_key(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", ["desk"])
    for name in ("server", "desk"):
        secret = tmp_path / "keys" / f"{name}.key"
        assert secret.stat().st_mode & 0o777 == 0o600
        public = read_public_key(secret.with_suffix(".pub"))
        assert read_keys(secret).public == public
    assert read_keys(secret).secret != public


def test_a_key_is_never_replaced_and_the_servers_is_made_once(tmp_path: Path) -> None:
    make_keys(tmp_path, ["desk"])
    server = read_keys(tmp_path / "server.key")
    make_keys(tmp_path, ["other"])
    assert read_keys(tmp_path / "server.key") == server
    with pytest.raises(FileExistsError, match=r"desk\.key"):
        make_keys(tmp_path, ["desk"])


def test_another_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.key").write_text("no JSON")
    (tmp_path / "x.pub").write_text("short\n")
    with pytest.raises(ValueError, match=r"x\.key is not a key file"):
        read_keys(tmp_path / "x.key")
    with pytest.raises(ValueError, match=r"x\.pub holds 5 characters, expected a public key of 40"):
        read_public_key(tmp_path / "x.pub")
