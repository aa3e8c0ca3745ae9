"""Fixtures: models of letters and of the printable characters, and a server of these, for tests that ask one.

torch is asked for MPS by what these import, which must come after the simulator.
"""

import importlib

import pytest


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Of a model whose tokens are letters, for all tests that do not change it."""
    from support import serving

    return serving.chat_checkpoint(tmp_path_factory.mktemp("letters") / "model")


@pytest.fixture(scope="session")
def printable(tmp_path_factory):
    """The model's checkpoint."""
    from support import serving

    return serving.printable_checkpoint(tmp_path_factory.mktemp("printable") / "model")


@pytest.fixture(
    scope="module",
    params=[(), pytest.param(("--speculative", "none"), marks=pytest.mark.sweep)],
    ids=["as it comes", "without drafts"],
)
def client(request, printable):
    """Of a server as it comes, and of one that drafts no tokens; a process has one server at a time."""
    from support import serving

    with serving.client_of(printable, *serving.QUANTISED, *request.param) as client:
        yield client


@pytest.fixture(scope="module")
def here():
    """A server whose answers are written by hand."""
    from support import scripted

    with scripted.server() as running:
        yield running


@pytest.fixture
def of_openai(here):
    """OpenAI's client of it."""
    import openai

    with openai.OpenAI(base_url=f"{here.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


@pytest.fixture(scope="session")
def anthropic():
    """Imported by the process that runs tests of it alone: that takes seconds."""
    return importlib.import_module("anthropic")


@pytest.fixture
def of_anthropic(here, anthropic):
    """Anthropic's client of it."""
    with anthropic.Anthropic(base_url=here.url, api_key="none", max_retries=0, timeout=20) as client:
        yield client
