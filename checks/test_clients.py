"""The page of clients says what the scripts call and what is known not to work."""

from __future__ import annotations

from .outside import client_scripts


def test_the_page_is_what_the_scripts_would_write() -> None:
    """Write it anew by `make test-outside PACKHORSE_TEST_CLIENTS=1`."""
    known = {(difference.client, difference.method) for difference in client_scripts.differences()}
    works = {row.id: (row.client, row.method) not in known for row in client_scripts.rows()}
    assert client_scripts.PAGE.read_text("utf-8") == client_scripts.page(works)
    works[client_scripts.rows()[0].id] ^= True  # the control
    assert client_scripts.PAGE.read_text("utf-8") != client_scripts.page(works)


def test_every_difference_is_about_a_script() -> None:
    methods = {(row.client, row.method) for row in client_scripts.rows()}
    listed = [(difference.client, difference.method) for difference in client_scripts.differences()]
    assert set(listed) <= methods and len(listed) == len(set(listed))


def test_every_method_of_a_script_has_a_name_of_its_own() -> None:
    names = [row.id for row in client_scripts.rows()]
    assert len(names) == len(set(names)) and len(names) > 100


def test_every_package_is_pinned() -> None:
    for group in client_scripts.groups():
        versions = client_scripts.pins(group).values()
        assert versions and all(version[0].isdigit() for version in versions)
