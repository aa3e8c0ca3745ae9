"""/v1/models, and a base URL without v1."""

import openai
import pytest
from support.serving import said


def test_models(here, of_openai, of_anthropic):
    """For both clients."""
    assert of_openai.models.retrieve("scripted").id == "scripted"
    with pytest.raises(openai.NotFoundError, match="The model must be scripted"):
        of_openai.models.retrieve("another/model")
    assert of_anthropic.models.list().data[0].display_name == "scripted"


def test_a_base_url_without_v1(here):
    """Clients leave it out."""
    here.says("ok")
    with openai.OpenAI(base_url=here.url, api_key="none", max_retries=0) as client:
        assert (
            client.chat.completions.create(model="m", messages=said("a")).choices[0].message.content == "ok"
        )
        assert client.models.list().data[0].id == "scripted"
