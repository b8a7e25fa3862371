"""Settings every test shares."""

from __future__ import annotations

import os

from hypothesis import settings

# Wall-clock deadlines fail on a busy machine. In CI the examples are the same at every run, so that
# a change is judged by what it changed; elsewhere they are fresh.
settings.register_profile(
    "lockstep", deadline=None, derandomize="CI" in os.environ, print_blob=True
)
settings.load_profile("lockstep")
