"""A run started in the background by a shell ignores Ctrl-C, and so would every process that the tests start and interrupt."""

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
