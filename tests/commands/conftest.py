"""A server of a model whose tokens are the printable characters, for all tests that ask one.

torch is asked for MPS by what these import, which must come after the simulator.
"""

import pytest


@pytest.fixture(scope="session")
def printable(tmp_path_factory):
    """The model's checkpoint."""
    from support import serving

    return serving.printable_checkpoint(tmp_path_factory.mktemp("printable") / "model")


@pytest.fixture(scope="module")
def client(printable):
    """Of a server that also guesses tokens; a process has one server at a time."""
    from support import serving

    with serving.client_of(printable, *serving.QUANTISED, "--prompt-lookup", 2) as client:
        yield client
