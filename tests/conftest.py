"""What is slow starts first."""

import pytest

import whole_check


def pytest_collection_finish(session: pytest.Session) -> None:
    """In a run of all tests. A run of a few waits for the check where it needs it."""
    wanted = any(item.path.name == "test_ops.py" for item in session.items)
    if wanted and len(session.items) > 100 and not session.config.option.collectonly:
        whole_check.started()
