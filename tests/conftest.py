"""What holds for every test: Ctrl-C reaches children, and property tests neither race the clock nor, in CI, change from run to run."""

import os
import signal

from hypothesis import settings

# a run started in the background by a shell ignores Ctrl-C, and so would every process that the tests start and interrupt
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") == "true" else "here")
