"""/v1/completions: texts and tokens, one or several."""

from support.asked import post


def test_lists_of_prompts(here, of_openai):
    """Texts and tokens, with `n` answers to each."""
    here.says(*"abcd")
    ids = here.served.template.tokenizer("why").input_ids
    answer = of_openai.completions.create(model="m", prompt=["who", "what"], n=2)
    assert [(choice.index, choice.text) for choice in answer.choices] == [*enumerate("abcd")]
    assert answer.usage.prompt_tokens == 7
    here.says("e")
    assert of_openai.completions.create(model="m", prompt=ids).choices[0].text == "e"
    assert of_openai.completions.create(model="m", prompt=[ids, ids]).choices[1].text == "e"
    assert here.generator.prompts == ["why"] * 3
    for prompt in ([], [""], [[]], [1 << 40], [-1], ["a", 5], [True]):
        assert post(here, "/v1/completions", {"prompt": prompt})[0] == 400
