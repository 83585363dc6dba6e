"""Where the daemon is looked for."""

from __future__ import annotations

from colibri.protocol import default_socket_path


def test_the_variable_wins() -> None:
    assert default_socket_path({"COLIBRI_SOCKET": "/x/y.sock", "XDG_RUNTIME_DIR": "/run/user/7"}) == "/x/y.sock"


def test_then_the_users_runtime_folder() -> None:
    assert default_socket_path({"COLIBRI_SOCKET": "", "XDG_RUNTIME_DIR": "/run/user/7"}) == (
        "/run/user/7/colibri/colibri.sock"
    )


def test_then_the_system_service() -> None:
    assert default_socket_path({}) == "/run/colibri/colibri.sock"
