"""Ctrl-C in tests that themselves run in the background, where shells have it ignored."""

import signal


def heed_interrupts():
    """For a child process, before it starts: what is ignored stays so across exec."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
