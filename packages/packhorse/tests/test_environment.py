"""Which variables are secrets."""

from __future__ import annotations

from packhorse.environment import secret_names, without_secrets


def test_secrets_are_recognized_by_their_names() -> None:
    plain = {"PATH": "/bin", "HOME": "/", "CC": "gcc", "OMP_NUM_THREADS": "2"}
    secret = {"PACKHORSE_API_KEY": "a", "HF_TOKEN": "b", "db_password": "c", "RAY_AUTH_TOKEN": "d"}
    assert without_secrets(plain | secret) == plain
    assert secret_names(plain | secret) == list(secret)
