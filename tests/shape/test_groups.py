"""With `-n`, the tests of a file stay on one worker, and all of the live cluster's on one.

pytest-xdist 3.8.0 loses its groups under pytest 9.2.0 without a word: two workers then start a live
cluster each."""

from __future__ import annotations

import os

import pytest


def test_workers_know_the_groups(request):
    if "PYTEST_XDIST_WORKER" not in os.environ or not request.config.option.loadgroup:
        pytest.skip("groups matter with -n and --dist loadgroup alone")
    assert request.node.nodeid.endswith("@" + str(request.path))
